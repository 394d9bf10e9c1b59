"""Joining what chunks hold: moments to moments, sums to sums, and what a norm needs of them.

Moments join by Chan's update for any number of sets at once: with n_i, μ_i, M_i of each and n their sum, the mean is
corrected like that of single values, M = ΣM_i + Σn_i·(μ_i − μ)², and nothing large is subtracted from anything large.
At most `FAN` sets are joined at once, in their order; more of them go through several levels, so that the chain of
additions that a value passes through grows with the logarithm of their number.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.columns import F, drawing, store_upto
from normkit.kernels.cpu.reading import inverse_roots, outside
from normkit.kernels.cpu.simd import (
    add,
    div,
    f32_at,
    f64_word,
    fma,
    inverse_root,
    mul,
    not_negative,
    only,
    put_f32,
    put_word,
    splat,
    sub,
    sum_lanes,
    word,
)
from normkit.kernels.cpu.sums import LARGE, SMALL, f4, jit, load_upto

FAN = 128

# Words of the argument block after the three that `drawing` reads.
WIDTH, PARTS, COUNTS, BOUNDS, OUT, OUT_COUNTS, DEPTH, SCALES, EPSILONS, FLAG, EPS, WEIGHT = range(3, 15)


def merge_kernel() -> Callable[[Any], None]:
    """Return the entry point that joins moments; a task is a result and sixteen channels."""

    @jit
    def joined(parts: Any, counts: Any, first: Any, last: Any, out: Any, c: Any, width: Any) -> Any:
        s, t, u, v, n = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0)), 0
        for i in range(first, last):
            s, t, u, v = t, u, v, fma(load_upto(parts + 3 * i * width, c, F), splat(f4(word(counts, i))), s)
            n += word(counts, i)
        size = splat(f4(max(n, 1)))
        mean = div(add(add(s, t), add(u, v)), size)
        s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        e, f, g, h = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        for i in range(first, last):
            at = parts + 3 * i * width
            gap = add(sub(load_upto(at, c, F), mean), load_upto(at + width, c, F))
            weighted = mul(gap, splat(f4(word(counts, i))))
            s, t, u, v = t, u, v, add(s, weighted)
            e, f, g, h = f, g, h, add(e, fma(weighted, gap, load_upto(at + 2 * width, c, F)))
        total = add(add(s, t), add(u, v))
        remainder = div(total, size)
        square = sub(add(add(e, f), add(g, h)), mul(total, remainder))
        store_upto(out, mean, c, F)
        store_upto(out + width, remainder, c, F)
        store_upto(out + 2 * width, not_negative(square), c, F)
        return n

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels = word(q, WIDTH)
        vectors, width = (channels + 15) // 16, 4 * channels
        for task in range(low, high):
            r, c = task // vectors, task % vectors * 16
            first, last = word(word(q, BOUNDS), r), word(word(q, BOUNDS), r + 1)
            out = word(q, OUT) + 3 * r * width + 4 * c
            n = joined(word(q, PARTS) + 4 * c, word(q, COUNTS), first, last, out, channels - c, width)
            if c == 0:
                put_word(word(q, OUT_COUNTS) + 8 * r, n)

    return drawing(some_tasks)


def fold_kernel() -> Callable[[Any], None]:
    """Return the entry point that adds rows up; a task is a result and sixteen of its columns."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        columns = word(q, WIDTH)
        vectors, width = (columns + 15) // 16, 4 * columns
        for task in range(low, high):
            r, c = task // vectors, task % vectors * 16
            parts = word(q, PARTS) + 4 * c
            s, t, u, v = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
            for i in range(word(word(q, BOUNDS), r), word(word(q, BOUNDS), r + 1)):
                s, t, u, v = t, u, v, add(s, load_upto(parts + i * width, columns - c, F))
            store_upto(word(q, OUT) + r * width + 4 * c, add(add(s, t), add(u, v)), columns - c, F)

    return drawing(some_tasks)


