"""Means, second moments and their guards, in plain ATen, differentiable to any order.

Three choices make these exact where the textbook form is not:

* **Corrected two-pass.** With μ̂ the rounded mean and d = x − μ̂, the second pass sums d and d² together. δ =
mean(d) is
  what rounding left in μ̂; the variance is mean(d²) − δ² and the centred value d − δ. On a row 1e4 ± .005 in float32
  this takes the error of y from 1.3e-2 to 2.4e-7. Folding μ̂ + δ into one float32 would lose it again, so they stay
  apart.
* **μ̂ is a constant to autograd.** Centring removes any constant, so d − mean(d) has the same value and the same
  derivatives of every order whether or not μ̂ is differentiated: one backward pass less, and none of its rounding.
* **Power-of-two rescaling.** Where the squares of a row would leave the range of the dtype (1e18 at width 4096 sums to
  inf in float32; PyTorch returns zeros) the row is multiplied by a power of two first, which rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows whose largest |x| (or √ε, if larger) lies inside are left alone. The forward pass would bear a wider range, the
# backward would not: autograd of 1/√v forms the cube of the result, its derivatives the fifth and seventh power. With
# 1/√v between 2^-16 and 2^16 (2^31 for a row of 2^30 elements with one outlier) that cube stays a normal number.
_RANGE = {torch.float32: (2.0**-16, 2.0**16), torch.float64: (2.0**-128, 2.0**128)}
_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics for input of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Count:
    """How many elements a statistic covers: a number, or with a mask a tensor that broadcasts to x."""

    mask: Tensor | None
    value: int | Tensor

    @classmethod
    def of(cls, x: Tensor, axes: Sequence[int], mask: Tensor | None) -> Count:
        """Count the elements of ``x`` along ``axes`` that ``mask`` (broadcastable to x) lets through."""
        if mask is None:
            return cls(None, math.prod([x.shape[a] for a in axes]))
        whole = mask.expand(*[x.shape[d] if d in axes else mask.shape[d] for d in range(x.dim())])
        return cls(mask, whole.sum(dim=tuple(axes), keepdim=True))

    def mean(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return the mean of ``x`` along ``axes`` (kept as size 1); 0 where nothing is counted."""
        if self.mask is None:
            if self.value == 0:  # the mean of nothing would be NaN
                return x.sum(dim=tuple(axes), keepdim=True)
            return x.mean(dim=tuple(axes), keepdim=True)
        assert isinstance(self.value, Tensor)
        return self.drop(x).sum(dim=tuple(axes), keepdim=True) / self.value.clamp(min=1).to(x.dtype)

    def drop(self, x: Tensor) -> Tensor:
        """Replace masked-out values, NaN and inf included, by zeros."""
        return x if self.mask is None else torch.where(self.mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def unbiased(self, mean_square: Tensor) -> Tensor:
        """Turn a mean of squared deviations into the unbiased variance (n / (n − 1)); NaN for n = 1, as PyTorch."""
        if isinstance(self.value, int):
            return mean_square * (self.value / (self.value - 1) if self.value > 1 else math.nan)
        n = self.value.to(mean_square.dtype)
        return mean_square * (n / (n - 1))


def rescaling(x: Tensor, axes: Sequence[int], floor: float) -> Tensor:
    """Return a power of two per statistic that brings max(|x|, floor) into range: 1 for all but extreme rows.

    ``floor`` is √ε (or ε where it is added to a norm), so that ε, rescaled alike, cannot overflow either.
    """
    low, high = _RANGE[x.dtype]
    # 14 µs where vector_norm(x, inf) takes 246 µs for 1024 × 64 float32 (torch 2.13, one thread).
    peak = x.detach().abs().amax(dim=tuple(axes), keepdim=True).clamp(min=floor)
    if torch.compiler.is_exporting():
        return _rescaling_by_comparison(peak)
    integer, bits = _EXPONENT_BITS[x.dtype]
    power = (peak.view(integer) & bits).view(x.dtype).clamp(min=torch.finfo(x.dtype).tiny)
    large, small = (peak > high) & (peak < math.inf), (peak < low) & (peak > 0)
    # Not torch.where(large, high**0.5, 1.0): two Python numbers make a float32, in which float64's 2²²⁵ is inf.
    one = torch.ones_like(power)
    target = torch.where(large, one * high**0.5, one)
    return torch.where(large | small, target / power, one)


def _rescaling_by_comparison(peak: Tensor) -> Tensor:
    """Return such a power of two by comparisons alone: a graph for other runtimes cannot look at exponent bits.

    Steps of the width of the range lead there, so that whatever lies beyond it lands inside. A row's result does not
    depend on which power it is, as 1/√ of a number times 4^k is exactly 2^-k times its own.
    """
    low, high = _RANGE[peak.dtype]
    info = torch.finfo(peak.dtype)
    last = 2 / info.tiny  # the largest power of two
    scale = torch.ones_like(peak)
    for k in range(4):
        step = (low / high) ** (k + 1)
        scale = torch.where(peak > high / (low / high) ** k, max(step, high**0.5 / last), scale)
        scale = torch.where(peak < low * (low / high) ** k, min(1 / step, 1 / info.tiny), scale)
    return torch.where((peak > 0) & (peak < math.inf), scale, torch.ones_like(peak))


def rescaled_epsilon(eps: float, scale: Tensor) -> Tensor:
    """Return ε · scale². Exact for an ε that ``scale``'s dtype holds, as a product with powers of two."""
    if torch.finfo(scale.dtype).tiny <= eps <= torch.finfo(scale.dtype).max:
        return eps * scale * scale
    return (scale * eps**0.5).square()  # ε itself would be lost before it is scaled


def center(x: Tensor, axes: Sequence[int], count: Count) -> tuple[Tensor, Tensor, Tensor]:
    """Return (μ̂, d, δ): the rounded mean, x − μ̂, and the mean's remainder mean(d)."""
    mean = count.mean(x, axes).detach()
    d = count.drop(x - mean)
    return mean, d, count.mean(d, axes)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of elements; two sets merge exactly.

    The mean is ``mean + remainder``: its float32 rounding error is kept apart, because folding it back would round
    it away.

    Args:
        count: number of elements behind each statistic.
        mean: rounded mean, float32 (float64 for float64 input); a constant to autograd.
        m2: Σ(x − mean)², same dtype.
        remainder: what rounding left in ``mean``; it carries the mean's gradient.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.arange(6.0).reshape(1, 6, 1)
        >>> a, b = nk.moments(x[:, :2], axes=(0, 1)), nk.moments(x[:, 2:], axes=(0, 1))
        >>> merged = a.merge(b)
        >>> float(merged.count), float(merged.mean), float(merged.variance())
        (6.0, 2.5, 2.9166667461395264)
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    remainder: Tensor

    def variance(self, *, unbiased: bool = False) -> Tensor:
        """Return m2 / n, or m2 / (n − 1): NaN where that divides by zero."""
        n = self.count.to(self.m2.dtype)
        return self.m2 / (n - 1) if unbiased else self.m2 / n

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together (Chan's update: no difference of large squares).

        The step starts from the larger set, so that its rounding stays below that of a sum over the whole (a few units
        in the last place of the standard deviation, not of the mean); an empty set changes nothing.
        """
        n = self.count + other.count
        swap = other.count > self.count

        def larger(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(swap, b, a)

        few, many = larger(other.count, self.count), larger(self.count, other.count)
        base, remainder = larger(self.mean, other.mean), larger(self.remainder, other.remainder)
        share = few.to(base.dtype) / n.clamp(min=1).to(base.dtype)
        gap = (larger(other.mean, self.mean) - base) + (larger(other.remainder, self.remainder) - remainder)
        gap = torch.where(few == 0, 0.0, gap)
        step = gap * share
        mean = (base + step).detach()
        rounding = ((base - mean) + step) + remainder
        m2 = self.m2 + other.m2 + gap * gap * share * many.to(base.dtype)
        return Moments(n, mean, m2, rounding)


def moments_of(x: Tensor, axes: Sequence[int], mask: Tensor | None) -> Moments:
    """Return the moments of ``x`` along ``axes`` (removed from the result), in the accumulation dtype."""
    work = x.to(accumulation_dtype(x.dtype))
    count = Count.of(work, axes, mask)
    work = count.drop(work)
    mean, d, remainder = center(work, axes, count)
    sizes = count.value if isinstance(count.value, Tensor) else torch.full_like(mean, count.value, dtype=torch.int64)
    sizes = sizes.to(torch.int64).expand_as(mean)
    total = (d * d).sum(dim=tuple(axes), keepdim=True) - sizes.to(d.dtype) * remainder * remainder
    # mean is a constant to autograd; the remainder carries its gradient: d(mean + remainder)/dx = 1/n.
    return Moments(*(t.squeeze(tuple(axes)) for t in (sizes, mean, total.clamp(min=0), remainder)))
