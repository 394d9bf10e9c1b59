"""Errors in units of the last place.

One ULP is the distance between neighbouring numbers of the *output's* dtype. At what size? Elementwise at the exact
value says nothing where terms cancel: an element of x that equals the mean has x̂ = 0, and any rounding there is
infinitely many ULP of the result though it is a small part of one ULP of what was subtracted. So an error is
measured in ULP

* of y at max(|x̂·γ|, |γ| for a centred norm, |β|): x̂ has unit mean square, and this is what its numbers are made of;
* of dx at inverse·(|g| + mean|g| + |x̂|·mean|g·x̂|), with g = dy·γ; of dw at Σ|dy·x̂|; of db at Σ|dy|; of the
  residual's gradient as of dx: the sum of the absolute values of the terms they add up.

Nowhere is this smaller than the result itself, so the figures are at most the elementwise ones, and without
cancellation they are the same. Below the smallest normal number the distance stops shrinking. A correctly rounded
result has at most ½ ULP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def ulp(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours of ``dtype`` at ``size`` (float64, not negative)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.clamp(min=info.smallest_normal, max=info.max))  # size = m·2^e with m in [.5, 1)
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)


@dataclass(frozen=True)
class Error:
    """Largest and mean error in ULP."""

    largest: float
    mean: float

    @classmethod
    def of(cls, got: Tensor, exact: Tensor, size: Tensor) -> Error:
        """Measure ``got`` in its own dtype's ULP at max(|exact|, size); a wrong infinity or NaN counts as infinite."""
        unit = ulp(torch.maximum(exact.abs(), size), got.dtype)
        top = torch.finfo(got.dtype).max
        gap = (got.double() - exact).abs()
        overflow = (exact.abs() > top) & got.isinf() & (got.double() * exact > 0)
        error = torch.where(overflow, 0.0, (gap / unit).nan_to_num(nan=torch.inf, posinf=torch.inf))
        if error.numel() == 0:
            return cls(0.0, 0.0)
        return cls(float(error.max()), float(error.mean()))
