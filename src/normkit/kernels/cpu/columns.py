"""Statistics along columns and the norm made of them, where channels lie side by side: a vector is sixteen channels.

A chunk is a fixed number of consecutive *valid* positions, given by a list of positions where there is a mask. Chunks
are what is summed at once: their values lie in the cache while the second pass of the corrected two-pass reads them
again, and what they hold depends neither on padding nor on who computes them.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.reading import byte_at
from normkit.kernels.cpu.shares import drawn, thread_of
from normkit.kernels.cpu.simd import (
    add,
    div,
    fma,
    load,
    load_some,
    mul,
    not_negative,
    splat,
    store,
    store_some,
    sub,
    word,
)
from normkit.kernels.cpu.sums import NO, YES, f4, jit, load_upto
from normkit.kernels.cpu.tags import Tag, on, size

F = Tag("f32")
CHUNK = 64  # positions
BLOCK = 512  # channels a task: what is added up for them stays in the first-level cache

# Words of the argument block, as column_launch.py packs it. A tensor is its address and the byte strides of sample,
# position and channel.
COUNTER, TASKS, PIECE, CHANNELS, LENGTH, LIST, BEGINS, COUNTS = range(8)
PARTS, SCALES, TABLE, WEIGHT, BIAS, SUMS, MASK, PER, SCRATCH = range(8, 17)
TENSORS = 17
X, OUT, DY = 0, 1, 2


@jit
def address(q: Any, tensor: Any) -> Any:
    """A tensor's first element."""
    return word(q, TENSORS + 4 * tensor)


@jit
def stride(q: Any, tensor: Any, axis: Any) -> Any:
    """Bytes from one sample (0), position (1) or channel (2) to the next."""
    return word(q, TENSORS + 4 * tensor + 1 + axis)


def drawing(some_tasks: Callable[..., None]) -> Callable[[Any], None]:
    """Return the entry point that runs ``some_tasks(q, low, high, thread)``: all, or pieces until none is left."""

    def kernel(q):  # type: ignore[no-untyped-def]
        tasks, counter, piece = word(q, TASKS), word(q, COUNTER), word(q, PIECE)
        if counter == 0:
            some_tasks(q, 0, tasks, 0)
            return
        thread, pieces = thread_of(counter), (tasks + piece - 1) // piece
        while True:
            number = drawn(counter, thread, pieces)
            if number < 0:
                return
            some_tasks(q, number * piece, min(number * piece + piece, tasks), thread)

    return kernel


@jit
def position(first: Any, listed: Any, i: Any, length: Any, sample: Any, step: Any) -> Any:
    """The address of the i-th valid position."""
    p = i
    if listed != 0:
        p = word(listed, i)
    if sample == length * step:
        return first + p * step
    return first + p // length * sample + p % length * step


@jit
def segment_of(q: Any, i: Any) -> Any:
    """Which row of the tables the i-th valid position belongs to: its sample, or 0 where all share one."""
    if word(q, PER) == 0:
        return 0
    p = i
    if word(q, LIST) != 0:
        p = word(word(q, LIST), i)
    return p // word(q, LENGTH)


@jit
def store_upto(to: Any, value: Any, count: Any, T: Any) -> Any:
    """Round and store sixteen values, or the first ``count``."""
    if count >= 16:
        store(to, value, T)
    else:
        store_some(to, value, count, T)


@jit
def part(address: Any, n: Any, T: Any, whole: Any) -> Any:
    """Sixteen values, or the first ``n`` < 16 and zeros."""
    if on(whole):
        return load(address, T)
    return load_some(address, n, T)


@jit
def put(to: Any, value: Any, n: Any, T: Any, whole: Any) -> Any:
    """Round and store sixteen values, or the first ``n`` < 16."""
    if on(whole):
        store(to, value, T)
    else:
        store_some(to, value, n, T)


@jit
def scale_at(scales: Any, c: Any, n: Any, whole: Any) -> Any:
    """What sixteen channels are multiplied by."""
    if scales == 0:
        return splat(f4(1))
    return part(scales + 4 * c, n, F, whole)


