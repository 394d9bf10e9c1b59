"""A gated rms norm backward: dx and dgate row by row, dw in float32 partials over fixed pieces of rows.

With x̂ the normalised row and n its width:

* gate after, y = x̂·γ·a(g): u = dy·a·γ; dx = rstd·(u − x̂·mean(u·x̂)); dgate = dy·(x̂·γ)·a′(g); dw = Σ dy·a·x̂.
* gate first, p = x·a(g), y = x̂(p)·γ: u = dy·γ; dp = rstd·(u − x̂·mean(u·x̂)); dx = dp·a; dgate = dp·x·a′(g); dw = Σ dy·x̂.

One pass over a row forms the mean and keeps in scratch what takes an exponential; a second writes.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

from normkit.kernels.cpu.backward import F, gradient_of, in_partials, tally
from normkit.kernels.cpu.exponential import activated, slope
from normkit.kernels.cpu.forward import (
    D1,
    D2,
    SLOT,
    STATS,
    WIDTH,
    along,
    gathered,
    place,
    room_for,
    scattered,
    value_of,
)
from normkit.kernels.cpu.gated import product_of, weighted
from normkit.kernels.cpu.simd import (
    add,
    f32_at,
    fma,
    load,
    mul,
    rounded,
    splat,
    store,
    store_some,
    sum_lanes,
    word,
)
from normkit.kernels.cpu.sums import BLOCK, f4, jit, load_upto
from normkit.kernels.cpu.tags import Tag, on, size


class GatedGradTags(NamedTuple):
    """What a gated backward is compiled for; the names that `GatedTags` has mean the same."""

    X: Tag  # x, or gate first the float32 products
    A: Tag
    G: Tag
    U: Tag  # dy
    R: Tag
    P: Tag
    W: Tag
    D: Tag  # dx
    E: Tag  # dgate
    before: Tag
    silu: Tag
    has_w: Tag
    plus: Tag
    plus_rounded: Tag
    first: Tag
    want_x: Tag
    want_g: Tag
    want_w: Tag
    packed: Tag
    centered: Tag = Tag("no")
    has_b: Tag = Tag("no")


# Tensors of a call, in the order of the argument block.
X, W, DY, GATE, DX, DGATE = range(6)
# Scratch of a thread: three rows of float32, then a row for every tensor that may have to be packed.
UPSTREAM, GATES, SLOPES, PACKED, SLOTS = 0, 1, 2, 3, 9
# In a gated backward these words hold the address of the partials and how many rows of weight there are.
DW, PERIOD = 5, 6


@jit
def put(address: Any, value: Any, count: Any, T: Any) -> Any:
    """Round and store sixteen values, or the first ``count``."""
    if count >= 16:
        store(address, value, T)
    else:
        store_some(address, value, count, T)


@jit
def kept_value(h: Any, t: Any) -> Any:
    """What the weight multiplied."""
    if on(t.first):
        return rounded(h, t.R)
    return h


@jit
def collect_after(
    x: Any, w: Any, dy: Any, g: Any, dg: Any, dw: Any, scratch: Any, n: Any, rstd: Any, scale: Any, t: Any
) -> Any:
    """Σ u·x̂ with u = dy·a·γ, which is kept; writes dgate and adds to dw on the way."""
    zero, r, k, j = splat(f4(0)), splat(rstd), splat(scale), 0
    sx, sw, sd, sg, se = size(t.X), size(t.W), size(t.U), size(t.G), size(t.E)
    total = zero
    while j < n:
        end, p, q = min(j + BLOCK, n), zero, zero
        while j < end:
            c, f = n - j, zero
            if on(t.has_w):
                f = load_upto(w + j * sw, c, t.W)
            h = value_of(load_upto(x + j * sx, c, t.X), zero, zero, r, k, t)
            e, v = load_upto(dy + j * sd, c, t.U), load_upto(g + j * sg, c, t.G)
            up = mul(e, activated(v, t))
            u = gradient_of(up, f, t)
            p, q = q, fma(u, h, p)
            if on(t.want_w):
                tally(dw + j * 4, mul(up, kept_value(h, t)), c)
            if on(t.want_g):
                put(dg + j * se, mul(mul(e, weighted(h, f, t)), slope(v, t)), c, t.E)
            if on(t.want_x):
                store(scratch + j * 4, u, F)
            j += 16
        total = add(total, add(p, q))
    return sum_lanes(total)


@jit
def write_after(x: Any, dx: Any, scratch: Any, n: Any, rstd: Any, scale: Any, b: Any, t: Any) -> Any:
    """Dx = rstd·(u − x̂·b)."""
    zero, r, k, bb, j = splat(f4(0)), splat(rstd), splat(scale), splat(-b), 0
    sx, sd = size(t.X), size(t.D)
    while j < n:
        c = n - j
        h = value_of(load_upto(x + j * sx, c, t.X), zero, zero, r, k, t)
        put(dx + j * sd, mul(mul(fma(h, bb, load(scratch + j * 4, F)), r), k), c, t.D)
        j += 16


@jit
def after_row(
    x: Any, w: Any, dy: Any, g: Any, dx: Any, dg: Any, dw: Any, stats: Any, n: Any, slot: Any, scratch: Any, t: Any
) -> Any:
    """One row whose gate came after its norm."""
    rstd, scale = f32_at(stats), f32_at(stats + 4)
    b = collect_after(x, w, dy, g, dg, dw, scratch, n, rstd, scale, t)
    if on(t.want_x):
        write_after(x, dx, scratch, n, rstd, scale, b / f4(n), t)


@jit
def collect_before(
    x: Any, w: Any, dy: Any, g: Any, dw: Any, scratch: Any, slot: Any, n: Any, stats: Any, t: Any
) -> Any:
    """Σ u·x̂ with u = dy·γ; keeps u, a(g) and a′(g), and adds to dw on the way."""
    r, k, s = splat(f32_at(stats)), splat(f32_at(stats + 4)), splat(f32_at(stats + 8))
    sx, sw, sd, sg = size(t.A), size(t.W), size(t.U), size(t.G)
    zero, j = splat(f4(0)), 0
    total = zero
    while j < n:
        end, p, q = min(j + BLOCK, n), zero, zero
        while j < end:
            c, f = n - j, zero
            if on(t.has_w):
                f = load_upto(w + j * sw, c, t.W)
            v = load_upto(g + j * sg, c, t.G)
            a = activated(v, t)
            h = value_of(product_of(load_upto(x + j * sx, c, t.A), a, s), zero, zero, r, k, t)
            e = load_upto(dy + j * sd, c, t.U)
            u = gradient_of(e, f, t)
            p, q = q, fma(u, h, p)
            if on(t.want_w):
                tally(dw + j * 4, mul(e, kept_value(h, t)), c)
            store(scratch + UPSTREAM * slot + j * 4, u, F)
            store(scratch + GATES * slot + j * 4, a, F)
            if on(t.want_g):
                store(scratch + SLOPES * slot + j * 4, slope(v, t), F)
            j += 16
        total = add(total, add(p, q))
    return sum_lanes(total)


@jit
def write_before(x: Any, dx: Any, dg: Any, scratch: Any, slot: Any, n: Any, stats: Any, b: Any, t: Any) -> Any:
    """Dx = dp·a and dgate = dp·x·a′ with dp = rstd·(u − x̂·b)."""
    r, k, s = splat(f32_at(stats)), splat(f32_at(stats + 4)), splat(f32_at(stats + 8))
    zero, bb, j = splat(f4(0)), splat(-b), 0
    sx, sd, se = size(t.A), size(t.D), size(t.E)
    while j < n:
        c, v = n - j, load_upto(x + j * sx, n - j, t.A)
        a = load(scratch + GATES * slot + j * 4, F)
        h = value_of(product_of(v, a, s), zero, zero, r, k, t)
        dp = mul(mul(fma(h, bb, load(scratch + UPSTREAM * slot + j * 4, F)), r), k)
        if on(t.want_x):
            put(dx + j * sd, product_of(dp, a, s), c, t.D)
        if on(t.want_g):
            put(dg + j * se, mul(product_of(dp, v, s), load(scratch + SLOPES * slot + j * 4, F)), c, t.E)
        j += 16


@jit
def before_row(
    x: Any, w: Any, dy: Any, g: Any, dx: Any, dg: Any, dw: Any, stats: Any, n: Any, slot: Any, scratch: Any, t: Any
) -> Any:
    """One row whose gate came before its norm."""
    b = collect_before(x, w, dy, g, dw, scratch, slot, n, stats, t)
    if on(t.want_x) or on(t.want_g):
        write_before(x, dx, dg, scratch, slot, n, stats, b / f4(n), t)


def gated_backward_kernel(t: GatedGradTags) -> Any:
    """Return the entry point for these tags."""
    row = before_row if t.before.name == "yes" else after_row
    kept = 12 if t.before.name == "yes" else 8

    @jit
    def plain(q: Any, x: Any, w: Any, dy: Any, g: Any, dx: Any, dg: Any, dw: Any, at: Any, scratch: Any) -> Any:
        row(x, w, dy, g, dx, dg, dw, at, word(q, WIDTH), word(q, SLOT), scratch, t)

    @jit
    def packed(q: Any, x: Any, w: Any, dy: Any, g: Any, dx: Any, dg: Any, dw: Any, at: Any, scratch: Any) -> Any:
        n, slot = word(q, WIDTH), word(q, SLOT)
        room = scratch + PACKED * slot
        xx, ww = gathered(q, X, x, room + X * slot, n, t.A), w
        if on(t.has_w):
            ww = gathered(q, W, w, room + W * slot, n, t.W)
        uu, gg = gathered(q, DY, dy, room + DY * slot, n, t.U), gathered(q, GATE, g, room + GATE * slot, n, t.G)
        dd, ee = room_for(q, DX, dx, room + DX * slot, t.D), room_for(q, DGATE, dg, room + DGATE * slot, t.E)
        row(xx, ww, uu, gg, dd, ee, dw, at, n, slot, scratch, t)
        if on(t.want_x):
            scattered(q, DX, dx, dd, n, t.D)
        if on(t.want_g):
            scattered(q, DGATE, dg, ee, n, t.E)

    one_row = packed if t.packed.name == "yes" else plain

    @jit
    def some_rows(q: Any, low: Any, high: Any, number: Any, scratch: Any) -> Any:
        d1, d2, stats, period, i = word(q, D1), word(q, D2), word(q, STATS), word(q, PERIOD), low
        step = word(q, WIDTH) * 4
        dw = word(q, DW) + number * period * step
        while i < high:
            i2 = i % d2
            i1, i0 = i // d2 % d1, i // d2 // d1
            x, w, dy = place(q, X, i0, i1, i2), place(q, W, i0, i1, i2), place(q, DY, i0, i1, i2)
            g, dx, dg = place(q, GATE, i0, i1, i2), place(q, DX, i0, i1, i2), place(q, DGATE, i0, i1, i2)
            for _ in range(min(d2 - i2, high - i)):
                one_row(q, x, w, dy, g, dx, dg, dw + i % period * step, stats + i * kept, scratch)
                x += along(q, X)
                w += along(q, W)
                dy += along(q, DY)
                g += along(q, GATE)
                dx += along(q, DX)
                dg += along(q, DGATE)
                i += 1

    return in_partials(some_rows, SLOTS)
