"""What a contender is: a name, the machines it runs on, why it cannot take a case, and its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from normkit.bench.shapes import Case, Inputs

CPU, GPU = "CPUs", "GPUs"


@dataclass(frozen=True)
class Prepared:
    """A forward ready to be called; ``into`` holds its results where it writes into given outputs."""

    call: Callable[[], Any]
    into: tuple[Tensor, ...] | None = None


class Peer(ABC):
    """A contender."""

    name: ClassVar[str]
    ops: ClassVar[tuple[str, ...]] = ("rms", "layer", "add_rms")
    machines: ClassVar[tuple[str, ...]] = (CPU, GPU)
    given: ClassVar[bool] = False  # writes into an output that exists

    def missing(self, case: Case) -> str | None:
        """Return why a case cannot be timed, or None: for the machine, else as `why_not` has it."""
        if (GPU if case.gpu else CPU) not in self.machines:
            return f"runs on {' and '.join(self.machines)} only"
        return self.why_not(case)

    def why_not(self, case: Case) -> str | None:
        """Return why a case cannot be timed here, or None."""
        return None

    @abstractmethod
    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the forward on these inputs."""
