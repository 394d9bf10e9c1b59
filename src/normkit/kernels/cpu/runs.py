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
    BIAS,
    CHANNELS,
    COUNTS,
    DY,
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
    WEIGHT,
    X,
    address,
    drawing,
    store_upto,
    stride,
)
from normkit.kernels.cpu.pairs import first_of_two, second_of_two
from normkit.kernels.cpu.reading import chosen
from normkit.kernels.cpu.simd import add, f32_at, fma, move, mul, put_f32, splat, sub, sum_lanes, word
from normkit.kernels.cpu.sums import f4, jit, load_upto, sum_of, sums_about
from normkit.kernels.cpu.tags import Tag, size

RUN = 4096  # positions a chunk


@jit
def sample_of(q: Any, first: Any) -> Any:
    """The sample of the valid position ``first``."""
    if word(q, LIST) != 0:
        return word(word(q, LIST), first) // word(q, LENGTH)
    return first // word(q, LENGTH)


@jit
def run_of(q: Any, tensor: Any, n: Any, first: Any, count: Any, c: Any, scratch: Any, T: Any) -> Any:
    """Where a chunk of a run of sample ``n`` lies side by side: in place, or packed into scratch."""
    listed, p, e = word(q, LIST), first, size(T)
    if listed != 0:
        p = word(listed, first)
    before = n * word(q, LENGTH)
    run = address(q, tensor) + n * stride(q, tensor, 0) + c * stride(q, tensor, 2)
    if listed == 0 or word(listed, first + count - 1) - p == count - 1:
        return run + (p - before) * e
    for i in range(count):
        move(scratch + i * e, run + (word(listed, first + i) - before) * e, T)
    return scratch


def moments_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's moments; a task is a chunk of one channel."""

    @jit
    def one_run(q: Any, chunk: Any, c: Any, sample: Any, first: Any, n: Any, scratch: Any) -> Any:
        channels, k = word(q, CHANNELS), f4(1)
        if word(q, SCALES) != 0:
            k = f32_at(word(q, SCALES) + 4 * (sample * word(q, PER) * channels + c))
        x, out = run_of(q, X, sample, first, n, c, scratch, T), word(q, PARTS) + 4 * (3 * chunk * channels + c)
        mean = sum_of(x, n, k, T) / f4(n)
        total, square = sums_about(x, n, mean, k, T)
        remainder = total / f4(n)
        square -= total * remainder
        if square < f4(0):
            square = f4(0)
        put_f32(out, mean)
        put_f32(out + 4 * channels, remainder)
        put_f32(out + 8 * channels, square)

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, scratch = word(q, CHANNELS), word(q, SCRATCH) + thread * 8 * RUN
        for chunk in range(low // channels, (high - 1) // channels + 1):
            first, n = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            sample = sample_of(q, first)
            for c in range(max(low - chunk * channels, 0), min(high - chunk * channels, channels)):
                one_run(q, chunk, c, sample, first, n, scratch)

    return drawing(some_tasks)


@jit
def usual(v: Any, exponent: Any) -> Any:
    """Whether a factor is 0, or so far from the ends of float32's range that it may be multiplied in early."""
    return v == f4(0) or f4(2.0**-exponent) <= abs(v) <= f4(2.0**exponent)


@jit
def run_sums(x: Any, dy: Any, n: Any, m: Any, remainder: Any, k: Any, T: Any) -> Any:
    """(Σ dy, Σ dy·((x·k + m) − remainder)) of a chunk of a run; what x gives beyond its end meets a dy of 0."""
    e, j, full = size(T), 0, n // 64 * 64
    s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    a, b, c, d = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
    while j < full:
        for _ in range(2):
            y, z = first_of_two(dy + j * e, T), second_of_two(dy + j * e, T)
            f = sub(fma(first_of_two(x + j * e, T), k, m), remainder)
            g = sub(fma(second_of_two(x + j * e, T), k, m), remainder)
            s, t, u, v = u, v, add(s, y), add(t, z)
            a, b, c, d = c, d, fma(y, f, a), fma(z, g, b)
            j += 32
    while j < n:
        z = load_upto(dy + j * e, n - j, T)
        s, t, u, v = t, u, v, add(s, z)
        a, b, c, d = b, c, d, fma(z, sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), a)
        j += 16
    return sum_lanes(add(add(s, t), add(u, v))), sum_lanes(add(add(a, b), add(c, d)))


