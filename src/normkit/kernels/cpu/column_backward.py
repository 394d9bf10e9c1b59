"""The backward of columns.py: sums over chunks, then dx position by position.

With g = dy·γ, dx = rstd·(g − mean(g) − x̂·mean(g·x̂)); Σ dy and Σ dy·x̂ are also β's gradient and γ's.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.columns import (
    BEGINS,
    BLOCK,
    CHANNELS,
    COUNTS,
    DY,
    LENGTH,
    LIST,
    MASK,
    OUT,
    PARTS,
    PER,
    SUMS,
    TABLE,
    WEIGHT,
    F,
    X,
    address,
    cleared,
    drawing,
    emptied,
    normalised,
    part,
    position,
    put,
    segment_of,
    statistics_at,
    stride,
)
from normkit.kernels.cpu.reading import byte_at
from normkit.kernels.cpu.simd import add, fma, mul, sub, word
from normkit.kernels.cpu.sums import NO, YES, jit
from normkit.kernels.cpu.tags import Tag, size


@jit
def two_sums(x: Any, y: Any, a: Any, b: Any, table: Any, to: Any, width: Any, n: Any, T: Any, whole: Any) -> Any:
    """Add dy (a, b) and dy·x̂ of two positions (x, y) to the row at ``to`` and the one below."""
    s, p, q = statistics_at(table, width, n, whole), part(a, n, T, whole), part(b, n, T, whole)
    put(to, add(part(to, n, F, whole), add(p, q)), n, F, whole)
    u = fma(p, normalised(part(x, n, T, whole), s), mul(q, normalised(part(y, n, T, whole), s)))
    put(to + width, add(part(to + width, n, F, whole), u), n, F, whole)


@jit
def last_sums(x: Any, a: Any, table: Any, to: Any, width: Any, n: Any, T: Any, whole: Any) -> Any:
    """As `two_sums`, of one position."""
    p = part(a, n, T, whole)
    u = mul(p, normalised(part(x, n, T, whole), statistics_at(table, width, n, whole)))
    put(to, add(part(to, n, F, whole), p), n, F, whole)
    put(to + width, add(part(to + width, n, F, whole), u), n, F, whole)


@jit
def chunk_sums(q: Any, x: Any, dy: Any, i: Any, count: Any, table: Any, out: Any, n: Any, T: Any) -> Any:
    """(Σ dy, Σ dy·x̂) of a chunk for ``n`` channels: two positions to each other first, so they are 32 + 1 deep."""
    listed, length, width, e = word(q, LIST), word(q, LENGTH), word(q, CHANNELS) * 4, size(T)
    s, t, u, v = stride(q, X, 0), stride(q, X, 1), stride(q, DY, 0), stride(q, DY, 1)
    pairs, full, o = i + count // 2 * 2, n // 16 * 16, n // 16 * 16 * e
    end = i + count
    cleared(out, 2, width, n)
    while i < pairs:
        y, z = position(x, listed, i, length, s, t), position(x, listed, i + 1, length, s, t)
        a, b = position(dy, listed, i, length, u, v), position(dy, listed, i + 1, length, u, v)
        for j in range(0, full, 16):
            p, k = j * e, 4 * j
            two_sums(y + p, z + p, a + p, b + p, table + k, out + k, width, 16, T, YES)
        if full < n:
            k = 4 * full
            two_sums(y + o, z + o, a + o, b + o, table + k, out + k, width, n - full, T, NO)
        i += 2
    if i < end:
        y, a = position(x, listed, i, length, s, t), position(dy, listed, i, length, u, v)
        for j in range(0, full, 16):
            last_sums(y + j * e, a + j * e, table + 4 * j, out + 4 * j, width, 16, T, YES)
        if full < n:
            last_sums(y + o, a + o, table + 4 * full, out + 4 * full, width, n - full, T, NO)


def sums_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes a chunk's (Σ dy, Σ dy·x̂); a task is a chunk and `BLOCK` channels."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels = word(q, CHANNELS)
        blocks = (channels + BLOCK - 1) // BLOCK
        for task in range(low, high):
            chunk, c = task // blocks, task % blocks * BLOCK
            first, count = word(word(q, BEGINS), chunk), word(word(q, COUNTS), chunk)
            out = word(q, PARTS) + chunk * 8 * channels + 4 * c
            table = word(q, TABLE) + segment_of(q, first) * 16 * channels + 4 * c
            x, dy = address(q, X) + c * size(T), address(q, DY) + c * size(T)
            chunk_sums(q, x, dy, first, count, table, out, min(BLOCK, channels - c), T)

    return drawing(some_tasks)


@jit
def gradient_vector(
    x: Any, dy: Any, dx: Any, table: Any, weight: Any, sums: Any, width: Any, n: Any, T: Any, whole: Any
) -> Any:
    """Dx = rstd·(dy·γ − a − x̂·b) for sixteen channels of a position."""
    s = statistics_at(table, width, n, whole)
    xhat = normalised(part(x, n, T, whole), s)
    g = sub(mul(part(dy, n, T, whole), part(weight, n, F, whole)), part(sums, n, F, whole))
    g = sub(g, mul(xhat, part(sums + width, n, F, whole)))
    put(dx, mul(mul(g, s[2]), s[3]), n, T, whole)


def gradient_kernel(T: Tag) -> Callable[[Any], None]:
    """Return the entry point that writes dx; a task is a position with all its channels. Masked ones become 0."""

    @jit
    def some_tasks(q: Any, low: Any, high: Any, thread: Any) -> Any:
        channels, length, mask = word(q, CHANNELS), word(q, LENGTH), word(q, MASK)
        width, e, weight, full = 4 * channels, size(T), word(q, WEIGHT), channels // 16 * 16
        for p in range(low, high):
            n, i = p // length, p % length
            x = address(q, X) + n * stride(q, X, 0) + i * stride(q, X, 1)
            dy = address(q, DY) + n * stride(q, DY, 0) + i * stride(q, DY, 1)
            dx = address(q, OUT) + n * stride(q, OUT, 0) + i * stride(q, OUT, 1)
            table = word(q, TABLE) + n * word(q, PER) * 4 * width
            sums = word(q, SUMS) + n * word(q, PER) * 2 * width
            if mask != 0 and byte_at(mask + p) == 0:
                emptied(dx, channels, T)
                continue
            for c in range(0, full, 16):
                o, k = c * e, 4 * c
                gradient_vector(x + o, dy + o, dx + o, table + k, weight + k, sums + k, width, 16, T, YES)
            if full < channels:
                o, k = full * e, 4 * full
                gradient_vector(x + o, dy + o, dx + o, table + k, weight + k, sums + k, width, channels - full, T, NO)

    return drawing(some_tasks)
