"""Statistics along columns and what follows from them, where channels lie side by side: a vector is sixteen channels.

A chunk is a fixed number of consecutive *valid* positions, given by a list of positions where there is a mask. Chunks
are what is summed at once: their values lie in the cache while the second pass of the corrected two-pass reads them
again, and what they hold depends neither on padding nor on who computes them.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.reading import byte_at
from normkit.kernels.cpu.simd import (
    add,
    div,
    fma,
    mul,
    not_negative,
    splat,
    store,
    store_some,
    sub,
    take,
    word,
)
from normkit.kernels.cpu.sums import f4, jit, load_upto
from normkit.kernels.cpu.tags import Tag, size

F = Tag("f32")
CHUNK = 64  # positions
BLOCK = 64  # channels a task

# Words of the argument block, as positions.py packs it. A tensor is its address and the byte strides of sample,
# position and channel.
(COUNTER, TASKS, PIECE, CHANNELS, LENGTH, LIST, BEGINS, COUNTS, PARTS, SCALES, TABLE, GAINS, SUMS, MASK, PER, SCRATCH) = (
    range(16)
)  # fmt: skip
TENSORS = 16
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
        tasks, counter, piece = word(q, COUNTER + 1), word(q, COUNTER), word(q, COUNTER + 2)
        if counter == 0:
            some_tasks(q, 0, tasks, 0)
            return
        thread = take(counter + 8)
        while True:
            low = take(counter) * piece
            if low >= tasks:
                return
            some_tasks(q, low, min(low + piece, tasks), thread)

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
def column_moments(q: Any, x: Any, i: Any, count: Any, k: Any, out: Any, c: Any, T: Any) -> Any:
    """(mean, remainder, Σ(x − mean)²) of a chunk for the sixteen channels at ``x``, by the corrected two-pass."""
    listed, length, sample, step = word(q, LIST), word(q, LENGTH), stride(q, X, 0), stride(q, X, 1)
    end, n, width = i + count, splat(f4(count)), word(q, CHANNELS) * 4
    full = i + count // 4 * 4
    s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    j = i
    while j < full:
        s = fma(load_upto(position(x, listed, j, length, sample, step), c, T), k, s)
        t = fma(load_upto(position(x, listed, j + 1, length, sample, step), c, T), k, t)
        u = fma(load_upto(position(x, listed, j + 2, length, sample, step), c, T), k, u)
        v = fma(load_upto(position(x, listed, j + 3, length, sample, step), c, T), k, v)
        j += 4
    while j < end:
        s, t, u, v = t, u, v, fma(load_upto(position(x, listed, j, length, sample, step), c, T), k, s)
        j += 1
    mean = div(add(add(s, t), add(u, v)), n)
    m = sub(splat(f4(0)), mean)
    s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    e, f, g, h = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    j = i
    while j < full:
        a = fma(load_upto(position(x, listed, j, length, sample, step), c, T), k, m)
        b = fma(load_upto(position(x, listed, j + 1, length, sample, step), c, T), k, m)
        y = fma(load_upto(position(x, listed, j + 2, length, sample, step), c, T), k, m)
        z = fma(load_upto(position(x, listed, j + 3, length, sample, step), c, T), k, m)
        s, t, u, v = add(s, a), add(t, b), add(u, y), add(v, z)
        e, f, g, h = fma(a, a, e), fma(b, b, f), fma(y, y, g), fma(z, z, h)
        j += 4
    while j < end:
        a = fma(load_upto(position(x, listed, j, length, sample, step), c, T), k, m)
        s, t, u, v = t, u, v, add(s, a)
        e, f, g, h = f, g, h, fma(a, a, e)
        j += 1
    first, second = add(add(s, t), add(u, v)), add(add(e, f), add(g, h))
    remainder = div(first, n)
    store_upto(out, mean, c, F)
    store_upto(out + width, remainder, c, F)
    store_upto(out + 2 * width, not_negative(sub(second, mul(first, remainder))), c, F)


@jit
def store_upto(to: Any, value: Any, count: Any, T: Any) -> Any:
    """Round and store sixteen values, or the first ``count``."""
    if count >= 16:
        store(to, value, T)
    else:
        store_some(to, value, count, T)


def moments_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's moments; a task is a chunk and `BLOCK` channels."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels = word(q, CHANNELS)
        blocks = (channels + BLOCK - 1) // BLOCK
        for task in range(low, high):
            chunk, c = task // blocks, task % blocks * BLOCK
            end = min(c + BLOCK, channels)
            first, count = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            out, scales = word(q, PARTS) + chunk * 12 * channels, word(q, SCALES)
            if scales != 0:
                scales += segment_of(q, first) * 4 * channels
            while c < end:
                k = splat(f4(1))
                if scales != 0:
                    k = load_upto(scales + 4 * c, channels - c, F)
                column_moments(q, address(q, X) + c * size(T), first, count, k, out + 4 * c, channels - c, T)
                c += 16

    return drawing(some_tasks)


@jit
def normalised(v: Any, table: Any, c: Any, width: Any) -> Any:
    """((x·scale − mean) − remainder)·rstd, whose scale, 1 but for extreme statistics, is a power of two: exact."""
    mean, remainder = load_upto(table, c, F), load_upto(table + width, c, F)
    rstd, scale = load_upto(table + 2 * width, c, F), load_upto(table + 3 * width, c, F)
    return mul(sub(sub(mul(v, scale), mean), remainder), rstd)


@jit
def column_sums(q: Any, x: Any, dy: Any, i: Any, count: Any, table: Any, out: Any, c: Any, T: Any) -> Any:
    """(Σ dy, Σ dy·x̂) of a chunk for sixteen channels."""
    listed, length, width = word(q, LIST), word(q, LENGTH), word(q, CHANNELS) * 4
    mean, remainder = load_upto(table, c, F), load_upto(table + width, c, F)
    rstd, k = load_upto(table + 2 * width, c, F), load_upto(table + 3 * width, c, F)
    m = sub(splat(f4(0)), mean)
    end = i + count
    s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    e, f, g, h = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    while i < end:
        a = position(x, listed, i, length, stride(q, X, 0), stride(q, X, 1))
        b = position(dy, listed, i, length, stride(q, DY, 0), stride(q, DY, 1))
        z = load_upto(b, c, T)
        s, t, u, v = t, u, v, add(s, z)
        xhat = mul(sub(fma(load_upto(a, c, T), k, m), remainder), rstd)
        e, f, g, h = f, g, h, fma(z, xhat, e)
        i += 1
    store_upto(out, add(add(s, t), add(u, v)), c, F)
    store_upto(out + width, add(add(e, f), add(g, h)), c, F)


def sums_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's (Σ dy, Σ dy·x̂)."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels = word(q, CHANNELS)
        blocks = (channels + BLOCK - 1) // BLOCK
        for task in range(low, high):
            chunk, c = task // blocks, task % blocks * BLOCK
            end = min(c + BLOCK, channels)
            first, count = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            out = word(q, PARTS) + chunk * 8 * channels
            table = word(q, TABLE) + segment_of(q, first) * 16 * channels
            while c < end:
                x, dy = address(q, X) + c * size(T), address(q, DY) + c * size(T)
                column_sums(q, x, dy, first, count, table + 4 * c, out + 4 * c, channels - c, T)
                c += 16

    return drawing(some_tasks)


@jit
def apply_vector(x: Any, y: Any, table: Any, gains: Any, c: Any, width: Any, T: Any) -> Any:
    """Y = x̂·γ + β for sixteen channels of a position."""
    xhat = normalised(load_upto(x, c, T), table, c, width)
    store_upto(y, fma(xhat, load_upto(gains, c, F), load_upto(gains + width, c, F)), c, T)


@jit
def gradient_vector(x: Any, dy: Any, dx: Any, table: Any, gains: Any, sums: Any, c: Any, width: Any, T: Any) -> Any:
    """Dx = rstd·(dy·γ − a − x̂·b) for sixteen channels of a position."""
    xhat = normalised(load_upto(x, c, T), table, c, width)
    g = sub(mul(load_upto(dy, c, T), load_upto(gains, c, F)), load_upto(sums, c, F))
    g = fma(sub(splat(f4(0)), xhat), load_upto(sums + width, c, F), g)
    rstd, scale = load_upto(table + 2 * width, c, F), load_upto(table + 3 * width, c, F)
    store_upto(dx, mul(mul(g, rstd), scale), c, T)


def apply_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that normalises; a task is a position with all its channels. Masked ones become 0."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, mask = word(q, CHANNELS), word(q, LENGTH), word(q, MASK)
        width, e, gains = 4 * channels, size(T), word(q, GAINS)
        for p in range(low, high):
            n, i = p // length, p % length
            x = address(q, X) + n * stride(q, X, 0) + i * stride(q, X, 1)
            y = address(q, OUT) + n * stride(q, OUT, 0) + i * stride(q, OUT, 1)
            table = word(q, TABLE) + n * word(q, PER) * 4 * width
            c, full = 0, channels // 16 * 16
            if mask != 0 and byte_at(mask + p) == 0:
                while c < channels:
                    store_upto(y + c * e, splat(f4(0)), channels - c, T)
                    c += 16
                continue
            while c < full:
                apply_vector(x + c * e, y + c * e, table + 4 * c, gains + 4 * c, 16, width, T)
                c += 16
            if c < channels:
                apply_vector(x + c * e, y + c * e, table + 4 * c, gains + 4 * c, channels - c, width, T)

    return drawing(some_tasks)


def gradient_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes dx; a task is a position with all its channels."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, mask = word(q, CHANNELS), word(q, LENGTH), word(q, MASK)
        width, e, gains = 4 * channels, size(T), word(q, GAINS)
        for p in range(low, high):
            n, i = p // length, p % length
            x = address(q, X) + n * stride(q, X, 0) + i * stride(q, X, 1)
            dy = address(q, DY) + n * stride(q, DY, 0) + i * stride(q, DY, 1)
            dx = address(q, OUT) + n * stride(q, OUT, 0) + i * stride(q, OUT, 1)
            table = word(q, TABLE) + n * word(q, PER) * 4 * width
            sums = word(q, SUMS) + n * word(q, PER) * 2 * width
            c, full = 0, channels // 16 * 16
            if mask != 0 and byte_at(mask + p) == 0:
                while c < channels:
                    store_upto(dx + c * e, splat(f4(0)), channels - c, T)
                    c += 16
                continue
            while c < full:
                a, o = c * e, 4 * c
                gradient_vector(x + a, dy + a, dx + a, table + o, gains + o, sums + o, 16, width, T)
                c += 16
            if c < channels:
                a, o = c * e, 4 * c
                gradient_vector(x + a, dy + a, dx + a, table + o, gains + o, sums + o, channels - c, width, T)

    return drawing(some_tasks)