def statistics_kernel() -> Callable[[Any], None]:
    """Return the entry point that turns a segment's moments into (mean, remainder, rstd, scale) for every channel.

    `DEPTH` channels form a group with one statistic. Where a sum or a radicand has left its range the flag is set.
    """

    @jit
    def of_channels(q: Any, moments: Any, table: Any, n: Any, scales: Any, epsilons: Any) -> Any:
        channels, size = word(q, WIDTH), splat(f4(max(n, 1)))
        width, c = 4 * channels, 0
        while c < channels:
            left, at, to = channels - c, moments + 4 * c, table + 4 * c
            square = load_upto(at + 2 * width, left, F)
            scale, eps = splat(f4(1)), splat(f4(f64_word(q, EPS)))
            if scales != 0:
                scale, eps = load_upto(scales + 4 * c, left, F), load_upto(epsilons + 4 * c, left, F)
            radicand = add(div(square, size), eps)
            if n > 0 and outside(radicand, SMALL, LARGE, left):
                put_f32(word(q, FLAG), f4(1))
            store_upto(to, load_upto(at, left, F), left, F)
            store_upto(to + width, load_upto(at + width, left, F), left, F)
            store_upto(to + 2 * width, inverse_roots(radicand), left, F)
            store_upto(to + 3 * width, scale, left, F)
            c += 16

    @jit
    def of_group(q: Any, moments: Any, table: Any, n: Any, scales: Any, epsilons: Any) -> Any:
        depth, width, j = word(q, DEPTH), 4 * word(q, WIDTH), 0
        s, e, k, size = splat(f4(0)), splat(f4(0)), splat(f4(n)), f4(depth)
        while j < depth:
            s = add(s, load_upto(moments + 4 * j, depth - j, F))
            j += 16
        mean = sum_lanes(s) / size
        s, j, m = splat(f4(0)), 0, splat(mean)
        while j < depth:
            at, left = moments + 4 * j, depth - j
            gap = add(sub(load_upto(at, left, F), m), load_upto(at + width, left, F))
            if left < 16:
                gap = only(gap, left)
            s = add(s, gap)
            e = add(e, fma(mul(gap, k), gap, load_upto(at + 2 * width, left, F)))
            j += 16
        total = sum_lanes(s)
        remainder = total / size
        square = sum_lanes(e) - f4(n) * total * remainder
        if square < f4(0):
            square = f4(0)
        scale, eps = f4(1), f4(f64_word(q, EPS))
        if scales != 0:
            scale, eps = f32_at(scales), f32_at(epsilons)
        radicand = square / (size * f4(max(n, 1))) + eps
        if n > 0 and not SMALL < radicand < LARGE:
            put_f32(word(q, FLAG), f4(1))
        rstd, j = inverse_root(radicand), 0
        while j < depth:
            left, to = depth - j, table + 4 * j
            store_upto(to, m, left, F)
            store_upto(to + width, splat(remainder), left, F)
            store_upto(to + 2 * width, splat(rstd), left, F)
            store_upto(to + 3 * width, splat(scale), left, F)
            j += 16

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, depth = word(q, WIDTH), word(q, DEPTH)
        for s in range(low, high):
            moments, table = word(q, PARTS) + 12 * s * channels, word(q, OUT) + 16 * s * channels
            n, scales, epsilons, c = word(word(q, COUNTS), s), word(q, SCALES), word(q, EPSILONS), 0
            if scales != 0:
                scales, epsilons = scales + 4 * s * channels, epsilons + 4 * s * channels
            if depth == 1:
                of_channels(q, moments, table, n, scales, epsilons)
                continue
            while c < channels:
                of_group(q, moments + 4 * c, table + 4 * c, n, scales, epsilons)
                if scales != 0:
                    scales, epsilons = scales + 4 * depth, epsilons + 4 * depth
                c += depth

    return drawing(some_tasks)


def weigh_kernel() -> Callable[[Any], None]:
    """Return the entry point that turns (Σ dy, Σ dy·x̂) into a group's means of g = dy·γ and of g·x̂."""

    @jit
    def of_channels(q: Any, sums: Any, out: Any, n: Any) -> Any:
        channels, weight, size, c = word(q, WIDTH), word(q, WEIGHT), splat(f4(n)), 0
        while c < 2 * channels:
            at, left = c % channels, channels - c % channels
            value = mul(load_upto(sums + 4 * c, left, F), load_upto(weight + 4 * at, left, F))
            store_upto(out + 4 * c, div(value, size), left, F)
            c = c + 16 if left > 16 else c + left

    @jit
    def of_group(sums: Any, weight: Any, out: Any, n: Any, depth: Any) -> Any:
        s, j = splat(f4(0)), 0
        while j < depth:
            s = fma(load_upto(sums + 4 * j, depth - j, F), load_upto(weight + 4 * j, depth - j, F), s)
            j += 16
        mean, j = splat(sum_lanes(s) / (f4(depth) * f4(n))), 0
        while j < depth:
            store_upto(out + 4 * j, mean, depth - j, F)
            j += 16

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, depth, weight = word(q, WIDTH), word(q, DEPTH), word(q, WEIGHT)
        for s in range(low, high):
            sums, out = word(q, PARTS) + 8 * s * channels, word(q, OUT) + 8 * s * channels
            n, c = max(word(word(q, COUNTS), s), 1), 0
            if depth == 1:
                of_channels(q, sums, out, n)
                continue
            while c < 2 * channels:
                of_group(sums + 4 * c, weight + 4 * (c % channels), out + 4 * c, n, depth)
                c += depth

    return drawing(some_tasks)
