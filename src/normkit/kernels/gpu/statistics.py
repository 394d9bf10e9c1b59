"""Statistics of rows: of tiles that hold whole rows, and of rows that are read in chunks.

The order of every sum (`sums.py`) follows from the width and the launch settings of that width, never from how many
rows there are, which of them share a tile or how they lie, so a row's bits are its own. It is not the order of the
CPU's sixteen lanes: float32 results agree with those within the error bounds, not to the bit.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.arithmetic import LARGE, SMALL, eps_scaled, inverse_root, scale_for
from normkit.kernels.gpu.sums import across, whole


@triton.jit
def _two_pass(v: tl.tensor, inside: tl.tensor, scale: tl.tensor, count: tl.tensor) -> tl.tensor:
    """(mean, remainder, variance, Σ d²) of v·scale along each row of a tile: the corrected two-pass."""
    u = v * scale[:, None]
    mean = tl.div_rn(across(u), count)
    d = tl.where(inside, u - mean[:, None], 0.0)
    second = across(d * d)
    remainder = tl.div_rn(across(d), count)
    variance = tl.div_rn(second, count) - remainder * remainder
    return mean, remainder, tl.where(variance < 0.0, 0.0, variance), second


@triton.jit
def of_tile(
    v: tl.tensor,
    inside: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    root_eps: tl.tensor,
    CENTERED: tl.constexpr,
    SUM: tl.constexpr,
) -> tl.tensor:
    """(mean, remainder, rstd, scale) of every row of a tile [rows, columns] with zeros where it is not inside.

    A row whose squares leave float32's range is rescaled by a power of two; its neighbours are then computed again
    with scale 1, to the same bits.
    """
    one = tl.full([v.shape[0]], 1.0, tl.float32)
    count = one
    if not SUM:
        count = one * n
    mean, remainder = one - 1.0, one - 1.0
    if CENTERED:
        mean, remainder, square, second = _two_pass(v, inside, one, count)
        extreme = (second < LARGE) & (square + eps > SMALL) & (square + eps < LARGE)
    else:
        square = tl.div_rn(across(v * v), count)
        extreme = (square + eps > SMALL) & (square + eps < LARGE)
    scale = one
    extreme = extreme == 0  # not the negated comparisons: a NaN must land here
    if tl.max(extreme.to(tl.int32), 0) > 0:
        peak = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1)
        scale = tl.where(extreme, scale_for(peak, root_eps), 1.0)
        if CENTERED:
            mean, remainder, square, second = _two_pass(v, inside, scale, count)
        else:
            u = v * scale[:, None]
            square = tl.div_rn(across(u * u), count)
    return mean, remainder, inverse_root(square + eps_scaled(eps, root_eps, scale)), scale


@triton.jit
def _chunk(x: tl.tensor, step: tl.tensor, start: tl.tensor, n: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(values as float32, which of them are inside the row) of C columns from ``start``; x points at the row."""
    cols = start + tl.arange(0, C)
    inside = cols < n
    return tl.load(x + cols.to(tl.int64) * step, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _peak(x: tl.tensor, step: tl.tensor, n: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Max |x| of a row, NaN passed over."""
    top = tl.full([C], 0.0, tl.float32)
    for start in range(0, n, C):
        v, _ = _chunk(x, step, start, n, C)
        top = tl.maximum(top, tl.where(v == v, tl.abs(v), 0.0))
    return tl.max(top, 0)


@triton.jit
def _squares(x: tl.tensor, step: tl.tensor, n: tl.tensor, scale: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Σ (x·scale)² of a row."""
    total = tl.full([C], 0.0, tl.float32)
    for start in range(0, n, C):
        v, _ = _chunk(x, step, start, n, C)
        u = v * scale
        total += u * u
    return whole(total)


@triton.jit
def _two_pass_of_chunks(x: tl.tensor, step: tl.tensor, n: tl.tensor, scale: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """As `_two_pass`, of one row in chunks."""
    total = tl.full([C], 0.0, tl.float32)
    for start in range(0, n, C):
        v, _ = _chunk(x, step, start, n, C)
        total += v * scale
    count = n * 1.0
    mean = tl.div_rn(whole(total), count)
    first, squares = tl.full([C], 0.0, tl.float32), tl.full([C], 0.0, tl.float32)
    for start in range(0, n, C):
        v, inside = _chunk(x, step, start, n, C)
        d = tl.where(inside, v * scale - mean, 0.0)
        first += d
        squares += d * d
    second = whole(squares)
    remainder = tl.div_rn(whole(first), count)
    variance = tl.div_rn(second, count) - remainder * remainder
    return mean, remainder, tl.where(variance < 0.0, 0.0, variance), second


@triton.jit
def of_chunks(
    x: tl.tensor,
    step: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    root_eps: tl.tensor,
    C: tl.constexpr,
    CENTERED: tl.constexpr,
    SUM: tl.constexpr,
) -> tl.tensor:
    """(mean, remainder, rstd, scale) of one row that no tile holds, C columns at a time."""
    count, scale = n * 1.0, 1.0
    # The interpreter takes 1e-42 for a double.
    eps, root_eps = tl.full([], eps, tl.float32), tl.full([], root_eps, tl.float32)
    if SUM:
        count = 1.0
    mean, remainder = 0.0, 0.0
    if CENTERED:
        mean, remainder, square, second = _two_pass_of_chunks(x, step, n, scale, C)
        held = (second < LARGE) & (square + eps > SMALL) & (square + eps < LARGE)
    else:
        square = tl.div_rn(_squares(x, step, n, scale, C), count)
        held = (square + eps > SMALL) & (square + eps < LARGE)
    if held == 0:
        scale = scale_for(_peak(x, step, n, C), root_eps)
        if CENTERED:
            mean, remainder, square, second = _two_pass_of_chunks(x, step, n, scale, C)
        else:
            square = tl.div_rn(_squares(x, step, n, scale, C), count)
    return mean, remainder, inverse_root(square + eps_scaled(eps, root_eps, scale)), scale
