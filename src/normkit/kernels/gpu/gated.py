"""A gated rms norm forward: y = RMS(x)·γ·a(g), or gate first, RMS(x·a(g))·γ.

The rows of x (…, groups, width) are numbered with the groups innermost. PLAIN: all rows are contiguous and the
parameters are one row or, GROUPED, one row for each of ``period`` groups.

Gate first, what the statistic reads are float32 products. A tile holds them; where none holds a row they are computed
again in each of two passes, which is cheaper than to write and read them.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import along, parameter_at, rows_at, tile_at
from normkit.kernels.gpu.arithmetic import LARGE, SMALL, eps_scaled, finish, inverse_root, rounded, scale_for, value_of
from normkit.kernels.gpu.exponential import activated
from normkit.kernels.gpu.statistics import of_chunks, of_tile
from normkit.kernels.gpu.sums import whole

SHRINK = tl.constexpr(2.0**-64)  # of both factors, where a product leaves float32's range; twice that in its square
SHRINK_EPS = 2.0**-256  # and of ε, which is scaled before it is rounded to float32


@triton.jit
def product_of(x: tl.tensor, a: tl.tensor, shrink: tl.tensor) -> tl.tensor:
    """X·a(g). The factor, 1 but for rows whose products overflow, is a power of two: exact."""
    return (x * shrink) * (a * shrink)


@triton.jit
def weighted(
    value: tl.tensor,
    w: tl.tensor,
    R: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    HAS_W: tl.constexpr,
    FIRST: tl.constexpr,
    PLUS: tl.constexpr,
    PLUS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """The normalised value times γ, with every rounding that comes before a gate."""
    value = finish(value, w, w, R, P, W, HAS_W, False, FIRST, PLUS, PLUS_ROUNDED)
    if FIRST:
        value = rounded(value, P)
    return value


@triton.jit
def weight_rows(
    i: tl.tensor,
    n: tl.tensor,
    period: tl.tensor,
    d1: tl.tensor,
    d2: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    PLAIN: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tl.tensor:
    """Where the weights of the rows i begin."""
    return (i % period).to(tl.int64) * n if PLAIN and GROUPED else parameter_at(i, d1, d2, w0, w1, w2, PLAIN)


@triton.jit
def _keep(
    kept: tl.tensor,
    i: tl.tensor,
    live: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    shrink: tl.tensor,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """Store what a backward needs of each row."""
    if BEFORE:
        at = kept + i.to(tl.int64) * 3
        tl.store(at + 2, shrink, mask=live)
    else:
        at = kept + i.to(tl.int64) * 2
    tl.store(at, rstd, mask=live)
    tl.store(at + 1, scale, mask=live)


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def held_gated_forward(
    x, w, g, y, kept, rows, period, n, eps, root_eps, low_eps, low_root, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, y0, y1, y2, y3,
    R: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    PLAIN: tl.constexpr, GROUPED: tl.constexpr, KEEP: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    HAS_W: tl.constexpr, FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows a program: x and the gate are read once and y written once."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, C)
    live = i < rows
    inside = live[:, None] & (cols < n)[None, :]
    at = tile_at(i, cols, n, d1, d2, x0, x1, x2, x3, PLAIN)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    at = tile_at(i, cols, n, d1, d2, g0, g1, g2, g3, PLAIN)
    a = activated(tl.load(g + at, mask=inside, other=0.0).to(tl.float32), SILU)
    shrink = tl.full([ROWS], 1.0, tl.float32)
    p = v
    if BEFORE:
        p = product_of(v, a, shrink[:, None])
    _, _, rstd, scale = of_tile(p, inside, n, eps, root_eps, False, False)
    if BEFORE:
        infinite = rstd == 0.0
        if tl.max(infinite.to(tl.int32), 0) > 0:
            # Once more, the factors scaled; products of an infinite x stay infinite. Other rows get the same bits.
            # Both factors are read again: no register keeps them for what is rare.
            shrink = tl.where(infinite, SHRINK, 1.0)
            at = tile_at(i, cols, n, d1, d2, x0, x1, x2, x3, PLAIN)
            v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            at = tile_at(i, cols, n, d1, d2, g0, g1, g2, g3, PLAIN)
            gate = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
            p = product_of(v, activated(gate, SILU), shrink[:, None])
            low = tl.where(infinite, low_eps, eps).to(tl.float32)
            root = tl.where(infinite, low_root, root_eps).to(tl.float32)
            _, _, rstd, scale = of_tile(p, inside, n, low, root, False, False)
    if KEEP:
        _keep(kept, i, live, rstd, scale, shrink, BEFORE)
    value = value_of(p, 0.0, 0.0, rstd[:, None], scale[:, None], False)
    gain = value
    if HAS_W:
        if PLAIN and not GROUPED:
            gain = tl.load(w + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        else:
            at = weight_rows(i, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)[:, None]
            at += along(cols, w3, PLAIN)[None, :]
            gain = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    value = weighted(value, gain, R, P, w.dtype.element_ty, HAS_W, FIRST, PLUS, PLUS_ROUNDED)
    if not BEFORE:
        value = value * a
    at = tile_at(i, cols, n, d1, d2, y0, y1, y2, y3, PLAIN)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _product_at(
    x: tl.tensor,
    g: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    start: tl.tensor,
    n: tl.tensor,
    shrink: tl.tensor,
    C: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    """X·a(g) of C columns from ``start``, 0 beyond the row; x and g point at the row."""
    cols = start + tl.arange(0, C)
    inside = cols < n
    v = tl.load(x + cols.to(tl.int64) * xs, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(g + cols.to(tl.int64) * gs, mask=inside, other=0.0).to(tl.float32)
    return product_of(v, activated(gate, SILU), shrink)


@triton.jit
def _mean_square(
    x: tl.tensor,
    g: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    shrink: tl.tensor,
    C: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    """Of a row's products times ``scale``."""
    total = tl.full([C], 0.0, tl.float32)
    for start in range(0, n, C):
        u = _product_at(x, g, xs, gs, start, n, shrink, C, SILU) * scale
        total += u * u
    return tl.div_rn(whole(total), n * 1.0)


