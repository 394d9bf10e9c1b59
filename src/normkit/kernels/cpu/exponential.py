"""The exponential on sixteen float32 lanes, and the gates made of it: the sigmoid, SiLU and their derivatives.

Everything follows from E = 2^40 · exp(−|g|): it never overflows, and the 2^40 keeps it a normal number down to
exp(−109), so that a gate that underflows rounds once, in its last division. With x = −|g| = n·ln 2 + r, |r| ≤ ln 2 / 2,

    exp(x) = 2^n · (1 + r + r²·q(r)),

q a polynomial of degree 5 fitted to (exp r − 1 − r) / r² in the relative error of the whole (5e-11 before rounding).
The operations and their order are fixed, with IEEE division and fused multiply-add: a lane's bits depend on that lane
alone, on every processor.

Largest errors against float64, over every float32 of magnitude 2^-27 to 110: `lifted_exp` 0.99 ULP, `activated` 3.35
ULP (SiLU) and 2.41 ULP (the sigmoid), down to the smallest subnormal results; `slope` 4.67 and 5.54 units of 2^-24 of
what it adds up. tests/kernels/cpu/test_exponential.py bounds them.
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any

from normkit.kernels.cpu.simd import add, div, fma, lanes, mul, splat, sub
from normkit.kernels.cpu.storage import VI, V, constant
from normkit.kernels.cpu.sums import f4, jit
from normkit.kernels.cpu.tags import intrinsic, on

LOG2_E = f4(1.4426950216293335)
LN2_HIGH, LN2_LOW = f4(0.6931471824645996), f4(-1.9046542121259336e-09)
ROUND = f4(1.5 * 2.0**23)  # adding it leaves the nearest integer in the last bits of a float32
FURTHEST = f4(109.0)  # beyond it |g|·exp(−|g|) lies below 2^-150 and rounds to 0
LIFT = f4(2.0**40)
Q0, Q1, Q2 = f4(0.5), f4(0.1666666567325592), f4(0.04166629537940025)
Q3, Q4, Q5 = f4(0.008333497680723667), f4(0.0013944758102297783), f4(0.00019790243823081255)


@intrinsic
def magnitude(typing: Any, x: Any) -> Any:
    """|x|."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.and_(builder.bitcast(args[0], VI), constant(VI, 0x7FFFFFFF))
        return builder.bitcast(bits, V)

    return lanes(lanes), generate


@intrinsic
def where_above(typing: Any, x: Any, limit: Any, yes: Any, no: Any) -> Any:
    """Lane-wise ``yes`` where x > limit, else ``no``; NaN is not above."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return lanes(lanes, lanes, lanes, lanes), generate


@intrinsic
def lifted_power(typing: Any, rounded: Any) -> Any:
    """2^(n + 40), where ``rounded`` is n + ROUND: n's last bits are shifted into the exponent."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], VI), constant(VI, 23))
        return builder.bitcast(builder.add(exponent, constant(VI, (127 + 40) << 23)), V)

    return lanes(lanes), generate


@jit
def lifted_exp(t: Any) -> Any:
    """2^40 · exp(−t) for t ≥ 0; 0 beyond 109, NaN for NaN."""
    top, zero = splat(FURTHEST), splat(f4(0))
    x = sub(zero, where_above(t, top, top, t))
    k = fma(x, splat(LOG2_E), splat(ROUND))
    n = sub(k, splat(ROUND))
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), x))
    q = fma(r, splat(Q5), splat(Q4))
    q = fma(q, r, splat(Q3))
    q = fma(q, r, splat(Q2))
    q = fma(q, r, splat(Q1))
    q = fma(q, r, splat(Q0))
    p = add(splat(f4(1)), fma(mul(r, r), q, r))
    return where_above(t, top, zero, mul(p, lifted_power(k)))


@jit
def activated(g: Any, t: Any) -> Any:
    """a(g): SiLU g / (1 + exp(−g)) or the sigmoid 1 / (1 + exp(−g)).

    Where g > 0 that is 1 / (1 + e), elsewhere e / (1 + e), with e = exp(−|g|). silu(−inf) is NaN, as PyTorch's is.
    """
    one, zero = splat(f4(1)), splat(f4(0))
    e = lifted_exp(magnitude(g))
    top = where_above(g, zero, one, e)
    bottom = mul(add(splat(LIFT), e), where_above(g, zero, splat(f4(1) / LIFT), one))
    if on(t.silu):
        top = mul(top, g)
    return div(top, bottom)


@jit
def slope(g: Any, t: Any) -> Any:
    """a′(g): s·(1 + g·(1 − s)) of SiLU, s·(1 − s) of the sigmoid s. 1 − s is no difference, but the sigmoid of −g."""
    one, zero = splat(f4(1)), splat(f4(0))
    e = lifted_exp(magnitude(g))
    inverse = div(one, add(splat(LIFT), e))
    # e / (1 + e) · … · 1 / (1 + e), in an order that leaves the float32 range at its last product alone.
    top = where_above(g, zero, splat(LIFT), e)
    rest = mul(where_above(g, zero, e, splat(LIFT)), inverse)
    if on(t.silu):
        return mul(mul(top, fma(g, rest, one)), inverse)
    return mul(mul(top, rest), inverse)