@jit
def run_sums_apart(x: Any, dy: Any, n: Any, m: Any, remainder: Any, rstd: Any, k: Any, T: Any) -> Any:
    """(Σ dy, Σ dy·x̂) where products of dy with x − mean leave the range that those with x̂ keep, or may have."""
    e, j, total, weighted = size(T), 0, splat(f4(0)), splat(f4(0))
    while j < n:
        z = load_upto(dy + j * e, n - j, T)
        total = add(total, z)
        weighted = fma(z, mul(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), rstd), weighted)
        j += 16
    return sum_lanes(total), sum_lanes(weighted)


def sums_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's (Σ dy, Σ dy·x̂); a task is a chunk of one channel."""

    @jit
    def one_run(q: Any, chunk: Any, c: Any, sample: Any, first: Any, n: Any, scratch: Any) -> Any:
        channels = word(q, CHANNELS)
        x = run_of(q, X, sample, first, n, c, scratch, T)
        dy = run_of(q, DY, sample, first, n, c, scratch + 4 * RUN, T)
        table = word(q, TABLE) + 4 * (4 * sample * word(q, PER) * channels + c)
        m, remainder = splat(-f32_at(table)), splat(f32_at(table + 4 * channels))
        rstd, k = f32_at(table + 8 * channels), splat(f32_at(table + 12 * channels))
        plain, weighted = run_sums(x, dy, n, m, remainder, k, T)
        if usual(rstd, 20) and f4(2.0**-80) <= abs(weighted) <= f4(2.0**120):
            weighted *= rstd
        else:
            plain, weighted = run_sums_apart(x, dy, n, m, remainder, splat(rstd), k, T)
        out = word(q, PARTS) + 4 * (2 * chunk * channels + c)
        put_f32(out, plain)
        put_f32(out + 4 * channels, weighted)

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, scratch = word(q, CHANNELS), word(q, SCRATCH) + thread * 8 * RUN
        for chunk in range(low // channels, (high - 1) // channels + 1):
            first, n = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            sample = sample_of(q, first)
            for c in range(max(low - chunk * channels, 0), min(high - chunk * channels, channels)):
                one_run(q, chunk, c, sample, first, n, scratch)

    return drawing(some_tasks)


@jit
def apply_run(x: Any, y: Any, mask: Any, n: Any, k: Any, m: Any, remainder: Any, r: Any, b: Any, T: Any) -> Any:
    """Y = ((x·k + m) − remainder)·r + b of a run."""
    e = size(T)
    for j in range(0, n, 16):
        v = fma(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), r, b)
        if mask != 0:
            v = chosen(v, mask + j, n - j)
        store_upto(y + j * e, v, n - j, T)


@jit
def apply_run_apart(
    x: Any, y: Any, mask: Any, n: Any, k: Any, m: Any, remainder: Any, rstd: Any, w: Any, b: Any, T: Any
) -> Any:
    """Y = x̂·w + b of a run whose rstd·w leaves the range of float32."""
    e = size(T)
    for j in range(0, n, 16):
        v = fma(mul(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), rstd), w, b)
        if mask != 0:
            v = chosen(v, mask + j, n - j)
        store_upto(y + j * e, v, n - j, T)


