"""A row norm forward: prepare the row, take its statistics, write it."""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

from normkit.kernels.cpu.compile import Word, with_short_block
from normkit.kernels.cpu.shares import drawn, thread_of
from normkit.kernels.cpu.simd import (
    add,
    f64_word,
    fma,
    load,
    load_some,
    move,
    mul,
    put_f32,
    rounded,
    splat,
    store,
    store_past,
    store_some,
    strided,
    sub,
    sum_lanes,
    word,
)
from normkit.kernels.cpu.storage import BYTES
from normkit.kernels.cpu.sums import NO, YES, f4, jit, load_upto, row_statistics
from normkit.kernels.cpu.tags import Tag, on, size


class RowTags(NamedTuple):
    """What a forward kernel is compiled for: storage types, and the switches of a spec."""

    X: Tag  # what the statistics read: x, or the sum with a residual
    A: Tag  # the branch that is added to the residual
    Q: Tag  # the residual
    R: Tag  # the dtype of the first rounding, where there are two
    P: Tag  # the promoted dtype between weight and bias
    W: Tag
    B: Tag
    Y: Tag
    centered: Tag
    sum: Tag
    added: Tag
    has_w: Tag
    plus: Tag
    plus_rounded: Tag
    first: Tag
    has_b: Tag
    past: Tag
    packed: Tag


@jit
def finish(value: Any, w: Any, b: Any, t: Any) -> Any:
    """Weigh and shift sixteen normalised values, with the roundings that the spec declares before the last."""
    if on(t.first):
        value = rounded(value, t.R)
    if on(t.has_w):
        gain = w
        if on(t.plus):
            gain = add(splat(f4(1)), w)
        if on(t.plus_rounded):
            gain = rounded(add(splat(f4(1)), w), t.W)
        if on(t.has_b):
            if on(t.first):
                return add(rounded(mul(value, gain), t.P), b)
            return fma(value, gain, b)
        return mul(value, gain)
    if on(t.has_b):
        return add(value, b)
    return value


@jit
def value_of(v: Any, mean: Any, remainder: Any, rstd: Any, scale: Any, t: Any) -> Any:
    """The normalised value of sixteen elements. The scale, 1 but for extreme rows, is a power of two: exact."""
    if on(t.centered):
        return mul(sub(fma(v, scale, mean), remainder), rstd)
    return mul(mul(v, scale), rstd)


@jit
def write_row(
    x: Any, w: Any, b: Any, y: Any, n: Any, mean: Any, remainder: Any, rstd: Any, scale: Any, past: Any, t: Any
) -> Any:
    """Y = normalised x · γ + β for one row."""
    if on(t.centered):  # where the scale costs nothing: it is part of a fused multiply-add
        write_elements(x, w, b, y, n, mean, remainder, rstd, scale, past, t, YES)
    elif scale == f4(1):
        write_elements(x, w, b, y, n, mean, remainder, rstd, scale, past, t, NO)
    else:
        write_elements(x, w, b, y, n, mean, remainder, rstd, scale, past, t, YES)


@jit
def write_elements(
    x: Any,
    w: Any,
    b: Any,
    y: Any,
    n: Any,
    mean: Any,
    remainder: Any,
    rstd: Any,
    scale: Any,
    past: Any,
    t: Any,
    scaled: Any,
) -> Any:
    """The elements of a row, multiplied by its scale or not."""
    m, d, r, k = splat(-mean), splat(remainder), splat(rstd), splat(scale)
    zero, j, full = splat(f4(0)), 0, n // 16 * 16
    sx, sw, sb, sy = size(t.X), size(t.W), size(t.B), size(t.Y)
    while j < full:
        v = load(x + j * sx, t.X)
        v = value_of(v, m, d, r, k, t) if on(scaled) else mul(v, r)
        g, h = zero, zero
        if on(t.has_w):
            g = load(w + j * sw, t.W)
        if on(t.has_b):
            h = load(b + j * sb, t.B)
        v = finish(v, g, h, t)
        if on(t.past) and past:
            store_past(y + j * sy, v, t.Y)
        else:
            store(y + j * sy, v, t.Y)
        j += 16
    if j < n:
        c = n - j
        v = value_of(load_some(x + j * sx, c, t.X), m, d, r, k, t)
        g, h = zero, zero
        if on(t.has_w):
            g = load_some(w + j * sw, c, t.W)
        if on(t.has_b):
            h = load_some(b + j * sb, c, t.B)
        store_some(y + j * sy, finish(v, g, h, t), c, t.Y)


