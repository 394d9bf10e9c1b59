"""Row norms in float64, how far a float32 computation may lie from them, and rows that break careless code.

The bound, to first order, with u the unit roundoff of the statistics:

* PyTorch adds in a cascade of short blocks, so no term passes through more than ``depth`` = min(n, 128) additions
  for any width below 2^20: a mean of terms t is off by (depth + 1)·u·mean|t|. The fused kernels keep four accumulators
  of 16 lanes over blocks of 4096: 64 additions in a lane, 2 that join the accumulators, one for each block, 4 that fold
  the lanes: 70 + n/4096, under 128 for any width below 2^17. (Adding the zeros that fill up a row is exact.)
* RMS: the mean square is off by (depth + 2)·u of itself (one rounding a square), with ε added by one more; the root
  halves that; root, division and the product x·rstd add three. So x̂ is off by ((depth + 3)/2 + 3)·u of itself.
* Layer: the rounded mean lies within δ = (depth + 2)·u·mean|x| of the mean. Then d − mean(d) is off by
  u·(2|v| + δ) + (depth + 1)·u·(σ + δ), v the true centred value, and the variance by (depth + 5)·u·(σ² + δ²)
  + 2·(depth + 2)·u·(σδ + δ²). That second-order δ·u is all that is left of a large mean.
* Weight and bias add a rounding each (one for both in a kernel); the output dtype adds its own, and its smallest number
  where it underflows: the smallest normal one for bfloat16, whose conversion instruction has no subnormals.
* Gradients: dx adds up rstd·(g, mean g, x̂·mean(g·x̂)): two sums of ``depth`` and fewer than 20 further roundings, each
  against the sum of the terms' sizes. dw and db add up the rows, with x̂ itself off by depth/2 + 6. The kernels add 32
  rows (a 64th of all beyond 2048) to a partial and then up to 64 partials, where PyTorch adds in its cascade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fused import DEVICE, INTERPRETED

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def always(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`: those chosen run always, the others with the slow tests.

    Every dtype and convention is a kernel of its own, and compiling one takes two seconds of a fresh machine.
    """
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=[] if chosen(c) else [pytest.mark.slow])
        for c in cases
    ]


def quick(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """As `always`, where kernels are interpreted; compiled ones run every case."""
    return always(cases, lambda case: not INTERPRETED or chosen(case))


def compiled(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """As `always`, where kernels are compiled, each in seconds; interpreted ones run every case."""
    return always(cases, lambda case: INTERPRETED or chosen(case))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal draws that depend on the seed alone, on the device under test."""
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return draws.to(DEVICE, dtype)


def unit(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """Return the least magnitude that a rounding to ``dtype`` is sure to keep."""
    info = torch.finfo(dtype)
    return info.smallest_normal if dtype == torch.bfloat16 else info.smallest_normal * info.eps


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
        # Where these numbers are subnormal, the mean and its remainder have steps of 2^-149 instead.
        v_error = u * (2 * v.abs() + delta) + (k + 1) * u * (sigma + delta) + 2.0**-149 / peak
        variance_error = (k + 5) * u * (variance + delta**2) + 2 * (k + 2) * u * (sigma * delta + delta**2)
        error = v_error * rstd + xhat.abs() * (variance_error / total / 2 + 4 * u)
    else:
        error = xhat.abs() * ((k + 3) / 2 + 3) * u
    y = xhat * torch.as_tensor(w).double() + torch.as_tensor(b).double()
    gain = torch.as_tensor(w).double().abs()
    bound = gain * (error + u * xhat.abs()) + u * y.abs()
    bound = bound * 1.01 + unit(out) * (y.abs() + bound) + smallest(out)
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


def plain_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, centered: bool, eps: float = 1e-5
) -> Tensor:
    """Return the formula in plain operators, to be differentiated in float64."""
    d = x - x.mean(-1, keepdim=True) if centered else x
    y = d / (d.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if w is None else y * w
    return y if b is None else y + b


def row_depth(rows: int) -> int:
    """Return the most additions a row passes through on its way into dw."""
    return max(min(rows, 128), min(rows, 32) + min(rows // 32, 64) + rows // 64)


def gradient_bounds(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    exact: tuple[Tensor, ...],
    centered: bool,
    dtypes: list[torch.dtype],
    eps: float = 1e-5,
) -> list[Tensor]:
    """Bound float32 gradients (dx, dw, db) of rows whose mean does not exceed their deviation, kept in ``dtypes``."""
    u, k, rows = unit(torch.float32), depth(x.shape[-1]), x[..., 0].numel()
    d = x.double() - x.double().mean(-1, keepdim=True) if centered else x.double()
    rstd = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
    size, g = (d * rstd).abs(), (dy.double() * w.double()).abs()

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    dx = (2 * k + 20) * u * rstd * (g + mean(g) + (1 + size) * mean(g * (1 + size)))
    dw = (row_depth(rows) + k + 20) * u * (dy.double().abs() * (1 + size)).flatten(0, -2).sum(0)
    db = (row_depth(rows) + 2) * u * dy.double().abs().flatten(0, -2).sum(0)
    half = [0.0 if t == torch.float32 else unit(t) for t in dtypes]
    limits = zip((dx, dw, db), half, exact, dtypes, strict=False)
    return [b * (1 + h) + h * e.abs() + (h > 0) * smallest(t) for b, h, e, t in limits]