def apply_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that normalises; a task is a run. Masked positions become 0.

    What all positions share is multiplied first, y = ((x − mean) − remainder)·(rstd·γ) + β. Nothing more: of a constant
    run x − mean *is* the remainder, so that y is β exactly, and a remainder·rstd·γ taken off β would be rounded.
    """

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, width = word(q, CHANNELS), word(q, LENGTH), 4 * word(q, CHANNELS)
        for task in range(low, high):
            i, c = task // channels, task % channels
            x = address(q, X) + i * stride(q, X, 0) + c * stride(q, X, 2)
            y = address(q, OUT) + i * stride(q, OUT, 0) + c * stride(q, OUT, 2)
            table, mask = word(q, TABLE) + 4 * (4 * i * word(q, PER) * channels + c), 0
            if word(q, MASK) != 0:
                mask = word(q, MASK) + i * length
            m, remainder = splat(-f32_at(table)), f32_at(table + width)
            rstd, k = f32_at(table + 2 * width), splat(f32_at(table + 3 * width))
            w, b = f32_at(word(q, WEIGHT) + 4 * c), f32_at(word(q, BIAS) + 4 * c)
            r = rstd * w
            if usual(r, 100):
                apply_run(x, y, mask, length, k, m, splat(remainder), splat(r), splat(b), T)
            else:
                apply_run_apart(x, y, mask, length, k, m, splat(remainder), splat(rstd), splat(w), splat(b), T)

    return drawing(some_tasks)


@jit
def gradient_run(
    x: Any, dy: Any, dx: Any, mask: Any, n: Any, k: Any, m: Any, remainder: Any, w: Any, a: Any, b: Any, T: Any
) -> Any:
    """Dx = dy·w + ((x·k + m) − remainder)·b + a of a run."""
    e = size(T)
    for j in range(0, n, 16):
        v = fma(load_upto(dy + j * e, n - j, T), w, a)
        v = fma(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), b, v)
        if mask != 0:
            v = chosen(v, mask + j, n - j)
        store_upto(dx + j * e, v, n - j, T)


@jit
def gradient_run_apart(
    x: Any,
    dy: Any,
    dx: Any,
    mask: Any,
    n: Any,
    k: Any,
    m: Any,
    remainder: Any,
    rstd: Any,
    w: Any,
    a: Any,
    b: Any,
    T: Any,
) -> Any:
    """Dx = (dy·w + a + x̂·b)·rstd·k of a run whose factors, multiplied by each other, leave the range of float32."""
    e = size(T)
    for j in range(0, n, 16):
        xhat = mul(sub(fma(load_upto(x + j * e, n - j, T), k, m), remainder), rstd)
        v = mul(mul(fma(xhat, b, fma(load_upto(dy + j * e, n - j, T), w, a)), rstd), k)
        if mask != 0:
            v = chosen(v, mask + j, n - j)
        store_upto(dx + j * e, v, n - j, T)


def gradient_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes dx; a task is a run. What all positions share is multiplied first."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, width = word(q, CHANNELS), word(q, LENGTH), 4 * word(q, CHANNELS)
        for task in range(low, high):
            i, c = task // channels, task % channels
            x = address(q, X) + i * stride(q, X, 0) + c * stride(q, X, 2)
            dy = address(q, DY) + i * stride(q, DY, 0) + c * stride(q, DY, 2)
            dx = address(q, OUT) + i * stride(q, OUT, 0) + c * stride(q, OUT, 2)
            per = i * word(q, PER) * channels
            table, sums, mask = word(q, TABLE) + 4 * (4 * per + c), word(q, SUMS) + 4 * (2 * per + c), 0
            if word(q, MASK) != 0:
                mask = word(q, MASK) + i * length
            m, remainder = splat(-f32_at(table)), f32_at(table + width)
            rstd, k = f32_at(table + 2 * width), f32_at(table + 3 * width)
            w, a, b = f32_at(word(q, WEIGHT) + 4 * c), -f32_at(sums), -f32_at(sums + width)
            if k == f4(1) and usual(rstd, 20) and usual(w, 40) and usual(a, 60) and usual(b, 60):
                w, a, b = w * rstd, a * rstd, b * rstd * rstd
                gradient_run(x, dy, dx, mask, length, splat(k), m, splat(remainder), splat(w), splat(a), splat(b), T)
            else:
                gradient_run_apart(
                    x, dy, dx, mask, length, splat(k), m, splat(remainder), splat(rstd), splat(w), splat(a), splat(b), T
                )

    return drawing(some_tasks)
