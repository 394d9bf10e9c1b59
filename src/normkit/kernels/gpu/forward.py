"""Row norms forward, with whole rows in registers; `wide_forward` has those that no tile holds.

The tensors of a call are x (or the sum s, where a residual is added), weight, bias, y, branch and residual; each comes
with three outer strides and one along the row. PLAIN: all rows are contiguous and the parameters are one row.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import parameter_tile, tile_at
from normkit.kernels.gpu.arithmetic import finish, value_of
from normkit.kernels.gpu.statistics import of_tile


@triton.jit
def sum_of(a: tl.tensor, q: tl.tensor, alpha: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """α·q + β·a, each operation rounded to float32."""
    return q.to(tl.float32) * alpha + a.to(tl.float32) * beta


@triton.jit
def keep(
    kept: tl.tensor, rows: tl.tensor, inside: tl.tensor, mean: tl.tensor, remainder: tl.tensor, rstd: tl.tensor,
    scale: tl.tensor, CENTERED: tl.constexpr,
) -> None:  # fmt: skip
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
):  # fmt: skip
    """A tile of ROWS rows a program: x is read once, y written once. A cluster shares a tile if launched as one."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, C)
    live = i < rows
    inside = live[:, None] & (cols < n)[None, :]
    within = tile_at(i, cols, n, d1, d2, x0, x1, x2, x3, PLAIN)
    if ADDED:
        at = tile_at(i, cols, n, d1, d2, a0, a1, a2, a3, PLAIN)
        branch = tl.load(a + at, mask=inside, other=0.0)
        at = tile_at(i, cols, n, d1, d2, q0, q1, q2, q3, PLAIN)
        s = sum_of(branch, tl.load(q + at, mask=inside, other=0.0), alpha, beta).to(x.dtype.element_ty)
        tl.store(x + within, s, mask=inside)
        v = s.to(tl.float32)
        v = tl.where(inside, v, 0.0)  # α and β may be infinite, and 0·∞ is no zero
    else:
        v = tl.load(x + within, mask=inside, other=0.0).to(tl.float32)
    mean, remainder, rstd, scale = of_tile(v, inside, n, eps, root_eps, CENTERED, SUM)
    if KEEP:
        keep(kept, i, live, mean, remainder, rstd, scale, CENTERED)
    value = value_of(v, mean[:, None], remainder[:, None], rstd[:, None], scale[:, None], CENTERED)
    gain, shift = value, value
    if HAS_W:
        gain = parameter_tile(w, i, cols, n, inside, d1, d2, w0, w1, w2, w3, PLAIN)
    if HAS_B:
        shift = parameter_tile(b, i, cols, n, inside, d1, d2, b0, b1, b2, b3, PLAIN)
    value = finish(value, gain, shift, R, P, w.dtype.element_ty, HAS_W, HAS_B, FIRST, PLUS, PLUS_ROUNDED)
    at = tile_at(i, cols, n, d1, d2, y0, y1, y2, y3, PLAIN)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
