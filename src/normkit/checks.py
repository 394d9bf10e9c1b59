"""What may come in, and the messages when something else does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _TorchDefault:
    """nn.RMSNorm's ``eps=None``."""

    _instance: _TorchDefault | None = None

    def __new__(cls) -> _TorchDefault:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "normkit.TORCH_DEFAULT"

    def __reduce__(self) -> str:
        return "TORCH_DEFAULT"

    def __deepcopy__(self, memo: object) -> _TorchDefault:
        return self


TORCH_DEFAULT: Final = _TorchDefault()
"""ε as ``torch.nn.RMSNorm(eps=None)`` resolves it: float32's 1.19e-7 for float32, bfloat16 and float16 alike
(measured on torch 2.13: a bfloat16 row of 1e-3 comes out as 0.945, which is 1/√(1 + 0.119)), float64's 2.2e-16 for
float64."""

Eps = float | _TorchDefault


def check_eps(eps: object, name: str) -> Eps:
    """Return ε unchanged, or raise for None, non-numbers, negatives, NaN and inf."""
    if isinstance(eps, _TorchDefault):
        return eps
    if eps is None:
        raise ValueError(
            f"{name}: eps=None is ambiguous. Pass a number, leave eps out for this function's default, "
            "or pass normkit.TORCH_DEFAULT for what nn.RMSNorm makes of None"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: eps must be a Python number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:  # also false for NaN; math.isfinite would break a graph with a symbolic eps
        raise ValueError(f"{name}: eps must be finite and not negative, got {eps}")
    return float(eps)


def eps_value(eps: Eps, dtype: torch.dtype) -> float:
    """Return ε as a number for input of ``dtype``."""
    if isinstance(eps, _TorchDefault):
        return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return eps


def check_float(x: object, name: str, what: str = "x") -> Tensor:
    """Return ``x``, or raise for what is no real floating-point tensor of 16 to 64 bits."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {what} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        remedy = "take .real and .imag apart" if x.dtype.is_complex else f"convert it first, e.g. {what}.float()"
        raise TypeError(f"{name}: {what} must be float16, bfloat16, float32 or float64, got {x.dtype}; {remedy}")
    check_nested(x, name, what)
    return x


def check_nested(x: Tensor, name: str, what: str = "x") -> None:
    """Refuse nested tensors of the old layout, of which PyTorch knows hardly any operator."""
    if x.is_nested and x.layout == torch.strided:
        raise TypeError(
            f"{name}: {what} is a nested tensor of layout torch.strided; make it jagged, "
            "torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged), which every norm takes"
        )


def check_axes(axes: int | Sequence[int], x: Tensor, name: str) -> tuple[int, ...]:
    """Return axes as sorted, non-negative, distinct numbers."""
    given = (axes,) if isinstance(axes, int) else axes
    if not isinstance(given, Sequence) or not all(isinstance(axis, int) for axis in given):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: axis must be an int or a sequence of ints, got {axes!r}")
    given = tuple(given)
    if not given:
        raise ValueError(f"{name}: axis is empty; a statistic needs at least one axis")
    for axis in given:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"{name}: axis {axis} is out of range for x of shape {tuple(x.shape)}")
    # By comparison, not sorted(): an axis may be a symbol while a compiler traces this.
    ordered = tuple(d for d in range(x.dim()) if any(axis % x.dim() == d for axis in given))
    if len(ordered) < len(given):
        raise ValueError(f"{name}: axis {given} names one axis twice for x of shape {tuple(x.shape)}")
    return ordered


def check_channel(channel_axis: int, x: Tensor, name: str) -> int:
    """Return the channel axis of ``x``, whose first axis is the batch, as a number from 1."""
    if x.dim() < 2:
        raise ValueError(f"{name}: x needs a batch and a channel axis, got shape {tuple(x.shape)}")
    (channel,) = check_axes(channel_axis, x, name)
    if channel == 0:
        raise ValueError(f"{name}: channel_axis 0 is the batch axis of x of shape {tuple(x.shape)}")
    return channel


def align_parameter(p: Tensor | None, x: Tensor, axes: tuple[int, ...], name: str, what: str) -> Tensor | None:
    """Return a weight or bias shaped to broadcast against ``x``.

    A parameter with the shape of x's normalised axes is laid along them; anything else must broadcast to x by
    PyTorch's rules (per-head (H, D), per-sample (N, 1, C), a scalar).
    """
    if p is None:
        return None
    if check_float(p, name, what).is_nested:
        raise TypeError(f"{name}: {what} is a nested tensor; expected a dense one that is alike for all samples")
    if tuple(p.shape) == tuple(x.shape[a] for a in axes):
        return p.reshape([x.shape[d] if d in axes else 1 for d in range(x.dim())])
    try:
        fits = torch.broadcast_shapes(p.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: {what} of shape {tuple(p.shape)} fits neither the normalised axes "
            f"{tuple(x.shape[a] for a in axes)} nor, by broadcasting, x of shape {tuple(x.shape)}"
        )
    # PyTorch lets a tensor without axes give way in type promotion; as a weight it counts like any other.
    return p.reshape([1] * x.dim()) if p.dim() == 0 else p


def check_mask(mask: Tensor | None, x: Tensor, channel_axis: int, name: str) -> Tensor | None:
    """Return a boolean mask with a channel axis of size 1 inserted, broadcastable to x."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{name}: mask must be a bool tensor (True = real position), "
            f"got {getattr(mask, 'dtype', type(mask).__name__)}"
        )
    if mask.is_nested:
        raise TypeError(f"{name}: mask is a nested tensor; give a dense one, or a jagged x without a mask")
    positions = [size for axis, size in enumerate(x.shape) if axis != channel_axis]
    if mask.dim() != len(positions) or any(m not in (1, p) for m, p in zip(mask.shape, positions, strict=True)):
        raise ValueError(
            f"{name}: mask must have x's shape without its channel axis, {tuple(positions)}, "
            f"or broadcast to it, got {tuple(mask.shape)}"
        )
    return mask.unsqueeze(channel_axis)
