"""Row norms backward: dx row by row, weight gradients in float32 partials, one a program.

With g = dy·γ and x̂ the normalised row, rms: dx = rstd·(g − x̂·mean(g·x̂)); layer: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)).

Where a tile holds a row, x and dy are read once: a fixed number of programs walks over the tiles and keeps its partial
in registers. Where none does, a first kernel takes both sums of each row and a second one, whose programs own columns,
writes dx and the partials: x and dy are read twice, which bounds it at 3/5 of a copy's rate.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import along, parameter_at, parameter_tile, rows_at, tile_at
from normkit.kernels.gpu.arithmetic import gain_of, rounded, value_of
from normkit.kernels.gpu.sums import across, down, whole


@triton.jit
def _kept(kept: tl.tensor, i: tl.tensor, live: tl.tensor, CENTERED: tl.constexpr) -> tl.tensor:
    """(mean, remainder, rstd, scale) of rows, as the forward stored them."""
    if CENTERED:
        at = kept + i.to(tl.int64) * 4
        mean = tl.load(at, mask=live, other=0.0)
        remainder = tl.load(at + 1, mask=live, other=0.0)
        at += 2
    else:
        at = kept + i.to(tl.int64) * 2
        mean = tl.load(at, mask=live, other=0.0) * 0.0
        remainder = mean
    return mean, remainder, tl.load(at, mask=live, other=0.0), tl.load(at + 1, mask=live, other=1.0)


@triton.jit
def _weighed(
    dy: tl.tensor, w: tl.tensor, W: tl.constexpr, HAS_W: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr
) -> tl.tensor:
    """dy·γ."""
    g = dy
    if HAS_W:
        g = dy * gain_of(w, W, PLUS, PLUS_ROUNDED)
    return g


@triton.jit
def _gradient(
    g: tl.tensor, h: tl.tensor, a: tl.tensor, b: tl.tensor, rstd: tl.tensor, scale: tl.tensor, CENTERED: tl.constexpr
) -> tl.tensor:
    """rstd·(g − a − x̂·b), and back to the row's own scale."""
    if CENTERED:
        g = g - a
    return ((g - h * b) * rstd) * scale


