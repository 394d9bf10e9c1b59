"""What a kernel is asked, and what a kernel is: the contract between the registry and what it chooses from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from normkit.kernels.statistics import Moments
from normkit.spec import NormSpec


@dataclass(frozen=True)
class Request:
    """What is to be computed, as far as a kernel's choice depends on it. Parameters are already aligned to x,
    or of one value a channel where statistics cross positions.

    With a gate, x and the gate are (…, groups, width): one statistic for every group of a position.
    """

    spec: NormSpec
    x: Tensor
    axes: tuple[int, ...]
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    gate: Tensor | None = None
    masked: bool = False
    channel: int | None = None  # the axis that stays apart where statistics cross positions; None for row norms

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return what there is of x, weight, bias, residual and gate, by name."""
        every = {"x": self.x, "weight": self.weight, "bias": self.bias, "residual": self.residual, "gate": self.gate}
        return {name: t for name, t in every.items() if t is not None}


def _cannot_move(mean: Tensor, var: Tensor, momentum: float) -> bool:
    return False


class Found(NamedTuple):
    """The moments behind a norm's statistics, for whoever asks.

    Args:
        moments: makes them.
        move: blends them into (running mean, running variance) in place with a momentum, bit for bit as operators on
            ``moments()`` would; says whether it did, and leaves both untouched where it cannot.
        counted: how many values each covers, where that is one number and known without asking a device.
    """

    moments: Callable[[], Moments]
    move: Callable[[Tensor, Tensor, float], bool] = _cannot_move
    counted: int | None = None


@dataclass(frozen=True)
class Columns:
    """A way to compute norms whose statistics cross positions.

    Args:
        forward: (x, weight, bias, channel=, groups=, per_sample=, eps=, mask=) → (y, table, plan, found): statistics
            and whatever else a backward needs, and the `Found` behind them.
        backward: (x, weight, dy, table, plan, wanted=, total=) → (dx, dweight, dbias), the last two float32 of shape
            (C,); total turns sums over x into means over all that share its statistics, where other ranks hold some.
        apply: (x, table, weight, bias, channel=, mask=) → (y, plan), with statistics given as a table (1, 4, C) of
            mean, remainder, 1/√(variance + ε) and 1.
        apply_backward: as backward, of statistics that x did not make.
        moments: (x, channel=, per_sample=, mask=) → `Moments` of every channel, or sample and channel.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    apply: Callable[..., Any]
    apply_backward: Callable[..., Any]
    moments: Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A way to compute row norms.

    Args:
        name: how `use`, `explain` and reports call it.
        refuses: returns why it cannot take a request, or None if it can.
        forward: (x, spec, weight, bias, axes=, eps=, out=, keep=) → (y, statistics or None).
        add_forward: (x, residual, spec, weight, bias, alpha=, beta=, axes=, eps=, keep=, out=) → (y, sum, statistics or
            None); out is (y, sum).
        backward: (x, spec, weight, bias, dy, statistics, axes=, wanted=, extra=) → (dx, dweight, dbias).
        quick: (request) → a function of (x, weight, bias, eps, out, keep) for contiguous rows of these dtypes, which
            returns (y, statistics or None).
        quick_add: (request) → a function of (x, residual, weight, bias, eps, alpha, beta, keep, out=), likewise, which
            returns (y, sum, statistics or None).
        gated_forward: (x, gate, spec, weight, axes=, eps=, keep=) → (y, statistics or None).
        gated_backward: (x, gate, spec, weight, dy, statistics, axes=, wanted=) → (dx, dgate, dweight), wanted in that
            order.
        columns: norms across positions; None where it has none, whose requests it must then refuse.
        devices: the types of devices that it is for: of tensors elsewhere it is asked only by name.
    """

    name: str
    refuses: Callable[[Request], str | None]
    forward: Callable[..., Any]
    add_forward: Callable[..., Any]
    backward: Callable[..., Any]
    quick: Callable[[Request], Callable[..., Any]]
    quick_add: Callable[[Request], Callable[..., Any]]
    gated_forward: Callable[..., Any]
    gated_backward: Callable[..., Any]
    columns: Columns | None = None
    devices: tuple[str, ...] = ()