@jit
def sum_four(a: Any, b: Any, c: Any, d: Any, k: Any, to: Any, n: Any, T: Any, whole: Any) -> Any:
    """Add four positions of sixteen channels."""
    s = fma(part(a, n, T, whole), k, mul(part(b, n, T, whole), k))
    t = fma(part(c, n, T, whole), k, mul(part(d, n, T, whole), k))
    put(to, add(part(to, n, F, whole), add(s, t)), n, F, whole)


@jit
def square_four(a: Any, b: Any, c: Any, d: Any, k: Any, to: Any, width: Any, n: Any, T: Any, whole: Any) -> Any:
    """Add four positions' distances from the mean at ``to``, and their squares, to the two rows below it."""
    m = sub(splat(f4(0)), part(to, n, F, whole))
    s, t = fma(part(a, n, T, whole), k, m), fma(part(b, n, T, whole), k, m)
    u, v = fma(part(c, n, T, whole), k, m), fma(part(d, n, T, whole), k, m)
    first, second = to + width, to + 2 * width
    put(first, add(part(first, n, F, whole), add(add(s, t), add(u, v))), n, F, whole)
    squares = add(fma(s, s, mul(t, t)), fma(u, u, mul(v, v)))
    put(second, add(part(second, n, F, whole), squares), n, F, whole)


@jit
def sum_chunk(q: Any, x: Any, i: Any, count: Any, scales: Any, out: Any, n: Any, T: Any) -> Any:
    """Σ x of a chunk, added to the row at ``out``: four positions to each other first, so it is 16 + 2 deep."""
    listed, length, sample, step = word(q, LIST), word(q, LENGTH), stride(q, X, 0), stride(q, X, 1)
    end, fours, full, e = i + count, i + count // 4 * 4, n // 16 * 16, size(T)
    while i < fours:
        a, b = position(x, listed, i, length, sample, step), position(x, listed, i + 1, length, sample, step)
        c, d = position(x, listed, i + 2, length, sample, step), position(x, listed, i + 3, length, sample, step)
        for j in range(0, full, 16):
            o = j * e
            sum_four(a + o, b + o, c + o, d + o, scale_at(scales, j, 16, YES), out + 4 * j, 16, T, YES)
        if full < n:
            o, k = full * e, scale_at(scales, full, n - full, NO)
            sum_four(a + o, b + o, c + o, d + o, k, out + 4 * full, n - full, T, NO)
        i += 4
    while i < end:
        a = position(x, listed, i, length, sample, step)
        for j in range(0, n, 16):
            value = mul(load_upto(a + j * e, n - j, T), scale_at(scales, j, n - j, NO))
            store_upto(out + 4 * j, add(load_upto(out + 4 * j, n - j, F), value), n - j, F)
        i += 1


@jit
def square_chunk(q: Any, x: Any, i: Any, count: Any, scales: Any, out: Any, n: Any, T: Any) -> Any:
    """Σ d and Σ d² of d = x − mean, added to the two rows below the mean at ``out``, as deep as `sum_chunk`."""
    listed, length, sample, step = word(q, LIST), word(q, LENGTH), stride(q, X, 0), stride(q, X, 1)
    end, fours, full, e, w = i + count, i + count // 4 * 4, n // 16 * 16, size(T), word(q, CHANNELS) * 4
    while i < fours:
        a, b = position(x, listed, i, length, sample, step), position(x, listed, i + 1, length, sample, step)
        c, d = position(x, listed, i + 2, length, sample, step), position(x, listed, i + 3, length, sample, step)
        for j in range(0, full, 16):
            o = j * e
            square_four(a + o, b + o, c + o, d + o, scale_at(scales, j, 16, YES), out + 4 * j, w, 16, T, YES)
        if full < n:
            o, k = full * e, scale_at(scales, full, n - full, NO)
            square_four(a + o, b + o, c + o, d + o, k, out + 4 * full, w, n - full, T, NO)
        i += 4
    while i < end:
        a = position(x, listed, i, length, sample, step)
        for j in range(0, n, 16):
            left, first, second = n - j, out + w + 4 * j, out + 2 * w + 4 * j
            value = mul(load_upto(a + j * e, left, T), scale_at(scales, j, left, NO))
            value = sub(value, load_upto(out + 4 * j, left, F))
            store_upto(first, add(load_upto(first, left, F), value), left, F)
            store_upto(second, fma(value, value, load_upto(second, left, F)), left, F)
        i += 1