@triton.jit(do_not_specialize=["rows", "tiles", "d1", "d2"])
def held_backward(
    x, w, g, dx, e, kept, dw, db, rows, tiles, n, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, dx0, dx1, dx2, dx3, e0, e1, e2, e3,
    R: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr, ADDED: tl.constexpr,
    CENTERED: tl.constexpr, SUM: tl.constexpr, HAS_W: tl.constexpr,
    FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
    WANT_X: tl.constexpr, WANT_W: tl.constexpr, WANT_B: tl.constexpr,
):  # fmt: skip
    """Tiles p, p + P, p + 2P, … of ROWS rows are program p's."""
    p = tl.program_id(0)
    cols = tl.arange(0, C)
    column = cols < n
    count = 1.0
    if not SUM:
        count = n * 1.0
    own = tl.zeros([ROWS, C], tl.float32)
    if HAS_W and PLAIN:
        own = parameter_tile(w, p, cols, n, column, d1, d2, w0, w1, w2, w3, PLAIN)
    total_w = tl.zeros([ROWS, C], tl.float32)
    total_b = tl.zeros([ROWS, C], tl.float32)
    for tile in range(p, tiles, tl.num_programs(0)):
        i = tile * ROWS + tl.arange(0, ROWS)
        live = i < rows
        inside = live[:, None] & column[None, :]
        at = tile_at(i, cols, n, d1, d2, x0, x1, x2, x3, PLAIN)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at = tile_at(i, cols, n, d1, d2, g0, g1, g2, g3, PLAIN)
        dy = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        mean, remainder, rstd, scale = _kept(kept, i, live, CENTERED)
        h = value_of(v, mean[:, None], remainder[:, None], rstd[:, None], scale[:, None], CENTERED)
        h = tl.where(inside, h, 0.0)
        if HAS_W and not PLAIN:
            own = parameter_tile(w, i, cols, n, inside, d1, d2, w0, w1, w2, w3, PLAIN)
        if WANT_W:
            if FIRST:
                total_w += dy * rounded(h, R)
            else:
                total_w += dy * h
        if WANT_B:
            total_b += dy
        if WANT_X:
            weighed = _weighed(dy, own, w.dtype.element_ty, HAS_W, PLUS, PLUS_ROUNDED)
            b = tl.div_rn(across(weighed * h), tl.full([ROWS], 1.0, tl.float32) * count)
            a = b
            if CENTERED:
                a = tl.div_rn(across(weighed), tl.full([ROWS], 1.0, tl.float32) * count)
            d = _gradient(weighed, h, a[:, None], b[:, None], rstd[:, None], scale[:, None], CENTERED)
            if ADDED:
                at = tile_at(i, cols, n, d1, d2, e0, e1, e2, e3, PLAIN)
                d += tl.load(e + at, mask=inside, other=0.0).to(tl.float32)
            at = tile_at(i, cols, n, d1, d2, dx0, dx1, dx2, dx3, PLAIN)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    part = p.to(tl.int64) * n + cols
    if WANT_W:
        tl.store(dw + part, down(total_w), mask=column)
    if WANT_B:
        tl.store(db + part, down(total_b), mask=column)


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def row_sums(
    x, w, g, kept, sums, rows, n, d1, d2, x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3,
    C: tl.constexpr, PLAIN: tl.constexpr, CENTERED: tl.constexpr, SUM: tl.constexpr, HAS_W: tl.constexpr,
    PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """(mean(g), mean(g·x̂)) of one row a program, C columns at a time."""
    i = tl.program_id(0)
    count = 1.0
    if not SUM:
        count = n * 1.0
    x += rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)
    w += parameter_at(i, d1, d2, w0, w1, w2, PLAIN)
    g += rows_at(i, n, d1, d2, g0, g1, g2, PLAIN)
    mean, remainder, rstd, scale = _kept(kept, i, i < rows, CENTERED)
    first, second = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        inside = cols < n
        v = tl.load(x + along(cols, x3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(g + along(cols, g3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        h = tl.where(inside, value_of(v, mean, remainder, rstd, scale, CENTERED), 0.0)
        own = h
        if HAS_W:
            own = tl.load(w + along(cols, w3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        weighed = _weighed(dy, own, w.dtype.element_ty, HAS_W, PLUS, PLUS_ROUNDED)
        first += weighed
        second += weighed * h
    tl.store(sums + i.to(tl.int64) * 2, tl.div_rn(whole(first), count))
    tl.store(sums + i.to(tl.int64) * 2 + 1, tl.div_rn(whole(second), count))


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def wide_backward(
    x, w, g, dx, e, kept, sums, dw, db, rows, n, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, dx0, dx1, dx2, dx3, e0, e1, e2, e3,
    R: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr, ADDED: tl.constexpr,
    CENTERED: tl.constexpr, HAS_W: tl.constexpr,
    FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
    WANT_X: tl.constexpr, WANT_W: tl.constexpr, WANT_B: tl.constexpr,
):  # fmt: skip
    """C columns of the rows p, p + P, … a program."""
    p = tl.program_id(1)
    cols = tl.program_id(0) * C + tl.arange(0, C)
    inside = cols < n
    total_w, total_b = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    own = total_w
    if HAS_W and PLAIN:
        own = tl.load(w + cols, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, tl.cdiv(rows - p, tl.num_programs(1))):
        i = p + step * tl.num_programs(1)
        at = rows_at(i, n, d1, d2, x0, x1, x2, PLAIN) + along(cols, x3, PLAIN)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at = rows_at(i, n, d1, d2, g0, g1, g2, PLAIN) + along(cols, g3, PLAIN)
        dy = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        mean, remainder, rstd, scale = _kept(kept, i, i < rows, CENTERED)
        h = tl.where(inside, value_of(v, mean, remainder, rstd, scale, CENTERED), 0.0)
        if HAS_W and not PLAIN:
            at = parameter_at(i, d1, d2, w0, w1, w2, PLAIN) + along(cols, w3, PLAIN)
            own = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        if WANT_W:
            if FIRST:
                total_w += dy * rounded(h, R)
            else:
                total_w += dy * h
        if WANT_B:
            total_b += dy
        if WANT_X:
            a = tl.load(sums + i.to(tl.int64) * 2)
            b = tl.load(sums + i.to(tl.int64) * 2 + 1)
            weighed = _weighed(dy, own, w.dtype.element_ty, HAS_W, PLUS, PLUS_ROUNDED)
            d = _gradient(weighed, h, a, b, rstd, scale, CENTERED)
            if ADDED:
                at = rows_at(i, n, d1, d2, e0, e1, e2, PLAIN) + along(cols, e3, PLAIN)
                d += tl.load(e + at, mask=inside, other=0.0).to(tl.float32)
            at = rows_at(i, n, d1, d2, dx0, dx1, dx2, PLAIN) + along(cols, dx3, PLAIN)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    part = p.to(tl.int64) * n + cols
    if WANT_W:
        tl.store(dw + part, total_w, mask=inside)
    if WANT_B:
        tl.store(db + part, total_b, mask=inside)


@triton.jit(do_not_specialize=["count"])
def fold_partials(parts, total, count, n, K: tl.constexpr, C: tl.constexpr):
    """Add ``count`` partials in an order that follows from their number alone, and round the sum once."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    inside = cols < n
    s = tl.zeros([K, C], tl.float32)
    for start in range(0, count, K):
        k = start + tl.arange(0, K)
        at = k[:, None].to(tl.int64) * n + cols[None, :]
        s += tl.load(parts + at, mask=(k < count)[:, None] & inside[None, :], other=0.0)
    tl.store(total + cols, down(s).to(total.dtype.element_ty), mask=inside)
