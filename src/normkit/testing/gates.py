"""What a gate adds to a norm in float64, and which results float32 gates allow.

With u = 2^-24: a(g) is off by 5u of itself (the exponential 2u, a sum, a product and a quotient u each), its product
with x or y by u more: 6u, rounded up to 8u. a′(g) is off by 8u of s·(1 + |g|), s the sigmoid, whether 1 − s is formed
as a difference or as the sigmoid of −g.

* Gate after: y and what comes back to the norm are off by 8u of themselves, beside the norm's own error.
* Gate first: the norm sees p = x·a(g), off by 8u of itself or, where it is subnormal, by the smallest number. Then the
  root mean square is off by 8u and x̂ by 16u; dp holds x̂ twice and the inverse root once: 40u of its terms. p is
  rounded to float32 here, as where it is computed: within the same 8u.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.spec import NormSpec
from normkit.testing import truth

U = truth.unit(torch.float32)
FACTOR, XHAT, TERMS = 8 * U, 16 * U, 40 * U


@dataclass(frozen=True)
class Gate:
    """SiLU of a gate in float64: its value, its derivative and the size of what that adds up."""

    value: Tensor
    slope: Tensor
    size: Tensor

    @classmethod
    def of(cls, gate: Tensor) -> Gate:
        """Return it; 1 − s is the sigmoid of −g."""
        g = gate.double()
        s = g.sigmoid()
        return cls(g * s, s * (1 + g * (-g).sigmoid()), s * (1 + g.abs()))


def rounded_to(dtype: torch.dtype, exact: Tensor, bound: Tensor) -> Tensor:
    """Return the bound after one more rounding to ``dtype``."""
    floor = truth.spacing(dtype) + (0.0 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal)
    return 1.01 * bound + truth.unit(dtype) * exact.abs() + floor


def after(x: Tensor, gate: Tensor, spec: NormSpec, weight: Tensor, eps: float, dy: Tensor) -> truth.Gradient:
    """Return dgate = dy·x̂·γ·a′(g) for y = x̂·γ·a(g)."""
    s, a, gain, wide = truth.statistics(x, spec, eps), Gate.of(gate), weight.double(), dy.double()
    z = s.xhat * gain
    exact, terms = wide * z * a.slope, (wide * z).abs() * a.size
    bound = (wide * a.slope).abs() * (gain.abs() * s.error + 2 * U * z.abs()) + FACTOR * terms
    return truth.Gradient(exact, rounded_to(gate.dtype, exact, bound), terms)


def products(x: Tensor, gate: Tensor) -> Tensor:
    """Return x·a(g) in float32."""
    return (x.double() * Gate.of(gate).value).float()


def first(
    x: Tensor, gate: Tensor, spec: NormSpec, weight: Tensor, eps: float, dy: Tensor
) -> tuple[truth.Gradient, truth.Gradient, truth.Gradient]:
    """Return dx = dp·a(g), dgate = dp·x·a′(g), and dw per element, for y = x̂(p)·γ and p = x·a(g)."""
    p, a, wide = products(x, gate), Gate.of(gate), x.double()
    norm = truth.backward(p, spec, weight, eps, dy)
    dp, loose = norm.dx.exact, norm.dx.bound + TERMS * norm.dx.terms
    dx, dgate = dp * a.value, dp * wide * a.slope
    dx_bound = loose * a.value.abs() + FACTOR * dx.abs()
    dgate_bound = loose * (wide * a.slope).abs() + (dp * wide).abs() * (2 * U * a.slope.abs() + FACTOR * a.size)
    lost = truth.spacing(torch.float32) * truth.statistics(p, spec, eps).inverse * dy.double().abs()
    return (
        truth.Gradient(dx, rounded_to(x.dtype, dx, dx_bound), norm.dx.terms * a.value.abs()),
        truth.Gradient(dgate, rounded_to(gate.dtype, dgate, dgate_bound), norm.dx.terms * wide.abs() * a.size),
        truth.Gradient(norm.dw.exact, norm.dw.bound + XHAT * norm.dw.terms + lost, norm.dw.terms),
    )
