"""The reference for whoever looks inside operators, and word of it for whoever reads a model's forward.

A reader of operators would have to recognise our formula, rescaling and all; it is told instead what was normalised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from normkit.kernels import reference
from normkit.spec import NormSpec

Tell = Callable[[Tensor, Tensor, str, Sequence[int], float], None]


class _Ears(threading.local):
    """Who listens in this thread; set in ``__init__`` for the reason that `normkit.kernels.registry` gives."""

    def __init__(self) -> None:
        self.tell: Tell | None = None


_ears = _Ears()


@contextmanager
def listening(tell: Tell) -> Generator[None]:
    """Call ``tell(x, y, kind, axes, eps)`` after each norm that the reference computes in this thread."""
    before, _ears.tell = _ears.tell, tell
    try:
        yield
    finally:
        _ears.tell = before


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: Sequence[int],
    eps: float,
    kind: str = "",
    **rest: Any,
) -> Tensor:
    """Compute it as `normkit.kernels.reference.normalize`; ``kind`` is the spec's unless the norm crosses positions."""
    y = reference.normalize(x, spec, weight, bias, axes=axes, eps=eps, **rest)
    if _ears.tell is not None:
        _ears.tell(x, y, kind or spec.kind, axes, eps)
    return y
