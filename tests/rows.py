"""Row norms in float64, how far a float32 computation may lie from them, and rows that break careless code.

The bound, to first order, with u the unit roundoff of the statistics:

* PyTorch adds in a cascade of short blocks, so no term passes through more than ``depth`` = min(n, 128) additions
  for any width below 2^20: a mean of terms t is off by (depth + 1)·u·mean|t|.
* RMS: the mean square is off by (depth + 2)·u of itself (one rounding a square), with ε added by one more; the root
  halves that; root, division and the product x·rstd add three. So x̂ is off by ((depth + 3)/2 + 3)·u of itself.
* Layer: the rounded mean lies within δ = (depth + 2)·u·mean|x| of the mean. Then d − mean(d) is off by
  u·(2|v| + δ) + (depth + 1)·u·(σ + δ), v the true centred value, and the variance by (depth + 5)·u·(σ² + δ²)
  + 2·(depth + 2)·u·(σδ + δ²). That second-order δ·u is all that is left of a large mean.
* Weight and bias add a rounding each; the output dtype adds its own, and its smallest number where it underflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal draws that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def depth(n: int) -> int:
    """Return the most additions a term of a sum over ``n`` passes through."""
    return min(n, 128)


@dataclass(frozen=True)
class Truth:
    """The float64 value of a norm and the bound on any computation of it with float32 statistics."""

    y: Tensor
    bound: Tensor

    def check(self, got: Tensor) -> None:
        """Fail where ``got`` exceeds the bound."""
        assert got.shape == self.y.shape
        excess = (got.double() - self.y).abs() - self.bound
        assert bool((excess <= 0).all()), f"worst excess {float(excess.max()):.3g}, bound {float(self.bound.max()):.3g}"


def true_norm(
    x: Tensor,
    w: Tensor | float = 1.0,
    b: Tensor | float = 0.0,
    *,
    eps: float,
    centered: bool,
    out: torch.dtype | None = None,
) -> Truth:
    """Normalise the last axis in float64."""
    u, out = unit(torch.promote_types(x.dtype, torch.float32)), out or x.dtype
    n = x.shape[-1]
    k = depth(n)
    wide = x.double()
    peak = wide.abs().amax(-1, keepdim=True).clamp(min=eps**0.5)  # squares of 1e300 leave float64, too
    wide, epsilon = wide / peak, eps / peak**2
    v = wide - wide.mean(-1, keepdim=True) if centered else wide
    variance = v.square().mean(-1, keepdim=True)
    total = variance + epsilon
    rstd = total.rsqrt()
    xhat = v * rstd
    if centered:
        delta = (k + 2) * u * wide.abs().mean(-1, keepdim=True)
        sigma = variance.sqrt()
        v_error = u * (2 * v.abs() + delta) + (k + 1) * u * (sigma + delta)
        variance_error = (k + 5) * u * (variance + delta**2) + 2 * (k + 2) * u * (sigma * delta + delta**2)
        error = v_error * rstd + xhat.abs() * (variance_error / total / 2 + 4 * u)
    else:
        error = xhat.abs() * ((k + 3) / 2 + 3) * u
    y = xhat * torch.as_tensor(w).double() + torch.as_tensor(b).double()
    gain = torch.as_tensor(w).double().abs()
    bound = gain * (error + u * xhat.abs()) + u * y.abs()
    bound = bound * 1.01 + unit(out) * (y.abs() + bound) + torch.finfo(out).smallest_normal * torch.finfo(out).eps
    return Truth(y, bound)


def adversarial(n: int, seed: int = 0) -> dict[str, Tensor]:
    """Return float32 rows, each (1, n), on which one-pass variance, early squares or lost ε show."""
    z = randn(1, n, seed=seed)
    spike = z.clone()
    spike[0, n // 3] = 1e3
    off = torch.full((1, n), 256.0)
    off[0, -1] = 255.0
    return {
        "large mean": 1e4 + 0.005 * z,
        "mean 2000": 2000 + z,
        "mean 100, deviation .01": 100 + 0.01 * z,
        "one step off": off,
        "outlier": spike,
        "constant": torch.full((1, n), 14.0),
        "zero": torch.zeros(1, n),
        "1e-20": z * 1e-20,
        "1e18": z * 1e18,
        "1e30": z * 1e30,
        "subnormal": z * 1e-39,
        "wide range": z * torch.logspace(-30, 30, n),
    }