@jit
def add_row(a: Any, q: Any, s: Any, n: Any, alpha: Any, beta: Any, t: Any) -> Any:
    """S = alpha·q + beta·a, rounded once."""
    al, be, j = splat(alpha), splat(beta), 0
    sa, sq, ss = size(t.A), size(t.Q), size(t.X)
    while j < n:
        c = n - j
        u, v = load_upto(a + j * sa, c, t.A), load_upto(q + j * sq, c, t.Q)
        if beta != f4(1):
            u = mul(u, be)
        if alpha != f4(1):
            v = mul(v, al)
        v = add(v, u)
        if c >= 16:
            store(s + j * ss, v, t.X)
        else:
            store_some(s + j * ss, v, c, t.X)
        j += 16


@jit
def norm_row(x: Any, w: Any, b: Any, y: Any, stats: Any, n: Any, eps: Any, past: Any, t: Any) -> Any:
    """One row: statistics, result, and the statistics kept for the backward where ``stats`` is not 0."""
    mean, remainder, rstd, scale = row_statistics(x, n, eps, t)
    if stats != 0:
        if on(t.centered):
            put_f32(stats, mean)
            put_f32(stats + 4, remainder)
            put_f32(stats + 8, rstd)
            put_f32(stats + 12, scale)
        else:
            put_f32(stats, rstd)
            put_f32(stats + 4, scale)
    write_row(x, w, b, y, n, mean, remainder, rstd, scale, past, t)


# Words of the argument block, as rows.py packs it.
COUNTER, ROWS, PIECE, WIDTH, EPS, ALPHA, BETA, PAST, STATS, D1, D2, SCRATCH, SLOT, TENSORS = range(14)
STRIDES = 5  # of a tensor: its address, three outer strides and the stride along the row, in bytes


@jit
def place(q: Any, tensor: Any, i0: Any, i1: Any, i2: Any) -> Any:
    """The address of a row of a tensor."""
    return strided(q, TENSORS + tensor * STRIDES, i0, i1, i2)


@jit
def along(q: Any, tensor: Any) -> Any:
    """The innermost outer stride of a tensor."""
    return word(q, TENSORS + tensor * STRIDES + 3)


@jit
def gathered(q: Any, tensor: Any, address: Any, scratch: Any, n: Any, T: Any) -> Any:
    """Pack a row whose elements lie apart into scratch, and return where it is contiguous now."""
    step, e = word(q, TENSORS + tensor * STRIDES + 4), size(T)
    if step == e:
        return address
    if step == 0:  # one value for the whole row, as the gradient of a sum is
        value, j = splat(sum_lanes(load_some(address, 1, T))), 0
        while j < n:
            store(scratch + j * e, value, T)
            j += 16
        return scratch
    for j in range(n):
        move(scratch + j * e, address + j * step, T)
    return scratch


@jit
def scattered(q: Any, tensor: Any, address: Any, scratch: Any, n: Any, T: Any) -> Any:
    """Spread a row from scratch to where it belongs."""
    step, e = word(q, TENSORS + tensor * STRIDES + 4), size(T)
    if step != e:
        for j in range(n):
            move(address + j * step, scratch + j * e, T)


@jit
def room_for(q: Any, tensor: Any, address: Any, scratch: Any, T: Any) -> Any:
    """Where to write a row: in place, or into scratch for `scattered`."""
    if word(q, TENSORS + tensor * STRIDES + 4) == size(T):
        return address
    return scratch


@jit
def plain_row(q: Any, x: Any, w: Any, b: Any, y: Any, a: Any, r: Any, at: Any, scratch: Any, t: Any) -> Any:
    """A row of a norm."""
    norm_row(x, w, b, y, at, word(q, WIDTH), f64_word(q, EPS), word(q, PAST) != 0, t)


@jit
def added_row(q: Any, x: Any, w: Any, b: Any, y: Any, a: Any, r: Any, at: Any, scratch: Any, t: Any) -> Any:
    """A row of a residual add and norm: x receives the sum."""
    add_row(a, r, x, word(q, WIDTH), f4(f64_word(q, ALPHA)), f4(f64_word(q, BETA)), t)
    norm_row(x, w, b, y, at, word(q, WIDTH), f64_word(q, EPS), word(q, PAST) != 0, t)


@jit
def packed_row(q: Any, x: Any, w: Any, b: Any, y: Any, a: Any, r: Any, at: Any, scratch: Any, t: Any) -> Any:
    """As `plain_row`, of rows whose elements lie apart."""
    n, slot = word(q, WIDTH), word(q, SLOT)
    xx, yy, ww, bb = gathered(q, 0, x, scratch, n, t.X), room_for(q, 3, y, scratch + slot, t.Y), w, b
    if on(t.has_w):
        ww = gathered(q, 1, w, scratch + 2 * slot, n, t.W)
    if on(t.has_b):
        bb = gathered(q, 2, b, scratch + 3 * slot, n, t.B)
    norm_row(xx, ww, bb, yy, at, n, f64_word(q, EPS), False, t)
    scattered(q, 3, y, yy, n, t.Y)


