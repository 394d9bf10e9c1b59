"""A gated rms norm backward: dx and dgate row by row, dw in float32 partials, one a program and group.

With x̂ the normalised row and n its width:

* gate after, y = x̂·γ·a(g): u = dy·a·γ; dx = rstd·(u − x̂·mean(u·x̂)); dgate = dy·(x̂·γ)·a′(g); dw = Σ dy·a·x̂.
* gate first, p = x·a(g), y = x̂(p)·γ: u = dy·γ; dp = rstd·(u − x̂·mean(u·x̂)); dx = dp·a; dgate = dp·x·a′(g); dw = Σ dy·x̂.

Rows are numbered with the ``period`` groups innermost. A program keeps to one group, so that its weights stay where
they are and its partial is one row. Where no tile holds a row, a first kernel takes the mean of each row and a second
one, whose programs own columns, writes dx, dgate and the partials.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.addressing import along, rows_at, tile_at
from normkit.kernels.gpu.arithmetic import gain_of, rounded, value_of
from normkit.kernels.gpu.exponential import activated, slope
from normkit.kernels.gpu.gated import product_of, weight_rows, weighted
from normkit.kernels.gpu.sums import across, down, whole


@triton.jit
def _kept(kept: tl.tensor, i: tl.tensor, live: tl.tensor, BEFORE: tl.constexpr) -> tl.tensor:
    """(rstd, scale, shrink) of rows, as the forward stored them."""
    if BEFORE:
        at = kept + i.to(tl.int64) * 3
        shrink = tl.load(at + 2, mask=live, other=1.0)
    else:
        at = kept + i.to(tl.int64) * 2
        shrink = tl.load(at + 1, mask=live, other=1.0)
    return tl.load(at, mask=live, other=0.0), tl.load(at + 1, mask=live, other=1.0), shrink


@triton.jit
def _upstream(
    v: tl.tensor,
    gate: tl.tensor,
    dy: tl.tensor,
    w: tl.tensor,
    inside: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    shrink: tl.tensor,
    W: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_W: tl.constexpr,
    PLUS: tl.constexpr,
    PLUS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """(x̂, a(g), what x̂·γ receives, u): the last is the third times γ."""
    a = activated(gate, SILU)
    p, received = v, dy
    if BEFORE:
        p = product_of(v, a, shrink)
    else:
        received = dy * a
    h = tl.where(inside, value_of(p, 0.0, 0.0, rstd, scale, False), 0.0)
    u = received
    if HAS_W:
        u = received * gain_of(w, W, PLUS, PLUS_ROUNDED)
    return h, a, received, u


@triton.jit
def _gradients(
    v: tl.tensor,
    gate: tl.tensor,
    a: tl.tensor,
    dy: tl.tensor,
    w: tl.tensor,
    h: tl.tensor,
    u: tl.tensor,
    b: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    shrink: tl.tensor,
    R: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_W: tl.constexpr,
    FIRST: tl.constexpr,
    PLUS: tl.constexpr,
    PLUS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """(dx, dgate), b being mean(u·x̂)."""
    d = (tl.fma(h, tl.broadcast_to(0.0 - b, h.shape), u) * rstd) * scale
    if BEFORE:
        dx = product_of(d, a, shrink)
        dg = product_of(d, v, shrink) * slope(gate, SILU)
    else:
        dx = d
        dg = (dy * weighted(h, w, R, P, W, HAS_W, FIRST, PLUS, PLUS_ROUNDED)) * slope(gate, SILU)
    return dx, dg


@triton.jit(do_not_specialize=["rows", "tiles", "d1", "d2"])
def held_gated_backward(
    x, w, dy, g, dx, dg, kept, dw, rows, tiles, period, n, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, u0, u1, u2, u3, g0, g1, g2, g3, dx0, dx1, dx2, dx3, dg0, dg1, dg2, dg3,
    R: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    PLAIN: tl.constexpr, GROUPED: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    HAS_W: tl.constexpr, FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
    WANT_X: tl.constexpr, WANT_G: tl.constexpr, WANT_W: tl.constexpr,
):  # fmt: skip
    """Of the tiles of ROWS positions in one group, each program has every so-manieth."""
    group = tl.program_id(0) % period
    first = tl.program_id(0) // period
    positions = rows // period
    cols = tl.arange(0, C)
    column = cols < n
    own = tl.zeros([ROWS, C], tl.float32)
    if HAS_W and PLAIN:
        start = weight_rows(group, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)
        own = tl.load(w + start + cols, mask=column, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, C], tl.float32)
    for tile in range(first, tiles, tl.num_programs(0) // period):
        position = tile * ROWS + tl.arange(0, ROWS)
        live = position < positions
        i = position * period + group
        inside = live[:, None] & column[None, :]
        at = tile_at(i, cols, n, d1, d2, x0, x1, x2, x3, PLAIN)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at = tile_at(i, cols, n, d1, d2, g0, g1, g2, g3, PLAIN)
        gate = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        at = tile_at(i, cols, n, d1, d2, u0, u1, u2, u3, PLAIN)
        e = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_W and not PLAIN:
            at = weight_rows(i, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)[:, None]
            own = tl.load(w + at + along(cols, w3, PLAIN)[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd, scale, shrink = _kept(kept, i, live, BEFORE)
        rstd, scale, shrink = rstd[:, None], scale[:, None], shrink[:, None]
        h, a, received, u = _upstream(
            v, gate, e, own, inside, rstd, scale, shrink,
            w.dtype.element_ty, BEFORE, SILU, HAS_W, PLUS, PLUS_ROUNDED,
        )  # fmt: skip
        if WANT_W:
            if FIRST:
                total += received * rounded(h, R)
            else:
                total += received * h
        if WANT_X or WANT_G:
            b = tl.zeros([ROWS], tl.float32)
            if WANT_X or BEFORE:
                b = tl.div_rn(across(u * h), tl.full([ROWS], 1.0, tl.float32) * n)
            d, f = _gradients(
                v, gate, a, e, own, h, u, b[:, None], rstd, scale, shrink,
                R, P, w.dtype.element_ty, BEFORE, SILU, HAS_W, FIRST, PLUS, PLUS_ROUNDED,
            )  # fmt: skip
            if WANT_X:
                at = tile_at(i, cols, n, d1, d2, dx0, dx1, dx2, dx3, PLAIN)
                tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
            if WANT_G:
                at = tile_at(i, cols, n, d1, d2, dg0, dg1, dg2, dg3, PLAIN)
                tl.store(dg + at, f.to(dg.dtype.element_ty), mask=inside)
    if WANT_W:
        tl.store(dw + tl.program_id(0).to(tl.int64) * n + cols, down(total), mask=column)


@triton.jit(do_not_specialize=["rows", "d1", "d2"])
def gated_row_means(
    x, w, dy, g, kept, means, rows, period, n, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, u0, u1, u2, u3, g0, g1, g2, g3,
    C: tl.constexpr, PLAIN: tl.constexpr, GROUPED: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    HAS_W: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """mean(u·x̂) of one row a program, C columns at a time."""
    i = tl.program_id(0)
    x += rows_at(i, n, d1, d2, x0, x1, x2, PLAIN)
    w += weight_rows(i, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)
    dy += rows_at(i, n, d1, d2, u0, u1, u2, PLAIN)
    g += rows_at(i, n, d1, d2, g0, g1, g2, PLAIN)
    rstd, scale, shrink = _kept(kept, i, i < rows, BEFORE)
    total = tl.zeros([C], tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        inside = cols < n
        v = tl.load(x + along(cols, x3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(g + along(cols, g3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        e = tl.load(dy + along(cols, u3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        own = v
        if HAS_W:
            own = tl.load(w + along(cols, w3, PLAIN), mask=inside, other=0.0).to(tl.float32)
        h, _, _, u = _upstream(
            v, gate, e, own, inside, rstd, scale, shrink,
            w.dtype.element_ty, BEFORE, SILU, HAS_W, PLUS, PLUS_ROUNDED,
        )  # fmt: skip
        total += u * h
    tl.store(means + i, tl.div_rn(whole(total), n * 1.0))


@triton.jit(do_not_specialize=["rows", "blocks", "d1", "d2"])
def wide_gated_backward(
    x, w, dy, g, dx, dg, kept, means, dw, rows, blocks, period, n, d1, d2,
    x0, x1, x2, x3, w0, w1, w2, w3, u0, u1, u2, u3, g0, g1, g2, g3, dx0, dx1, dx2, dx3, dg0, dg1, dg2, dg3,
    R: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    PLAIN: tl.constexpr, GROUPED: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    HAS_W: tl.constexpr, FIRST: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr,
    WANT_X: tl.constexpr, WANT_G: tl.constexpr, WANT_W: tl.constexpr,
):  # fmt: skip
    """Of one group's rows, C columns: each program has every so-manieth row."""
    cols = (tl.program_id(0) % blocks) * C + tl.arange(0, C)
    first = tl.program_id(0) // blocks
    inside = cols < n
    total = tl.zeros([C], tl.float32)
    own = total
    if HAS_W and PLAIN:
        start = weight_rows(first, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED)
        own = tl.load(w + start + cols, mask=inside, other=0.0).to(tl.float32)
    walkers = tl.num_programs(0) // blocks
    for step in range(0, tl.cdiv(rows - first, walkers)):
        i = first + step * walkers
        at = rows_at(i, n, d1, d2, x0, x1, x2, PLAIN) + along(cols, x3, PLAIN)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at = rows_at(i, n, d1, d2, g0, g1, g2, PLAIN) + along(cols, g3, PLAIN)
        gate = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        at = rows_at(i, n, d1, d2, u0, u1, u2, PLAIN) + along(cols, u3, PLAIN)
        e = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_W and not PLAIN:
            at = weight_rows(i, n, period, d1, d2, w0, w1, w2, PLAIN, GROUPED) + along(cols, w3, PLAIN)
            own = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        rstd, scale, shrink = _kept(kept, i, i < rows, BEFORE)
        h, a, received, u = _upstream(
            v, gate, e, own, inside, rstd, scale, shrink,
            w.dtype.element_ty, BEFORE, SILU, HAS_W, PLUS, PLUS_ROUNDED,
        )  # fmt: skip
        if WANT_W:
            if FIRST:
                total += received * rounded(h, R)
            else:
                total += received * h
        if WANT_X or WANT_G:
            b = tl.load(means + i)
            d, f = _gradients(
                v, gate, a, e, own, h, u, b, rstd, scale, shrink,
                R, P, w.dtype.element_ty, BEFORE, SILU, HAS_W, FIRST, PLUS, PLUS_ROUNDED,
            )  # fmt: skip
            if WANT_X:
                at = rows_at(i, n, d1, d2, dx0, dx1, dx2, PLAIN) + along(cols, dx3, PLAIN)
                tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
            if WANT_G:
                at = rows_at(i, n, d1, d2, dg0, dg1, dg2, PLAIN) + along(cols, dg3, PLAIN)
                tl.store(dg + at, f.to(dg.dtype.element_ty), mask=inside)
    if WANT_W:
        tl.store(dw + first.to(tl.int64) * n + cols, total, mask=inside)
