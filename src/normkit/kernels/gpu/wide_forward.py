"""Rows that no tile holds, forward: the moments of chunks, then every chunk by the moments of its row.

x is read twice and y written once, for every norm: two thirds of a copy's rate at best, or all of it where the second
reading comes from the cache. Reading in a loop would take three readings for a layer norm, and one program a row.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import along, parameter_at, rows_at
from normkit.kernels.gpu.arithmetic import LARGE, SMALL, finish, inverse_root, value_of
from normkit.kernels.gpu.forward import keep, sum_of
from normkit.kernels.gpu.statistics import of_chunks
from normkit.kernels.gpu.sums import whole

PART = tl.constexpr(4)  # float32 of a chunk: mean, remainder and Σ d², or Σ x² alone


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def chunk_moments(
    x, a, q, parts, rows, n, alpha, beta, d1, d2,
    x0, x1, x2, x3, a0, a1, a2, a3, q0, q1, q2, q3,
    C: tl.constexpr, PLAIN: tl.constexpr, ADDED: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Chunk program_id(1) of row program_id(0): its moments, and where a residual is added, its sum."""
    i, j = tl.program_id(0), tl.program_id(1)
    cols = j * C + tl.arange(0, C)
    inside = cols < n
    at = rows_at(i, n, d1, d2, x0, x1, x2, PLAIN) + along(cols, x3, PLAIN)
    if ADDED:
        branch = tl.load(a + rows_at(i, n, d1, d2, a0, a1, a2, PLAIN) + along(cols, a3, PLAIN), mask=inside, other=0.0)
        stream = tl.load(q + rows_at(i, n, d1, d2, q0, q1, q2, PLAIN) + along(cols, q3, PLAIN), mask=inside, other=0.0)
        s = sum_of(branch, stream, alpha, beta).to(x.dtype.element_ty)
        tl.store(x + at, s, mask=inside)
        v = tl.where(inside, s.to(tl.float32), 0.0)
    else:
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    part = parts + (i.to(tl.int64) * tl.num_programs(1) + j) * PART
    if CENTERED:
        count = tl.minimum(n - j * C, C) * 1.0
        mean = tl.div_rn(whole(v), count)
        d = tl.where(inside, v - mean, 0.0)
        remainder = tl.div_rn(whole(d), count)
        tl.store(part, mean)
        tl.store(part + 1, remainder)
        tl.store(part + 2, whole(d * d) - count * remainder * remainder)
    else:
        tl.store(part, whole(v * v))


@triton.jit
def _merged(
    x: tl.tensor, step: tl.tensor, part: tl.tensor, n: tl.tensor, eps: tl.tensor, root_eps: tl.tensor,
    C: tl.constexpr, K: tl.constexpr, CENTERED: tl.constexpr, SUM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(mean, remainder, rstd, scale) of the row at x from its chunks: a corrected two-pass over their means.

    A row whose squares leave float32's range is read again, rescaled, by each of its programs.
    """
    k = tl.arange(0, K)
    there = k * C < n
    mean, remainder, scale = 0.0, 0.0, 1.0
    if CENTERED:
        count = tl.where(there, tl.minimum(n - k * C, C), 0) * 1.0
        means = tl.load(part + k * PART, mask=there, other=0.0)
        rest = tl.load(part + k * PART + 1, mask=there, other=0.0)
        squares = tl.load(part + k * PART + 2, mask=there, other=0.0)
        mean = tl.div_rn(whole(means * count), n * 1.0)
        gap = tl.where(there, (means - mean) + rest, 0.0)
        remainder = tl.div_rn(whole(gap * count), n * 1.0)
        second = whole(squares + gap * gap * count)
        square = tl.div_rn(second, n * 1.0) - remainder * remainder
        square = tl.where(square < 0.0, 0.0, square)
        held = (second < LARGE) & (square + eps > SMALL) & (square + eps < LARGE)
    else:
        count = n * 1.0
        if SUM:
            count = 1.0
        square = tl.div_rn(whole(tl.load(part + k * PART, mask=there, other=0.0)), count)
        held = (square + eps > SMALL) & (square + eps < LARGE)
    rstd = inverse_root(square + eps)
    if held == 0:  # not the negated comparisons: a NaN must land here
        mean, remainder, rstd, scale = of_chunks(x, step, n, eps, root_eps, C, CENTERED, SUM)
    return mean, remainder, rstd, scale


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def apply_chunks(
    x, w, b, y, parts, kept, rows, n, eps, root_eps, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3,
    R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr, KEEP: tl.constexpr,
    CENTERED: tl.constexpr, SUM: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Chunk program_id(1) of row program_id(0). y must not be x: an extreme row is read as a whole by every program."""
    i, j = tl.program_id(0), tl.program_id(1)
    cols = j * C + tl.arange(0, C)
    inside = cols < n
    row = x + rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)
    v = tl.load(row + along(cols, x3, PLAIN), mask=inside, other=0.0).to(tl.float32)
    step = 1
    if not PLAIN:
        step = x3
    part = parts + i.to(tl.int64) * tl.num_programs(1) * PART
    mean, remainder, rstd, scale = _merged(row, step, part, n, eps, root_eps, C, K, CENTERED, SUM)
    if KEEP:
        keep(kept, i, (i < rows) & (j == 0), mean, remainder, rstd, scale, CENTERED)
    value = value_of(v, mean, remainder, rstd, scale, CENTERED)
    gain, shift = value, value
    if HAS_W:
        at = parameter_at(i, d1, d2, w0, w1, w2, PLAIN) + along(cols, w3, PLAIN)
        gain = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        at = parameter_at(i, d1, d2, b0, b1, b2, PLAIN) + along(cols, b3, PLAIN)
        shift = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    value = finish(value, gain, shift, R, P, w.dtype.element_ty, HAS_W, HAS_B, FIRST, PLUS, PLUS_ROUNDED)
    at = rows_at(i, n, d1, d2, y0, y1, y2, PLAIN) + along(cols, y3, PLAIN)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
