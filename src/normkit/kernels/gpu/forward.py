"""Row norms forward: with whole rows in registers, or chunk by chunk where no tile holds a row.

The tensors of a call are x (or the sum s, where a residual is added), weight, bias, y, branch and residual; each comes
with three outer strides and one along the row. PLAIN: all rows are contiguous and the parameters are one row.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import along, parameter_at, rows_at
from normkit.kernels.gpu.arithmetic import finish, value_of
from normkit.kernels.gpu.statistics import of_chunks, of_tile


@triton.jit
def _sum_of(a: tl.tensor, q: tl.tensor, alpha: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """α·q + β·a, each operation rounded to float32."""
    return q.to(tl.float32) * alpha + a.to(tl.float32) * beta


@triton.jit
def _keep(
    kept: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    mean: tl.tensor,
    remainder: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    CENTERED: tl.constexpr,
) -> tl.tensor:
    """Store what a backward needs of each row."""
    if CENTERED:
        at = kept + rows.to(tl.int64) * 4
        tl.store(at, mean, mask=inside)
        tl.store(at + 1, remainder, mask=inside)
        tl.store(at + 2, rstd, mask=inside)
        tl.store(at + 3, scale, mask=inside)
    else:
        at = kept + rows.to(tl.int64) * 2
        tl.store(at, rstd, mask=inside)
        tl.store(at + 1, scale, mask=inside)


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def held_forward(
    x, w, b, y, a, q, kept, rows, n, eps, root_eps, alpha, beta, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, a0, a1, a2, a3, q0, q1, q2, q3,
    R: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr, KEEP: tl.constexpr, ADDED: tl.constexpr,
    CENTERED: tl.constexpr, SUM: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip  # pyright: ignore
    """A tile of ROWS rows a program: x is read once and y written once."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, C)
    live = i < rows
    inside = live[:, None] & (cols < n)[None, :]
    within = rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)[:, None] + along(cols, x3, PLAIN)[None, :]
    if ADDED:
        at = rows_at(i, n, d1, d2, a0, a1, a2, PLAIN)[:, None] + along(cols, a3, PLAIN)[None, :]
        branch = tl.load(a + at, mask=inside, other=0.0)
        at = rows_at(i, n, d1, d2, q0, q1, q2, PLAIN)[:, None] + along(cols, q3, PLAIN)[None, :]
        s = _sum_of(branch, tl.load(q + at, mask=inside, other=0.0), alpha, beta).to(x.dtype.element_ty)
        tl.store(x + within, s, mask=inside)
        v = s.to(tl.float32)
        v = tl.where(inside, v, 0.0)  # α and β may be infinite, and 0·∞ is no zero
    else:
        v = tl.load(x + within, mask=inside, other=0.0).to(tl.float32)
    mean, remainder, rstd, scale = of_tile(v, inside, n, eps, root_eps, CENTERED, SUM)
    if KEEP:
        _keep(kept, i, live, mean, remainder, rstd, scale, CENTERED)
    value = value_of(v, mean[:, None], remainder[:, None], rstd[:, None], scale[:, None], CENTERED)
    gain, shift = value, value
    if HAS_W:
        if PLAIN:
            gain = tl.load(w + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        else:
            at = parameter_at(i, d1, d2, w0, w1, w2, PLAIN)[:, None] + along(cols, w3, PLAIN)[None, :]
            gain = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        if PLAIN:
            shift = tl.load(b + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        else:
            at = parameter_at(i, d1, d2, b0, b1, b2, PLAIN)[:, None] + along(cols, b3, PLAIN)[None, :]
            shift = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    value = finish(value, gain, shift, R, P, w.dtype.element_ty, HAS_W, HAS_B, FIRST, PLUS, PLUS_ROUNDED)
    at = rows_at(i, n, d1, d2, y0, y1, y2, PLAIN)[:, None] + along(cols, y3, PLAIN)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def looped_forward(
    x, w, b, y, a, q, kept, rows, n, eps, root_eps, alpha, beta, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, a0, a1, a2, a3, q0, q1, q2, q3,
    R: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr, KEEP: tl.constexpr, ADDED: tl.constexpr,
    CENTERED: tl.constexpr, SUM: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip  # pyright: ignore
    """One row a program, C columns at a time; every reading but the first comes from the cache."""
    i = tl.program_id(0)
    x += rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)
    w += parameter_at(i, d1, d2, w0, w1, w2, PLAIN)
    b += parameter_at(i, d1, d2, b0, b1, b2, PLAIN)
    y += rows_at(i, n, d1, d2, y0, y1, y2, PLAIN)
    if ADDED:
        a += rows_at(i, n, d1, d2, a0, a1, a2, PLAIN)
        q += rows_at(i, n, d1, d2, q0, q1, q2, PLAIN)
        for start in range(0, n, C):
            cols = start + tl.arange(0, C)
            inside = cols < n
            branch = tl.load(a + along(cols, a3, PLAIN), mask=inside, other=0.0)
            s = _sum_of(branch, tl.load(q + along(cols, q3, PLAIN), mask=inside, other=0.0), alpha, beta)
            tl.store(x + along(cols, x3, PLAIN), s.to(x.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the sum is read by other threads than those that wrote it
    step = 1
    if not PLAIN:
        step = x3
    mean, remainder, rstd, scale = of_chunks(x, step, n, eps, root_eps, C, CENTERED, SUM)
    if KEEP:
        _keep(kept, i, i < rows, mean, remainder, rstd, scale, CENTERED)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        inside = cols < n
        v = tl.load(x + along(cols, x3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        value = value_of(v, mean, remainder, rstd, scale, CENTERED)
        gain, shift = value, value
        if HAS_W:
            gain = tl.load(w + along(cols, w3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        if HAS_B:
            shift = tl.load(b + along(cols, b3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        value = finish(value, gain, shift, R, P, w.dtype.element_ty, HAS_W, HAS_B, FIRST, PLUS, PLUS_ROUNDED)
        tl.store(y + along(cols, y3, PLAIN), value.to(y.dtype.element_ty), mask=inside)