@jit
def packed_added_row(q: Any, x: Any, w: Any, b: Any, y: Any, a: Any, r: Any, at: Any, scratch: Any, t: Any) -> Any:
    """As `added_row`, of rows whose elements lie apart."""
    n, slot = word(q, WIDTH), word(q, SLOT)
    aa, rr = gathered(q, 4, a, scratch + 4 * slot, n, t.A), gathered(q, 5, r, scratch + 5 * slot, n, t.Q)
    xx = room_for(q, 0, x, scratch, t.X)
    add_row(aa, rr, xx, n, f4(f64_word(q, ALPHA)), f4(f64_word(q, BETA)), t)
    scattered(q, 0, x, xx, n, t.X)
    yy, ww, bb = room_for(q, 3, y, scratch + slot, t.Y), w, b
    if on(t.has_w):
        ww = gathered(q, 1, w, scratch + 2 * slot, n, t.W)
    if on(t.has_b):
        bb = gathered(q, 2, b, scratch + 3 * slot, n, t.B)
    norm_row(xx, ww, bb, yy, at, n, f64_word(q, EPS), False, t)
    scattered(q, 3, y, yy, n, t.Y)


# The parts of a kernel are compiled one by one, also those a tag switches off: what it never does is kept out of it.
_ROWS = {("no", "no"): plain_row, ("yes", "no"): added_row, ("no", "yes"): packed_row, ("yes", "yes"): packed_added_row}


def forward_kernel(t: RowTags) -> Any:
    """Return the entry point for these tags."""
    one_row = _ROWS[t.added.name, t.packed.name]
    kept = 16 if t.centered.name == "yes" else 8

    @jit
    def some_rows(q: Any, low: Any, high: Any, scratch: Any) -> Any:
        d1, d2, stats, i = word(q, D1), word(q, D2), word(q, STATS), low
        while i < high:
            i2 = i % d2
            i1, i0 = i // d2 % d1, i // d2 // d1
            x, w, b = place(q, 0, i0, i1, i2), place(q, 1, i0, i1, i2), place(q, 2, i0, i1, i2)
            y, a, r = place(q, 3, i0, i1, i2), place(q, 4, i0, i1, i2), place(q, 5, i0, i1, i2)
            for _ in range(min(d2 - i2, high - i)):
                at = 0
                if stats != 0:
                    at = stats + i * kept
                one_row(q, x, w, b, y, a, r, at, scratch, t)
                x += along(q, 0)
                w += along(q, 1)
                b += along(q, 2)
                y += along(q, 3)
                a += along(q, 4)
                r += along(q, 5)
                i += 1

    return with_short_block(in_pieces(some_rows, SLOTS_EACH), _short_words(t))


def in_pieces(some_rows: Any, slots: int) -> Any:
    """Return the entry point of ``some_rows(q, low, high, scratch)``: all rows, or with a counter pieces of them.

    A thread draws pieces until none is left; ``slots`` rows of scratch are its own.
    """

    def kernel(q):  # type: ignore[no-untyped-def]
        rows, counter, scratch = word(q, ROWS), word(q, COUNTER), word(q, SCRATCH)
        if counter == 0:
            some_rows(q, 0, rows, scratch)
            return
        piece, thread = word(q, PIECE), thread_of(counter)
        pieces = (rows + piece - 1) // piece
        scratch += thread * slots * word(q, SLOT)
        while True:
            number = drawn(counter, thread, pieces)
            if number < 0:
                return
            some_rows(q, number * piece, min(number * piece + piece, rows), scratch)

    return kernel


def _short_words(t: RowTags) -> list[Word]:
    """Say how the block follows from (rows, width, ε, α, β, stats, x, w, b, y, a, r), for contiguous rows.

    With the kernel, twelve words take 0.95 µs at 1 × 4096, 43 through ctypes 2.9 (`python benchmarks/launch.py`).
    """
    rows, width, eps, alpha, beta, stats = ((i, 1) for i in range(6))
    words: list[Word] = [0, rows, rows, width, eps, alpha, beta, 0, stats, 1, rows, 0, 0]
    moving = {0: t.X, 3: t.Y} | ({4: t.A, 5: t.Q} if t.added.name == "yes" else {})
    for tensor in range(6):
        step: Word = (1, BYTES[moving[tensor].name]) if tensor in moving else 0
        words += [(6 + tensor, 1), 0, 0, step, 0]
    return words


SLOTS_EACH = 6  # rows of scratch a thread: one for every tensor
