"""One norm of a model, as an audit lists it, and what a rule may look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conventions import NAMED
from normkit.spec import NormSpec
from normkit.surgery.flow.positions import Position
from normkit.surgery.flow.record import Flow
from normkit.surgery.flow.sightings import Sighting
from normkit.surgery.flow.stream import Stream


@dataclass(frozen=True)
class Norm:
    """A norm of a model: a module, or a function call inside a larger forward.

    Args:
        name: the module's name; for a function call, the module in whose forward it stands.
        class_name: the class of that module.
        kind: ``"layer"``, ``"rms"``, ``"l2"``, ``"group"``, ``"instance"``, ``"batch"``; None where nothing tells.
        spec: its conventions, found by behaviour; None if they could not be.
        unidentified: why there is no spec.
        eps: ε, found by behaviour or read from the operators that ran.
        width: elements per statistic.
        weight_dtype, weight_shape: of its first parameter or buffer.
        input_dtype, output_dtype: in the forward that was watched.
        calls: how often it ran in that forward; None if there was none.
        positions: what it is for, every different one.
        function: it stands as a function call in the forward of ``name``.
        parameters: names of the parameters that it scales and shifts with.
        aliases: further names of the same module.
        eps_is_default: ε was left to PyTorch (None), which takes float32's machine epsilon.
    """

    name: str
    class_name: str
    kind: str | None = None
    spec: NormSpec | None = None
    unidentified: str = ""
    eps: float | None = None
    width: int | None = None
    weight_dtype: torch.dtype | None = None
    weight_shape: tuple[int, ...] | None = None
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    calls: int | None = None
    positions: tuple[Position, ...] = ()
    function: bool = False
    parameters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    eps_is_default: bool = False

    @property
    def role(self) -> str:
        """Its name with every number starred: norms of one role do the same thing in different layers."""
        return role_of(self.name)

    @property
    def convention(self) -> str:
        """The name of its spec, or the spec's code."""
        if self.spec is None:
            return ""
        return next((name for name, spec in NAMED.items() if spec == self.spec), self.spec.code)


def role_of(name: str) -> str:
    """Return a module's name with every number starred.

    Example:
        >>> role_of("model.layers.12.norm1")
        'model.layers.*.norm1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@dataclass
class Inspection:
    """Everything that a rule may look at."""

    model: nn.Module
    norms: Sequence[Norm]
    flow: Flow | None = None
    sightings: Sequence[Sighting] = ()
    streams: Sequence[Stream] = ()
    positions: dict[int, Position] = field(default_factory=dict[int, Position])
    own_example: bool = False

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))

    def parent_calls(self, name: str) -> int:
        """Return how often the module around this one was called."""
        parent = name.rpartition(".")[0]
        assert self.flow is not None
        while parent and isinstance(self.modules.get(parent), (nn.ModuleList, nn.ModuleDict)):
            parent = parent.rpartition(".")[0]
        return max(1, len(self.flow.calls_of(parent))) if parent in self.modules else 1

    def was_called(self, name: str) -> bool:
        """Return whether the module with this name ran at all."""
        return self.flow is not None and bool(self.flow.calls_of(name))

    def nearest_config(self, name: str) -> Any:
        """Return the config of the innermost module around this one that has one."""
        while True:
            config = getattr(self.modules.get(name), "config", None)
            if config is not None or not name:
                return config
            name = name.rpartition(".")[0]

    def value(self, parameter: str) -> Tensor | None:
        """Return a parameter's values in float32, on the CPU; None where there are none to read (meta, integer)."""
        tensor = self.parameters.get(parameter)
        if tensor is None or tensor.is_meta or not tensor.is_floating_point() or tensor.numel() == 0:
            return None
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
        return whole.detach().float().cpu()
