"""What every kernel computes alike, on tiles of float32: roundings, gains, inverse roots, powers of two.

Multiplications and additions are never contracted behind our back (`launch.py` compiles without fusion), so that a
rounding is where it is written, on every GPU and in Triton's interpreter.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

import triton
import triton.language as tl

LARGE = tl.constexpr(2.0**120)  # sums of squares beyond this are near overflow: the row is rescaled
SMALL = tl.constexpr(2.0**-80)  # radicands below this have lost bits to underflow
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def rounded(v: tl.tensor, T: tl.constexpr) -> tl.tensor:
    """V rounded to T's values, as float32."""
    return v.to(T).to(tl.float32)


@triton.jit
def inverse_root(v: tl.tensor) -> tl.tensor:
    """1/√v by IEEE's root and division: rsqrt approximates on a GPU."""
    return tl.div_rn(1.0, tl.sqrt_rn(v))


@triton.jit
def gain_of(w: tl.tensor, W: tl.constexpr, PLUS: tl.constexpr, PLUS_ROUNDED: tl.constexpr) -> tl.tensor:
    """γ: the weight, or 1 + weight in float32 or rounded to W."""
    gain = w
    if PLUS:
        gain = 1.0 + w
    if PLUS_ROUNDED:
        gain = rounded(1.0 + w, W)
    return gain


@triton.jit
def finish(
    value: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    R: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    FIRST: tl.constexpr,
    PLUS: tl.constexpr,
    PLUS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """Weigh and shift normalised values, with the roundings that the spec declares before the last."""
    if FIRST:
        value = rounded(value, R)
    if HAS_W:
        gain = gain_of(w, W, PLUS, PLUS_ROUNDED)
        if HAS_B:
            if FIRST:
                value = rounded(value * gain, P) + b
            else:
                value = tl.fma(value, tl.broadcast_to(gain, value.shape), tl.broadcast_to(b, value.shape))
        else:
            value = value * gain
    elif HAS_B:
        value = value + b
    return value


@triton.jit
def value_of(
    v: tl.tensor, mean: tl.tensor, remainder: tl.tensor, rstd: tl.tensor, scale: tl.tensor, CENTERED: tl.constexpr
) -> tl.tensor:
    """The normalised value. The scale, 1 but for extreme rows, is a power of two: exact."""
    if CENTERED:
        return ((v * scale - mean) - remainder) * rstd
    return (v * scale) * rstd


@triton.jit
def scale_for(peak: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """A power of two that brings max(peak, floor) near 1 or 2³²; 1 where nothing finite could."""
    top = tl.maximum(peak, floor)
    power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 1.1754943508222875e-38)
    target = tl.where(top > 1.0, 4294967296.0, 1.0)
    return tl.where((top > 0.0) & (top < INFINITY), tl.div_rn(target, power), 1.0)


@triton.jit
def eps_scaled(eps: tl.tensor, root_eps: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """ε for a row that was multiplied by ``scale``; √ε comes along, as ε may lie outside float32's range."""
    root = root_eps * scale
    return tl.where(scale == 1.0, eps, root * root)
