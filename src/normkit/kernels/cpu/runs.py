"""Statistics along columns and what follows from them, where positions lie side by side: a vector is sixteen positions.

A run is what one sample holds of one channel. Its valid positions are summed in chunks of `RUN`; those that do not lie
side by side, because masked ones lie between them, are packed first, so that padding changes no sum.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.columns import (
    BEGINS,
    CHANNELS,
    COUNTS,
    DY,
    GAINS,
    LENGTH,
    LIST,
    MASK,
    OUT,
    PARTS,
    PER,
    SCALES,
    SCRATCH,
    SUMS,
    TABLE,
    X,
    address,
    drawing,
    store_upto,
    stride,
)
from normkit.kernels.cpu.reading import chosen
from normkit.kernels.cpu.simd import add, f32_at, fma, move, mul, put_f32, splat, sub, sum_lanes, word
from normkit.kernels.cpu.sums import f4, jit, load_upto, sum_of, sums_about
from normkit.kernels.cpu.tags import Tag, size

RUN = 4096  # positions a chunk


@jit
def run_of(q: Any, tensor: Any, first: Any, count: Any, c: Any, scratch: Any, T: Any) -> Any:
    """Where a chunk of a run lies side by side: in place, or packed into scratch."""
    listed, length, p, e = word(q, LIST), word(q, LENGTH), first, size(T)
    if listed != 0:
        p = word(listed, first)
    n = p // length
    run = address(q, tensor) + n * stride(q, tensor, 0) + c * stride(q, tensor, 2)
    if listed == 0 or word(listed, first + count - 1) - p == count - 1:
        return run + (p - n * length) * e
    for i in range(count):
        move(scratch + i * e, run + (word(listed, first + i) - n * length) * e, T)
    return scratch


@jit
def sample_of(q: Any, first: Any) -> Any:
    """The sample of the valid position ``first``."""
    if word(q, LIST) != 0:
        return word(word(q, LIST), first) // word(q, LENGTH)
    return first // word(q, LENGTH)


def moments_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's moments; a task is a chunk of one channel."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, scratch = word(q, CHANNELS), word(q, SCRATCH) + thread * 8 * RUN
        for task in range(low, high):
            chunk, c = task // channels, task % channels
            first, n, k = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk), f4(1)
            if word(q, SCALES) != 0:
                k = f32_at(word(q, SCALES) + 4 * (sample_of(q, first) * word(q, PER) * channels + c))
            x, out = run_of(q, X, first, n, c, scratch, T), word(q, PARTS) + 4 * (3 * chunk * channels + c)
            mean = sum_of(x, n, k, T) / f4(n)
            total, square = sums_about(x, n, mean, k, T)
            remainder = total / f4(n)
            square -= total * remainder
            if square < f4(0):
                square = f4(0)
            put_f32(out, mean)
            put_f32(out + 4 * channels, remainder)
            put_f32(out + 8 * channels, square)

    return drawing(some_tasks)


@jit
def run_sums(x: Any, dy: Any, n: Any, table: Any, width: Any, T: Any) -> Any:
    """(Σ dy, Σ dy·x̂) of a chunk of a run; x̂ beyond its end meets a dy of 0."""
    m, remainder = splat(-f32_at(table)), splat(f32_at(table + width))
    rstd, k, e, j = splat(f32_at(table + 2 * width)), splat(f32_at(table + 3 * width)), size(T), 0
    s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    a, b, c, d = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    while j < n:
        z = load_upto(dy + j * e, n - j, T)
        xhat = mul(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), rstd)
        s, t, u, v = t, u, v, add(s, z)
        a, b, c, d = b, c, d, fma(z, xhat, a)
        j += 16
    return sum_lanes(add(add(s, t), add(u, v))), sum_lanes(add(add(a, b), add(c, d)))


def sums_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's (Σ dy, Σ dy·x̂)."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, scratch = word(q, CHANNELS), word(q, SCRATCH) + thread * 8 * RUN
        for task in range(low, high):
            chunk, c = task // channels, task % channels
            first, n = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            x, dy = run_of(q, X, first, n, c, scratch, T), run_of(q, DY, first, n, c, scratch + 4 * RUN, T)
            table = word(q, TABLE) + 4 * (4 * sample_of(q, first) * word(q, PER) * channels + c)
            plain, weighted = run_sums(x, dy, n, table, 4 * channels, T)
            out = word(q, PARTS) + 4 * (2 * chunk * channels + c)
            put_f32(out, plain)
            put_f32(out + 4 * channels, weighted)

    return drawing(some_tasks)


def apply_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that normalises; a task is a run. Masked positions become 0."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, width, e = word(q, CHANNELS), word(q, LENGTH), 4 * word(q, CHANNELS), size(T)
        for task in range(low, high):
            i, c = task // channels, task % channels
            x = address(q, X) + i * stride(q, X, 0) + c * stride(q, X, 2)
            y = address(q, OUT) + i * stride(q, OUT, 0) + c * stride(q, OUT, 2)
            table, gains, mask = word(q, TABLE) + 4 * (4 * i * word(q, PER) * channels + c), word(q, GAINS), 0
            if word(q, MASK) != 0:
                mask = word(q, MASK) + i * length
            m, remainder = splat(f32_at(table)), splat(f32_at(table + width))
            rstd, k = splat(f32_at(table + 2 * width)), splat(f32_at(table + 3 * width))
            w, b, j = splat(f32_at(gains + 4 * c)), splat(f32_at(gains + width + 4 * c)), 0
            while j < length:
                n = length - j
                v = mul(sub(sub(mul(load_upto(x + j * e, n, T), k), m), remainder), rstd)
                v = fma(v, w, b)
                if mask != 0:
                    v = chosen(v, mask + j, n)
                store_upto(y + j * e, v, n, T)
                j += 16

    return drawing(some_tasks)


def gradient_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes dx; a task is a run."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, width, e = word(q, CHANNELS), word(q, LENGTH), 4 * word(q, CHANNELS), size(T)
        for task in range(low, high):
            i, c = task // channels, task % channels
            x = address(q, X) + i * stride(q, X, 0) + c * stride(q, X, 2)
            dy = address(q, DY) + i * stride(q, DY, 0) + c * stride(q, DY, 2)
            dx = address(q, OUT) + i * stride(q, OUT, 0) + c * stride(q, OUT, 2)
            per = i * word(q, PER) * channels
            table, sums, mask = word(q, TABLE) + 4 * (4 * per + c), word(q, SUMS) + 4 * (2 * per + c), 0
            if word(q, MASK) != 0:
                mask = word(q, MASK) + i * length
            m, remainder = splat(f32_at(table)), splat(f32_at(table + width))
            rstd, k = splat(f32_at(table + 2 * width)), splat(f32_at(table + 3 * width))
            w, a, b = splat(f32_at(word(q, GAINS) + 4 * c)), splat(f32_at(sums)), splat(-f32_at(sums + width))
            j = 0
            while j < length:
                n = length - j
                xhat = mul(sub(sub(mul(load_upto(x + j * e, n, T), k), m), remainder), rstd)
                v = mul(mul(fma(xhat, b, sub(mul(load_upto(dy + j * e, n, T), w), a)), rstd), k)
                if mask != 0:
                    v = chosen(v, mask + j, n)
                store_upto(dx + j * e, v, n, T)
                j += 16

    return drawing(some_tasks)
