"""A row norm backward: dx row by row, weight gradients in float32 partials over fixed pieces of rows.

With g = dy·γ and x̂ the normalised row, rms: dx = rstd·(g − x̂·mean(g·x̂)); layer: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)).
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

from normkit.kernels.cpu.compile import Word, with_short_block
from normkit.kernels.cpu.forward import (
    COUNTER,
    D1,
    D2,
    PIECE,
    ROWS,
    SCRATCH,
    SLOT,
    SLOTS_EACH,
    STATS,
    WIDTH,
    along,
    gathered,
    place,
    room_for,
    scattered,
    value_of,
)
from normkit.kernels.cpu.shares import drawn, thread_of
from normkit.kernels.cpu.simd import (
    add,
    f32_at,
    fma,
    load,
    load_some,
    mul,
    rounded,
    splat,
    store,
    store_some,
    sub,
    sum_lanes,
    word,
)
from normkit.kernels.cpu.storage import BYTES
from normkit.kernels.cpu.sums import BLOCK, f4, jit, load_upto
from normkit.kernels.cpu.tags import Tag, on, size


class GradTags(NamedTuple):
    """What a backward kernel is compiled for."""

    X: Tag
    G: Tag  # dy
    R: Tag
    W: Tag
    D: Tag  # dx
    E: Tag  # the gradient that reaches the sum from beyond the norm
    centered: Tag
    sum: Tag
    has_w: Tag
    plus: Tag
    plus_rounded: Tag
    first: Tag
    added: Tag  # a gradient E joins
    want_x: Tag
    want_w: Tag
    want_b: Tag
    packed: Tag


@jit
def gradient_of(dy: Any, w: Any, t: Any) -> Any:
    """dy·γ for sixteen elements."""
    if on(t.has_w):
        gain = w
        if on(t.plus):
            gain = add(splat(f4(1)), w)
        if on(t.plus_rounded):
            gain = rounded(add(splat(f4(1)), w), t.W)
        return mul(dy, gain)
    return dy


@jit
def collect(
    x: Any, dy: Any, w: Any, dw: Any, db: Any, n: Any, mean: Any, remainder: Any, rstd: Any, scale: Any, t: Any
) -> Any:
    """(Σ g, Σ g·x̂), adding dy·x̂ and dy to the partials on the way."""
    m, d, r, k = splat(-mean), splat(remainder), splat(rstd), splat(scale)
    sx, sg, sw, j = size(t.X), size(t.G), size(t.W), 0
    plain, weighted = splat(f4(0)), splat(f4(0))
    while j < n:
        end = min(j + BLOCK, n)
        p, q = splat(f4(0)), splat(f4(0))
        u, v = splat(f4(0)), splat(f4(0))
        odd = False
        while j < end:
            c = end - j
            h = value_of(load_upto(x + j * sx, c, t.X), m, d, r, k, t)
            e = load_upto(dy + j * sg, c, t.G)
            f = splat(f4(0))
            if on(t.has_w):
                f = load_upto(w + j * sw, c, t.W)
            g = gradient_of(e, f, t)
            if odd:
                q = fma(g, h, q)
                if on(t.centered):
                    v = add(v, g)
            else:
                p = fma(g, h, p)
                if on(t.centered):
                    u = add(u, g)
            odd = not odd
            if on(t.want_w):
                kept = h
                if on(t.first):
                    kept = rounded(h, t.R)
                tally(dw + j * 4, mul(e, kept), c)
            if on(t.want_b):
                tally(db + j * 4, e, c)
            j += 16
        weighted = add(weighted, add(p, q))
        plain = add(plain, add(u, v))
    return sum_lanes(plain), sum_lanes(weighted)


@jit
def tally(address: Any, value: Any, count: Any) -> Any:
    """Add sixteen (or ``count``) float32 to a partial."""
    if count >= 16:
        store(address, add(load(address, F), value), F)
    else:
        store_some(address, add(load_some(address, count, F), value), count, F)


F = Tag("f32")


@jit
def write_gradient(
    x: Any,
    dy: Any,
    w: Any,
    e: Any,
    dx: Any,
    n: Any,
    mean: Any,
    remainder: Any,
    rstd: Any,
    scale: Any,
    a: Any,
    b: Any,
    t: Any,
) -> Any:
    """Dx = rstd·(g − a − x̂·b), plus what reaches the sum directly."""
    m, d, r, k = splat(-mean), splat(remainder), splat(rstd), splat(scale)
    sx, sg, sw, sd, se, j = size(t.X), size(t.G), size(t.W), size(t.D), size(t.E), 0
    aa, bb = splat(a), splat(-b)
    while j < n:
        c = n - j
        h = value_of(load_upto(x + j * sx, c, t.X), m, d, r, k, t)
        f = splat(f4(0))
        if on(t.has_w):
            f = load_upto(w + j * sw, c, t.W)
        g = gradient_of(load_upto(dy + j * sg, c, t.G), f, t)
        if on(t.centered):
            g = sub(g, aa)
        g = mul(mul(fma(h, bb, g), r), k)
        if on(t.added):
            g = add(g, load_upto(e + j * se, c, t.E))
        if c >= 16:
            store(dx + j * sd, g, t.D)
        else:
            store_some(dx + j * sd, g, c, t.D)
        j += 16


@jit
def gradient_row(x: Any, dy: Any, w: Any, e: Any, dx: Any, dw: Any, db: Any, stats: Any, n: Any, t: Any) -> Any:
    """One row."""
    mean, remainder = f4(0), f4(0)
    if on(t.centered):
        mean, remainder = f32_at(stats), f32_at(stats + 4)
        rstd, scale = f32_at(stats + 8), f32_at(stats + 12)
    else:
        rstd, scale = f32_at(stats), f32_at(stats + 4)
    count = f4(n)
    if on(t.sum):
        count = f4(1)
    a, b = collect(x, dy, w, dw, db, n, mean, remainder, rstd, scale, t)
    if on(t.want_x):
        write_gradient(x, dy, w, e, dx, n, mean, remainder, rstd, scale, a / count, b / count, t)


@jit
def packed_gradient_row(
    q: Any, x: Any, g: Any, w: Any, e: Any, dx: Any, dw: Any, db: Any, at: Any, scratch: Any, t: Any
) -> Any:
    """One row whose elements lie apart."""
    n, slot = word(q, WIDTH), word(q, SLOT)
    xx, gg = gathered(q, 0, x, scratch, n, t.X), gathered(q, 2, g, scratch + 2 * slot, n, t.G)
    ww, ee, dd = w, e, room_for(q, 3, dx, scratch + 3 * slot, t.D)
    if on(t.has_w):
        ww = gathered(q, 1, w, scratch + slot, n, t.W)
    if on(t.added):
        ee = gathered(q, 4, e, scratch + 4 * slot, n, t.E)
    gradient_row(xx, gg, ww, ee, dd, dw, db, at, n, t)
    if on(t.want_x):
        scattered(q, 3, dx, dd, n, t.D)


@jit
def plain_gradient_row(
    q: Any, x: Any, g: Any, w: Any, e: Any, dx: Any, dw: Any, db: Any, at: Any, scratch: Any, t: Any
) -> Any:
    """One row."""
    gradient_row(x, g, w, e, dx, dw, db, at, word(q, WIDTH), t)


# In a backward these words hold the addresses of the partials.
DW, DB = 5, 6


def backward_kernel(t: GradTags) -> Any:
    """Return the entry point for these tags."""
    one_row = packed_gradient_row if t.packed.name == "yes" else plain_gradient_row
    kept = 16 if t.centered.name == "yes" else 8

    @jit
    def some_rows(q: Any, low: Any, high: Any, number: Any, scratch: Any) -> Any:
        d1, d2, stats, i = word(q, D1), word(q, D2), word(q, STATS), low
        part = number * word(q, WIDTH) * 4
        dw, db = word(q, DW) + part, word(q, DB) + part
        while i < high:
            i2 = i % d2
            i1, i0 = i // d2 % d1, i // d2 // d1
            x, w, g = place(q, 0, i0, i1, i2), place(q, 1, i0, i1, i2), place(q, 2, i0, i1, i2)
            dx, e = place(q, 3, i0, i1, i2), place(q, 4, i0, i1, i2)
            for _ in range(min(d2 - i2, high - i)):
                one_row(q, x, g, w, e, dx, dw, db, stats + i * kept, scratch, t)
                x += along(q, 0)
                w += along(q, 1)
                g += along(q, 2)
                dx += along(q, 3)
                e += along(q, 4)
                i += 1

    return with_short_block(in_partials(some_rows, SLOTS_EACH), _short_words(t))


def in_partials(some_rows: Any, slots: int) -> Any:
    """Return the entry point of ``some_rows(q, low, high, number, scratch)``: piece after piece, numbered.

    A piece of rows is a partial of that number, whoever computes it: one thread all, or with a counter each thread
    pieces until none is left. ``slots`` rows of scratch are a thread's own.
    """

    def kernel(q):  # type: ignore[no-untyped-def]
        rows, counter, piece = word(q, ROWS), word(q, COUNTER), word(q, PIECE)
        scratch, pieces, thread = word(q, SCRATCH), (rows + piece - 1) // piece, 0
        number = 0
        if counter != 0:
            thread = thread_of(counter)
            number = drawn(counter, thread, pieces)
            scratch += thread * slots * word(q, SLOT)
        while 0 <= number < pieces:
            some_rows(q, number * piece, min(number * piece + piece, rows), number, scratch)
            if counter != 0:
                number = drawn(counter, thread, pieces)
            else:
                number += 1

    return kernel


def _short_words(t: GradTags) -> list[Word]:
    """Say how the block follows from (rows, width, piece, dw, db, stats, x, w, dy, dx, extra): as forward.py has it."""
    rows, width, piece, dw, db, stats = ((i, 1) for i in range(6))
    words: list[Word] = [0, rows, piece, width, 0, dw, db, 0, stats, 1, rows, 0, 0]
    for tensor, T in enumerate((t.X, None, t.G, t.D, t.E)):
        words += [(6 + tensor, 1), 0, 0, 0 if T is None else (1, BYTES[T.name]), 0]
    return words


def fold_kernel(target: Tag) -> Any:
    """Return the entry point that adds partials, first to last, and rounds to ``target``."""

    def kernel(q):  # type: ignore[no-untyped-def]
        parts, total, count, n = word(q, 0), word(q, 1), word(q, 2), word(q, 3)
        j = 0
        while j < n:
            c = n - j
            s = load_upto(parts + j * 4, c, F)
            for i in range(1, count):
                s = add(s, load_upto(parts + (i * n + j) * 4, c, F))
            if c >= 16:
                store(total + j * size(target), s, target)
            else:
                store_some(total + j * size(target), s, c, target)
            j += 16

    return kernel
