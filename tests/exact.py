"""Centred norms in float64, by the textbook, and how far a float32 computation may lie from them.

With u the unit roundoff of the statistics and n elements behind each, to first order in u:

* a sum of n terms, in any order, is off by at most n·u·Σ|t|;
* so the centred value is off by u·(2|x − μ| + n·σ), the variance by (n + 4)·u of itself, 1/√ by ((n + 4)/2 + 2)·u,
  and x̂ by u·((n/2 + 7)·|x̂| + n);
* weight and bias add two roundings, and the output's own dtype one of its unit roundoff.

A gradient passes through at most two sums over n and fewer than 20 further roundings; each is bounded against the sum
of the absolute values of the terms it adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Number:
    """A float64 value and how far from it a computation in ``dtype`` may lie."""

    value: Tensor
    bound: Tensor

    def check(self, got: Tensor, times: float = 1.0) -> None:
        """Fail where ``got`` is off by more than ``times`` the bound: 2 for two computations held together."""
        assert got.shape == self.value.shape
        excess = (got.double() - self.value).abs() - times * self.bound
        assert bool((excess <= 0).all()), f"worst excess {float(excess.max()):.3g} over {float(self.bound.max()):.3g}"


@dataclass(frozen=True)
class Exact:
    """Output and gradients of Σ(y·dy) for a centred norm."""

    y: Number
    dx: Number
    dw: Number
    db: Number


def exact(
    x: Tensor, axes: Sequence[int], w: Tensor, b: Tensor, dy: Tensor, *, eps: float, mask: Tensor | None = None
) -> Exact:
    """Normalise x along ``axes``; w, b and mask broadcast to x. Masked-out elements are taken out, not zeroed."""
    u, axes = unit(torch.promote_types(x.dtype, torch.float32)), tuple(axes)
    real = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand_as(x)
    leaf, wide_w, wide_b = (t.detach().double().requires_grad_() for t in (x, w, b))
    n = real.sum(axes, keepdim=True).clamp(min=1)

    def mean(t: Tensor) -> Tensor:
        return torch.where(real, t, 0.0).sum(axes, keepdim=True) / n

    d = torch.where(real, leaf, 0.0) - mean(leaf)
    rstd = (mean(d * d) + eps).rsqrt()
    y = torch.where(real, d * rstd * wide_w + wide_b, 0.0)
    dx, dw, db = torch.autograd.grad(y, (leaf, wide_w, wide_b), dy.double())
    with torch.no_grad():
        size, gain = (d * rstd).abs(), wide_w.abs()
        up = torch.where(real, dy.double().abs(), 0.0)
        y_bound = u * (gain * ((n / 2 + 9) * size + n) + y.abs()) + unit(x.dtype) * y.abs()
        g = up * gain
        terms = rstd * (g + mean(g) + (1 + size) * mean(g * (1 + size)))
        dx_bound = (2 * n + 20) * u * terms + unit(x.dtype) * dx.abs()
        count = x.numel() + 2 * int(n.max()) + 20
        dw_bound = count * u * (up * (1 + size)).sum_to_size(w.shape)
        db_bound = count * u * up.sum_to_size(b.shape)
    return Exact(
        Number(y.detach(), torch.where(real, y_bound, 0.0)),
        Number(dx, torch.where(real, dx_bound, 0.0)),
        Number(dw, dw_bound),
        Number(db, db_bound),
    )
