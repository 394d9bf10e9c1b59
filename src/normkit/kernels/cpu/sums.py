"""Statistics of one row in a fixed order, so that a row's bits depend on nothing but the row.

Vector i of sixteen elements goes to accumulator i mod 4 (in bfloat16 the even and the odd ones of thirty-two are two
vectors); every 4096 elements the four are added to a running vector, which keeps a lane's chain of additions short
(64 + width / 4096 long). What is left below 64 elements goes on vector by vector, as if zeros followed it.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from normkit.kernels.cpu.pairs import first_of_two, second_of_two
from normkit.kernels.cpu.simd import (
    add,
    bits_of,
    f32_from_bits,
    fma,
    inverse_root,
    load,
    load_some,
    max_lanes,
    maximum_magnitude,
    mul,
    only,
    splat,
    sum_lanes,
)
from normkit.kernels.cpu.tags import Tag, on, size

f4 = np.float32
YES, NO = Tag("yes"), Tag("no")
BLOCK = 4096
LARGE = f4(2.0**120)  # sums of squares beyond this are near overflow: the row is rescaled
SMALL = f4(2.0**-80)  # radicands below this have lost bits to underflow
_OPTIONS: Any = {
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
_njit: Any = numba.njit


def jit(function: Callable[..., Any]) -> Any:
    """Compile a part of a kernel: no Python objects, no bounds checks, no fast-math flag."""
    return _njit(**_OPTIONS)(function)


@jit
def load_upto(address: Any, count: Any, T: Any) -> Any:
    """Sixteen values, or the first ``count``, or none; zeros fill up."""
    if count >= 16:
        return load(address, T)
    if count > 0:
        return load_some(address, count, T)
    return splat(f4(0))


@jit
def sum_of(x: Any, n: Any, scale: Any, X: Any) -> Any:
    """Σ x·scale."""
    e, k, total, j = size(X), splat(scale), splat(f4(0)), 0
    while j < n:
        end = min(j + BLOCK, n)
        p, q, r, s = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        full = j + (end - j) // 64 * 64
        while j < full:
            a, b = x + j * e, x + (j + 32) * e
            p, q = fma(first_of_two(a, X), k, p), fma(second_of_two(a, X), k, q)
            r, s = fma(first_of_two(b, X), k, r), fma(second_of_two(b, X), k, s)
            j += 64
        while j < end:
            # Vectors of their neighbours, whatever the full blocks are made of: the order follows from n alone.
            p, q, r, s = q, r, s, fma(load_upto(x + j * e, end - j, X), k, p)
            j += 16
        total = add(total, add(add(p, q), add(r, s)))
    return sum_lanes(total)


@jit
def sum_squares(x: Any, n: Any, X: Any) -> Any:
    """Σ x²."""
    e, total, j = size(X), splat(f4(0)), 0
    while j < n:
        end = min(j + BLOCK, n)
        p, q, r, s = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        full = j + (end - j) // 64 * 64
        while j < full:
            a, b = x + j * e, x + (j + 32) * e
            u, v, w, z = first_of_two(a, X), second_of_two(a, X), first_of_two(b, X), second_of_two(b, X)
            p, q, r, s = fma(u, u, p), fma(v, v, q), fma(w, w, r), fma(z, z, s)
            j += 64
        while j < end:
            u = load_upto(x + j * e, end - j, X)
            p, q, r, s = q, r, s, fma(u, u, p)
            j += 16
        total = add(total, add(add(p, q), add(r, s)))
    return sum_lanes(total)


@jit
def sum_squares_scaled(x: Any, n: Any, scale: Any, X: Any) -> Any:
    """Σ (x·scale)², for the rare row whose plain sum left its range: one accumulator, folded as often."""
    e, k, total, j = size(X), splat(scale), splat(f4(0)), 0
    while j < n:
        end, p = min(j + BLOCK, n), splat(f4(0))
        while j < end:
            u = mul(load_upto(x + j * e, end - j, X), k)
            p = fma(u, u, p)
            j += 16
        total = add(total, p)
    return sum_lanes(total)


@jit
def sums_about(x: Any, n: Any, mean: Any, scale: Any, X: Any) -> Any:
    """(Σ d, Σ d²) of d = x·scale − mean: the second pass of the corrected two-pass."""
    e, k, c, j = size(X), splat(scale), splat(-mean), 0
    total, squares = splat(f4(0)), splat(f4(0))
    while j < n:
        end = min(j + BLOCK, n)
        p, q, r, s = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        f, g, h, i = splat(f4(0)), splat(f4(0)), splat(f4(0)), splat(f4(0))
        full = j + (end - j) // 64 * 64
        while j < full:
            a, b = x + j * e, x + (j + 32) * e
            u, v = fma(first_of_two(a, X), k, c), fma(second_of_two(a, X), k, c)
            w, z = fma(first_of_two(b, X), k, c), fma(second_of_two(b, X), k, c)
            p, q, r, s = fma(u, u, p), fma(v, v, q), fma(w, w, r), fma(z, z, s)
            f, g, h, i = add(f, u), add(g, v), add(h, w), add(i, z)
            j += 64
        while j < end:
            u = only(fma(load_upto(x + j * e, end - j, X), k, c), end - j)
            p, q, r, s = q, r, s, fma(u, u, p)
            f, g, h, i = g, h, i, add(f, u)
            j += 16
        total = add(total, add(add(f, g), add(h, i)))
        squares = add(squares, add(add(p, q), add(r, s)))
    return sum_lanes(total), sum_lanes(squares)


@jit
def peak_of(x: Any, n: Any, X: Any) -> Any:
    """Max |x|, NaN passed over."""
    top, j, e = splat(f4(0)), 0, size(X)
    while j < n:
        top = maximum_magnitude(top, load_upto(x + j * e, n - j, X))
        j += 16
    return max_lanes(top)


@jit
def scale_for(peak: Any, floor: Any) -> Any:
    """A power of two that brings max(peak, floor) near 1 or 2³²; 1 where nothing finite could."""
    top = max(peak, floor)
    if not (f4(0) < top < f4(np.inf)):
        return f4(1)
    power = max(f32_from_bits(bits_of(top) & 0x7F800000), f4(2.0**-126))
    target = f4(1)
    if top > f4(1):
        target = f4(2.0**32)
    return target / power


@jit
def eps_scaled(eps: Any, scale: Any) -> Any:
    """ε (a float64: it may lie outside float32's range) for a row that was multiplied by ``scale``."""
    if scale == f4(1):
        return f4(eps)
    root = f4(np.sqrt(eps)) * scale
    return root * root


@jit
def rms_statistics(x: Any, n: Any, eps: Any, t: Any) -> Any:
    """(rstd, scale): a row's value is (x·scale)·rstd. The scale is 1 unless the sum left its range."""
    count, scale = f4(n), f4(1)
    if on(t.sum):
        count = f4(1)
    square = sum_squares(x, n, t.X) / count
    radicand = square + f4(eps)
    if not SMALL < radicand < LARGE:
        scale = scale_for(peak_of(x, n, t.X), f4(np.sqrt(eps)))
        if scale != f4(1):
            square = sum_squares_scaled(x, n, scale, t.X) / count
    return inverse_root(square + eps_scaled(eps, scale)), scale


@jit
def layer_statistics(x: Any, n: Any, eps: Any, t: Any) -> Any:
    """(mean, remainder, rstd, scale): a row's value is ((x·scale − mean) − remainder)·rstd."""
    count, scale = f4(n), f4(1)
    while True:
        mean = sum_of(x, n, scale, t.X) / count
        first, second = sums_about(x, n, mean, scale, t.X)
        remainder = first / count
        variance = second / count - remainder * remainder
        if variance < f4(0):
            variance = f4(0)
        radicand = variance + f4(eps)
        if scale != f4(1) or (second < LARGE and SMALL < radicand < LARGE):
            break
        scale = scale_for(peak_of(x, n, t.X), f4(np.sqrt(eps)))
        if scale == f4(1):
            break
    return mean, remainder, inverse_root(variance + eps_scaled(eps, scale)), scale


def row_statistics(x: Any, n: Any, eps: Any, t: Any) -> Any:
    """(mean, remainder, rstd, scale) of a row; the first two are 0 where the norm does not centre."""
    raise AssertionError("compiled code only")


@overload(row_statistics, jit_options=_OPTIONS)
def _row_statistics(x: Any, n: Any, eps: Any, t: Any) -> Any:
    # Chosen by type, so that one of the two is compiled instead of both.
    if dict(zip(t.fields, t.types, strict=True))["centered"].tag == "yes":

        def of_layer(x: Any, n: Any, eps: Any, t: Any) -> Any:
            return layer_statistics(x, n, eps, t)

        return of_layer

    def of_rms(x: Any, n: Any, eps: Any, t: Any) -> Any:
        rstd, scale = rms_statistics(x, n, eps, t)
        return f4(0), f4(0), rstd, scale

    return of_rms
