"""The exponential on float32, and the gates made of it: the sigmoid, SiLU and their derivatives.

An exponential of our own, operation by operation that of kernels/cpu/exponential.py, so that a gate has the same bits
on both machines and the errors measured there hold here: `lifted_exp` 0.99 ULP, `activated` 3.35 ULP (SiLU) and 2.41
(the sigmoid), down to the smallest subnormal results.

The hardware's does not suffice. `tl.exp` multiplies by log₂ e in one rounding, which costs up to |g| units of 2^-24,
and then takes ex2.approx, off by up to 2^-22 of itself: four units even where the argument is reduced first. A gate
takes three roundings more, and is to lie within five units of itself. What this one costs is some twenty operations on
each element, which moves six bytes or more; unmeasured.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950216293335)
LN2_HIGH = tl.constexpr(0.6931471824645996)
LN2_LOW = tl.constexpr(-1.9046542121259336e-09)
ROUND = tl.constexpr(1.5 * 2.0**23)  # adding it leaves the nearest integer in the last bits of a float32
FURTHEST = tl.constexpr(109.0)  # beyond it |g|·exp(−|g|) lies below 2^-150 and rounds to 0
LIFT, DROP = tl.constexpr(2.0**40), tl.constexpr(2.0**-40)
LIFTED_ONE = tl.constexpr((127 + 40) << 23)  # the bits of LIFT
Q0, Q1, Q2 = tl.constexpr(0.5), tl.constexpr(0.1666666567325592), tl.constexpr(0.04166629537940025)
Q3, Q4, Q5 = (
    tl.constexpr(0.008333497680723667),
    tl.constexpr(0.0013944758102297783),
    tl.constexpr(0.00019790243823081255),
)


@triton.jit
def lifted_exp(t: tl.tensor) -> tl.tensor:
    """2^40 · exp(−t) for t ≥ 0; 0 beyond 109, NaN for NaN. The 2^40 keeps it a normal number."""
    x = 0.0 - tl.where(t > FURTHEST, FURTHEST, t)
    k = tl.fma(x, tl.full(x.shape, LOG2_E, tl.float32), tl.full(x.shape, ROUND, tl.float32))
    n = k - ROUND
    r = tl.fma(n, tl.full(x.shape, -LN2_HIGH, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, -LN2_LOW, tl.float32), r)
    q = tl.fma(r, tl.full(x.shape, Q5, tl.float32), tl.full(x.shape, Q4, tl.float32))
    q = tl.fma(q, r, tl.full(x.shape, Q3, tl.float32))
    q = tl.fma(q, r, tl.full(x.shape, Q2, tl.float32))
    q = tl.fma(q, r, tl.full(x.shape, Q1, tl.float32))
    q = tl.fma(q, r, tl.full(x.shape, Q0, tl.float32))
    p = 1.0 + tl.fma(r * r, q, r)
    power = ((k.to(tl.int32, bitcast=True) << 23) + LIFTED_ONE).to(tl.float32, bitcast=True)
    return tl.where(t > FURTHEST, 0.0, p * power)


@triton.jit
def activated(g: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """a(g): SiLU g / (1 + exp(−g)) or the sigmoid 1 / (1 + exp(−g)).

    Where g > 0 that is 1 / (1 + e), elsewhere e / (1 + e), with e = exp(−|g|). silu(−inf) is NaN, as PyTorch's is.
    """
    e = lifted_exp(tl.abs(g))
    top = tl.where(g > 0.0, 1.0, e)
    bottom = (LIFT + e) * tl.where(g > 0.0, DROP, 1.0)
    if SILU:
        top = top * g
    return tl.div_rn(top, bottom)


@triton.jit
def slope(g: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """a′(g): s·(1 + g·(1 − s)) of SiLU, s·(1 − s) of the sigmoid s. 1 − s is no difference, but the sigmoid of −g."""
    e = lifted_exp(tl.abs(g))
    inverse = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), LIFT + e)
    # e / (1 + e) · … · 1 / (1 + e), in an order that leaves the float32 range at its last product alone.
    top = tl.where(g > 0.0, LIFT, e)
    rest = tl.where(g > 0.0, e, LIFT) * inverse
    factor = rest
    if SILU:
        factor = tl.fma(g, rest, tl.full(g.shape, 1.0, tl.float32))
    return (top * factor) * inverse
