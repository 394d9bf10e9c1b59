"""The common case with everything decided: contiguous rows, parameters of one row, dtypes known, one thread enough.

At 1 × 4096 deciding costs more than the norm. What can be decided once per dtypes and spec is decided here, and a call
is left with an output, a block of a dozen words, and the kernel. Larger calls go on to `normkit.kernels.cpu.rows`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.kernels.cpu import pool
from normkit.kernels.cpu import rows as launch
from normkit.kernels.cpu.trampoline import trampoline
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec

_FORWARD = "qqdddqqqqqqq"  # rows, width, ε, α, β, then addresses, as forward.py reads them
_BACKWARD = "q" * 11  # rows, width, piece, then addresses, as backward.py reads them

Forward = Callable[..., tuple[Tensor, Tensor | None]]
AddForward = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


def forward_of(spec: NormSpec, x: torch.dtype, w: torch.dtype | None, b: torch.dtype | None) -> Forward:
    """Return (x, weight, bias, eps, out, keep) → (y, statistics) for contiguous tensors of these dtypes."""
    kinds = launch.Kinds(x, w, b, result_dtype(spec, x, w, b))
    code = launch.forward_code(spec, kinds)
    enter, address = trampoline(_FORWARD), code.short
    same, y_dtype = kinds.y == x, kinds.y

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        y = out
        if y is None:
            y = torch.empty_like(x) if same else torch.empty(x.shape, dtype=y_dtype)
        elements, width, stats = x.numel(), x.shape[-1], None
        if not elements:
            return y, None
        rows = elements // width
        if keep:
            stats = launch.new_statistics(spec, rows)
        if elements >= pool.PARALLEL_FROM:
            launch.forward_contiguous(code, x, weight, bias, eps, y, stats, given=out is not None)
        else:
            enter(
                address,
                rows,
                width,
                eps,
                1.0,
                1.0,
                0 if stats is None else stats.data_ptr(),
                x.data_ptr(),
                0 if weight is None else weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
                0,
                0,
            )
        return y, stats

    return run


def add_forward_of(
    spec: NormSpec, x: torch.dtype, residual: torch.dtype, w: torch.dtype | None, b: torch.dtype | None
) -> AddForward:
    """Return (x, residual, weight, bias, eps, α, β, keep, out=) → (y, sum, statistics) for contiguous tensors."""
    stream = torch.promote_types(x, residual)
    kinds = launch.Kinds(stream, w, b, result_dtype(spec, x, w, b), x, residual)
    code = launch.forward_code(spec, kinds)
    enter, address = trampoline(_FORWARD), code.short

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        alpha: float,
        beta: float,
        keep: bool,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, s = out or (torch.empty_like(x, dtype=kinds.y), torch.empty_like(x, dtype=stream))
        elements, width, stats = x.numel(), x.shape[-1], None
        if not elements:
            return y, s, None
        count = elements // width
        if keep:
            stats = launch.new_statistics(spec, count)
        if elements >= pool.PARALLEL_FROM:
            tensors = (s, weight, bias, y, x, residual)
            rows, given = launch.contiguous_rows(x, tensors), out is not None
            launch.forward(code, rows, eps, s, weight, bias, y, stats, x, residual, alpha, beta, given)
        else:
            enter(
                address,
                count,
                width,
                eps,
                alpha,
                beta,
                0 if stats is None else stats.data_ptr(),
                s.data_ptr(),
                0 if weight is None else weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
                x.data_ptr(),
                residual.data_ptr(),
            )
        return y, s, stats

    return run


def backward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    stats: Tensor,
    wanted: tuple[bool, bool, bool],
    extra: Tensor | None,
    target: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dw, db) as `normkit.kernels.cpu.kernel.backward`, of contiguous rows and parameters of one row."""
    w, e = None if weight is None else weight.dtype, None if extra is None else extra.dtype
    key = (spec, x.dtype, w, dy.dtype, wanted, e, target)
    code = _backwards.get(key)
    if code is None:
        kinds = launch.Kinds(x.dtype, w, None, x.dtype, branch=target)
        code = _backwards[key] = launch.backward_code(spec, kinds, dy.dtype, x.dtype, e, wanted)
    elements, width = x.numel(), x.shape[-1]
    dx = torch.empty_like(x) if wanted[0] else None
    if elements >= pool.PARALLEL_FROM:
        rows = launch.contiguous_rows(x, (x, weight, dy, dx, extra))
        dw, db = launch.backward(code, rows, x, weight, dy, dx, extra, stats, wanted[1], wanted[2])
    else:
        rows = elements // width
        piece, parts = launch.pieces(rows)
        dw = torch.zeros(parts, width, dtype=torch.float32) if wanted[1] else None
        db = torch.zeros(parts, width, dtype=torch.float32) if wanted[2] else None
        trampoline(_BACKWARD)(
            code.short,
            rows,
            width,
            piece,
            0 if dw is None else dw.data_ptr(),
            0 if db is None else db.data_ptr(),
            stats.data_ptr(),
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            dy.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if extra is None else extra.data_ptr(),
        )
    return (
        dx,
        None if dw is None or weight is None else launch.folded(dw, weight, (width,)),
        None if db is None or bias is None else launch.folded(db, bias, (width,)),
    )


_backwards: dict[object, launch.Code] = {}
