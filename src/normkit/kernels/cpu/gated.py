"""A gated rms norm forward: y = RMS(x)·γ·a(g), or gate first, RMS(x·a(g))·γ.

Gate first, the float32 products are kept in scratch for as long as their row lasts, and are then a row like any other.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

from normkit.kernels.cpu.exponential import activated
from normkit.kernels.cpu.forward import (
    D1,
    D2,
    EPS,
    SLOT,
    STATS,
    WIDTH,
    along,
    finish,
    gathered,
    in_pieces,
    place,
    room_for,
    scattered,
    value_of,
)
from normkit.kernels.cpu.simd import f64_word, mul, put_f32, rounded, splat, store, store_some, word
from normkit.kernels.cpu.sums import f4, jit, load_upto, rms_statistics
from normkit.kernels.cpu.tags import Tag, on, size


class GatedTags(NamedTuple):
    """What a gated forward is compiled for; the names that `RowTags` has mean the same."""

    X: Tag  # what the statistic reads: x, or gate first the float32 products
    A: Tag  # x as stored
    G: Tag  # the gate
    R: Tag
    P: Tag
    W: Tag
    Y: Tag
    before: Tag
    silu: Tag
    has_w: Tag
    plus: Tag
    plus_rounded: Tag
    first: Tag
    packed: Tag
    centered: Tag = Tag("no")
    sum: Tag = Tag("no")
    has_b: Tag = Tag("no")


F = Tag("f32")
# Scratch of a thread: the products, then a row for every tensor that may have to be packed.
PRODUCTS, PACKED_X, PACKED_W, PACKED_G, PACKED_Y, SLOTS = range(6)
SHRINK = f4(2.0**-64)  # of both factors, where a product leaves float32's range; twice that, 2^-256, in its square


@jit
def weighted(value: Any, w: Any, t: Any) -> Any:
    """The normalised value times γ, with every rounding that comes before a gate."""
    value = finish(value, w, splat(f4(0)), t)
    if on(t.first):
        return rounded(value, t.P)
    return value


@jit
def product_of(x: Any, a: Any, shrink: Any) -> Any:
    """X·a(g). The factor, 1 but for rows whose products overflow, is a power of two: exact."""
    return mul(mul(x, shrink), mul(a, shrink))


@jit
def multiply_row(x: Any, g: Any, p: Any, n: Any, shrink: Any, t: Any) -> Any:
    """P = x·a(g) in float32."""
    k, j, sx, sg = splat(shrink), 0, size(t.A), size(t.G)
    while j < n:
        c = n - j
        a = activated(load_upto(g + j * sg, c, t.G), t)
        store(p + j * 4, product_of(load_upto(x + j * sx, c, t.A), a, k), F)
        j += 16


@jit
def write_gated(x: Any, w: Any, g: Any, y: Any, n: Any, rstd: Any, scale: Any, t: Any) -> Any:
    """Y = normalised x · γ, times a(g) where the gate comes after."""
    zero, r, k, j = splat(f4(0)), splat(rstd), splat(scale), 0
    sx, sw, sg, sy = size(t.X), size(t.W), size(t.G), size(t.Y)
    while j < n:
        c, f = n - j, zero
        if on(t.has_w):
            f = load_upto(w + j * sw, c, t.W)
        v = weighted(value_of(load_upto(x + j * sx, c, t.X), zero, zero, r, k, t), f, t)
        if not on(t.before):
            v = mul(v, activated(load_upto(g + j * sg, c, t.G), t))
        if c >= 16:
            store(y + j * sy, v, t.Y)
        else:
            store_some(y + j * sy, v, c, t.Y)
        j += 16


@jit
def after_row(x: Any, w: Any, g: Any, y: Any, stats: Any, n: Any, eps: Any, scratch: Any, t: Any) -> Any:
    """One row, normalised and then gated; keeps (rstd, scale) where ``stats`` is not 0."""
    rstd, scale = rms_statistics(x, n, eps, t)
    if stats != 0:
        put_f32(stats, rstd)
        put_f32(stats + 4, scale)
    write_gated(x, w, g, y, n, rstd, scale, t)


@jit
def before_row(x: Any, w: Any, g: Any, y: Any, stats: Any, n: Any, eps: Any, scratch: Any, t: Any) -> Any:
    """One row, gated and then normalised; keeps (rstd, scale, shrink) where ``stats`` is not 0."""
    p, shrink = scratch, f4(1)
    multiply_row(x, g, p, n, shrink, t)
    rstd, scale = rms_statistics(p, n, eps, t)
    if rstd == f4(0):  # a product is infinite: once more, its factors scaled; those of an infinite x stay infinite
        shrink = SHRINK
        multiply_row(x, g, p, n, shrink, t)
        rstd, scale = rms_statistics(p, n, eps * 2.0**-256, t)
    if stats != 0:
        put_f32(stats, rstd)
        put_f32(stats + 4, scale)
        put_f32(stats + 8, shrink)
    write_gated(p, w, g, y, n, rstd, scale, t)


def gated_kernel(t: GatedTags) -> Any:
    """Return the entry point for these tags."""
    row = before_row if t.before.name == "yes" else after_row
    kept = 12 if t.before.name == "yes" else 8

    @jit
    def plain(q: Any, x: Any, w: Any, g: Any, y: Any, at: Any, scratch: Any) -> Any:
        row(x, w, g, y, at, word(q, WIDTH), f64_word(q, EPS), scratch, t)

    @jit
    def packed(q: Any, x: Any, w: Any, g: Any, y: Any, at: Any, scratch: Any) -> Any:
        n, slot = word(q, WIDTH), word(q, SLOT)
        xx = gathered(q, 0, x, scratch + PACKED_X * slot, n, t.A)
        gg = gathered(q, 2, g, scratch + PACKED_G * slot, n, t.G)
        ww, yy = w, room_for(q, 3, y, scratch + PACKED_Y * slot, t.Y)
        if on(t.has_w):
            ww = gathered(q, 1, w, scratch + PACKED_W * slot, n, t.W)
        row(xx, ww, gg, yy, at, n, f64_word(q, EPS), scratch, t)
        scattered(q, 3, y, yy, n, t.Y)

    one_row = packed if t.packed.name == "yes" else plain

    @jit
    def some_rows(q: Any, low: Any, high: Any, scratch: Any) -> Any:
        d1, d2, stats, i = word(q, D1), word(q, D2), word(q, STATS), low
        while i < high:
            i2 = i % d2
            i1, i0 = i // d2 % d1, i // d2 // d1
            x, w, g, y = (
                place(q, 0, i0, i1, i2),
                place(q, 1, i0, i1, i2),
                place(q, 2, i0, i1, i2),
                place(q, 3, i0, i1, i2),
            )
            for _ in range(min(d2 - i2, high - i)):
                at = 0
                if stats != 0:
                    at = stats + i * kept
                one_row(q, x, w, g, y, at, scratch)
                x += along(q, 0)
                w += along(q, 1)
                g += along(q, 2)
                y += along(q, 3)
                i += 1

    return in_pieces(some_rows, SLOTS)
