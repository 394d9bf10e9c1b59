"""What the registered operators of `normkit.ops.opaque` compute, and what a compiler is told of their results.

Shapes and dtypes alone answer a compiler; rows without elements are answered by them, too. ``row`` stands for
six arguments, which PyTorch hands over in the order of the schemas: (x, weight, bias, spec, axes, eps).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import registry
from normkit.kernels.contract import Kernel, Request
from normkit.kernels.cpu.rows import kept_of_row
from normkit.kernels.registry import REFERENCE
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec


@lru_cache(maxsize=256)
def _spec(code: str) -> NormSpec:
    return NormSpec.from_code(code)


def _kernel(request: Request) -> Kernel | None:
    """Return a kernel, whatever backend is in force when the compiled code runs; None for a tensor without elements."""
    with registry.use("auto", batch_invariant=True):
        kernel = registry.choose(request).kernel
    return None if kernel is REFERENCE else kernel


def row_norm(*row: Any) -> Tensor:
    """Return y."""
    return _forward(*row, keep=False)[0]


def row_norm_keep(*row: Any) -> tuple[Tensor, Tensor]:
    """Return y and the row statistics that a backward wants."""
    return _forward(*row, keep=True)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: str, axes: list[int], eps: float, keep: bool
) -> tuple[Tensor, Tensor]:
    kernel = _kernel(Request(_spec(spec), x, tuple(axes), weight, bias))
    if kernel is None:
        return shapes_keep(x, weight, bias, spec, axes, eps)
    y, statistics = kernel.forward(x, _spec(spec), weight, bias, axes=tuple(axes), eps=eps, keep=keep)
    return y, statistics


def add_norm(residual: Tensor, alpha: float, beta: float, *row: Any) -> tuple[Tensor, Tensor]:
    """Return y and the sum."""
    return _add_forward(residual, alpha, beta, *row, keep=False)[:2]


def add_norm_keep(residual: Tensor, alpha: float, beta: float, *row: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the sum and its row statistics."""
    return _add_forward(residual, alpha, beta, *row, keep=True)


def _add_forward(
    residual: Tensor,
    alpha: float,
    beta: float,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: str,
    axes: list[int],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel(Request(_spec(spec), x, tuple(axes), weight, bias, residual=residual))
    if kernel is None:
        return shapes_add_keep(residual, alpha, beta, x, weight, bias, spec, axes, eps)
    return kernel.add_forward(  # type: ignore[no-any-return]
        x, residual, _spec(spec), weight, bias, alpha=alpha, beta=beta, axes=tuple(axes), eps=eps, keep=keep
    )


def row_norm_backward(
    dy: Tensor,
    extra: Tensor | None,
    statistics: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: str,
    axes: list[int],
    wanted: list[bool],
    target: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dw, db), empty where not wanted."""
    nothing = shapes_backward(dy, extra, statistics, x, weight, bias, spec, axes, wanted, target)
    kernel = _kernel(Request(_spec(spec), x, tuple(axes), weight, bias))
    if kernel is None:
        return tuple(t.zero_() for t in nothing)  # type: ignore[return-value]
    found = kernel.backward(
        x, _spec(spec), weight, bias, dy, statistics, axes=tuple(axes), wanted=tuple(wanted), extra=extra, target=target
    )
    return tuple(n if f is None else f for f, n in zip(found, nothing, strict=True))  # type: ignore[return-value]


# ---- shapes and dtypes, for a compiler ----


def shape_row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: str, axes: list[int], eps: float
) -> Tensor:
    """Return room for y."""
    w, b = (None if p is None else p.dtype for p in (weight, bias))
    return x.new_empty(x.shape, dtype=result_dtype(_spec(spec), x.dtype, w, b))


def shapes_keep(*row: Any) -> tuple[Tensor, Tensor]:
    """Return room for y and the row statistics."""
    return shape_row_norm(*row), _statistics(*row)


def shapes_add(residual: Tensor, alpha: float, beta: float, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return room for y and the sum."""
    stream = torch.promote_types(x.dtype, residual.dtype)
    return shape_row_norm(x, *rest), x.new_empty(x.shape, dtype=stream)


def shapes_add_keep(residual: Tensor, alpha: float, beta: float, *row: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for y, the sum and its row statistics."""
    y, s = shapes_add(residual, alpha, beta, *row)
    return y, s, _statistics(*row)


def shapes_backward(
    dy: Tensor,
    extra: Tensor | None,
    statistics: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: str,
    axes: list[int],
    wanted: list[bool],
    target: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor of the shape of each gradient that is wanted, and empty ones: an operator has no None to give."""
    return tuple(  # type: ignore[return-value]
        x.new_empty(0) if t is None or not want else t.new_empty(t.shape)
        for t, want in zip((x, weight, bias), wanted, strict=True)
    )


def _statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: str, axes: list[int], eps: float
) -> Tensor:
    rows: Any = 1  # a number or a symbol
    for d in range(x.dim()):
        rows = rows * (1 if d in axes else x.shape[d])
    return x.new_empty((rows, kept_of_row(_spec(spec))), dtype=torch.float32)