@jit
def cleared(out: Any, rows: Any, width: Any, n: Any) -> Any:
    """Set ``n`` columns of some rows to 0."""
    for row in range(rows):
        for j in range(0, n, 16):
            store_upto(out + row * width + 4 * j, splat(f4(0)), n - j, F)


def moments_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's (mean, remainder, Σ(x − mean)²), by the corrected two-pass.

    A task is a chunk and `BLOCK` channels.
    """

    @jit
    def one_task(q: Any, x: Any, first: Any, count: Any, scales: Any, out: Any, n: Any) -> Any:
        width, total = word(q, CHANNELS) * 4, splat(f4(count))
        cleared(out, 3, width, n)
        sum_chunk(q, x, first, count, scales, out, n, T)
        for j in range(0, n, 16):
            store_upto(out + 4 * j, div(load_upto(out + 4 * j, n - j, F), total), n - j, F)
        square_chunk(q, x, first, count, scales, out, n, T)
        for j in range(0, n, 16):
            below, last = out + width + 4 * j, out + 2 * width + 4 * j
            added = load_upto(below, n - j, F)
            remainder = div(added, total)
            store_upto(below, remainder, n - j, F)
            store_upto(last, not_negative(sub(load_upto(last, n - j, F), mul(added, remainder))), n - j, F)

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels = word(q, CHANNELS)
        blocks = (channels + BLOCK - 1) // BLOCK
        for task in range(low, high):
            chunk, c = task // blocks, task % blocks * BLOCK
            first, count = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            out, scales = word(q, PARTS) + chunk * 12 * channels + 4 * c, word(q, SCALES)
            if scales != 0:
                scales += segment_of(q, first) * 4 * channels + 4 * c
            one_task(q, address(q, X) + c * size(T), first, count, scales, out, min(BLOCK, channels - c))

    return drawing(some_tasks)


@jit
def statistics_at(table: Any, width: Any, n: Any, whole: Any) -> Any:
    """(mean, remainder, rstd, scale) of sixteen channels."""
    mean, remainder = part(table, n, F, whole), part(table + width, n, F, whole)
    return mean, remainder, part(table + 2 * width, n, F, whole), part(table + 3 * width, n, F, whole)


@jit
def normalised(v: Any, s: Any) -> Any:
    """((x·scale − mean) − remainder)·rstd, whose scale, 1 but for extreme statistics, is a power of two: exact."""
    return mul(sub(sub(mul(v, s[3]), s[0]), s[1]), s[2])


@jit
def apply_vector(x: Any, y: Any, table: Any, weight: Any, bias: Any, width: Any, n: Any, T: Any, whole: Any) -> Any:
    """Y = x̂·γ + β for sixteen channels of a position."""
    xhat = normalised(part(x, n, T, whole), statistics_at(table, width, n, whole))
    put(y, fma(xhat, part(weight, n, F, whole), part(bias, n, F, whole)), n, T, whole)


def apply_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that normalises; a task is a position with all its channels. Masked ones become 0."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, mask = word(q, CHANNELS), word(q, LENGTH), word(q, MASK)
        width, e, weight, bias, full = 4 * channels, size(T), word(q, WEIGHT), word(q, BIAS), channels // 16 * 16
        for p in range(low, high):
            n, i = p // length, p % length
            x = address(q, X) + n * stride(q, X, 0) + i * stride(q, X, 1)
            y = address(q, OUT) + n * stride(q, OUT, 0) + i * stride(q, OUT, 1)
            table = word(q, TABLE) + n * word(q, PER) * 4 * width
            if mask != 0 and byte_at(mask + p) == 0:
                emptied(y, channels, T)
                continue
            for c in range(0, full, 16):
                k = 4 * c
                apply_vector(x + c * e, y + c * e, table + k, weight + k, bias + k, width, 16, T, YES)
            if full < channels:
                o, k = full * e, 4 * full
                apply_vector(x + o, y + o, table + k, weight + k, bias + k, width, channels - full, T, NO)

    return drawing(some_tasks)


@jit
def emptied(to: Any, n: Any, T: Any) -> Any:
    """Set a position to 0."""
    for j in range(0, n, 16):
        store_upto(to + j * size(T), splat(f4(0)), n - j, T)