@triton.jit
def _of_products(
    x: tl.tensor,
    g: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    root_eps: tl.tensor,
    shrink: tl.tensor,
    C: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    """(rstd, scale) of one row of products, as `of_chunks`."""
    # The interpreter takes 1e-42 for a double.
    eps, root_eps = tl.full([], eps, tl.float32), tl.full([], root_eps, tl.float32)
    scale = 1.0
    square = _mean_square(x, g, xs, gs, n, scale, shrink, C, SILU)
    if ((square + eps > SMALL) & (square + eps < LARGE)) == 0:  # not the negated comparisons: a NaN must land here
        peak = tl.full([C], 0.0, tl.float32)
        for start in range(0, n, C):
            p = _product_at(x, g, xs, gs, start, n, shrink, C, SILU)
            peak = tl.maximum(peak, tl.where(p == p, tl.abs(p), 0.0))
        scale = scale_for(tl.max(peak, 0), root_eps)
        square = _mean_square(x, g, xs, gs, n, scale, shrink, C, SILU)
    return inverse_root(square + eps_scaled(eps, root_eps, scale)), scale


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def looped_gated_forward(
    x, w, g, y, kept, rows, period, n, eps, root_eps, low_eps, low_root, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, y0, y1, y2, y3,
    R: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    PLAIN: tl.constexpr, GROUPED: tl.constexpr, KEEP: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    HAS_W: tl.constexpr, FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """One row a program, C columns at a time; every reading but the first comes from the cache."""
    i = tl.program_id(0)
    x += rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)
    w += weight_rows(i, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)
    g += rows_at(i, n, d1, d2, g0, g1, g2, PLAIN)
    y += rows_at(i, n, d1, d2, y0, y1, y2, PLAIN)
    xs, gs = 1, 1
    if not PLAIN:
        xs, gs = x3, g3
    shrink = 1.0
    if BEFORE:
        rstd, scale = _of_products(x, g, xs, gs, n, eps, root_eps, shrink, C, SILU)
        if rstd == 0.0:  # a product is infinite: once more, its factors scaled
            shrink = SHRINK
            rstd, scale = _of_products(x, g, xs, gs, n, low_eps, low_root, shrink, C, SILU)
    else:
        _, _, rstd, scale = of_chunks(x, xs, n, eps, root_eps, C, False, False)
    if KEEP:
        _keep(kept, i, i < rows, rstd, scale, shrink, BEFORE)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        inside = cols < n
        v = tl.load(x + along(cols, x3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        a = activated(tl.load(g + along(cols, g3, PLAIN), mask=inside, other=0.0).to(tl.float32), SILU)
        if BEFORE:
            v = product_of(v, a, shrink)
        value = value_of(v, 0.0, 0.0, rstd, scale, False)
        gain = value
        if HAS_W:
            gain = tl.load(w + along(cols, w3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        value = weighted(value, gain, R, P, w.dtype.element_ty, HAS_W, FIRST, PLUS, PLUS_ROUNDED)
        if not BEFORE:
            value = value * a
        tl.store(y + along(cols, y3, PLAIN), value.to(y.dtype.element_ty), mask=inside)
