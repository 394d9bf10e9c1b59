"""Norms in float64, and which results float32 statistics and the declared roundings allow.

Everything is a matrix: one row, one statistic. The allowances, to first order, with u the unit roundoff of the
statistics (2^-24; 2^-53 for float64 input; the input's own where the spec forms statistics there):

* A sum is formed in blocks, lanes or a tree, so that no term passes through more than k = min(n, 128) additions: a mean
  of terms t is off by (k + 1)·u·mean|t|. PyTorch's sums and every SIMD or GPU reduction do this up to a width of
  2^20; one float32 accumulator running over a long row does not, and is reported.
* No centring: the mean square is off by (k + 2)·u of itself (one rounding a square).
* Centring: the rounded mean lies within δ = (k + 2)·u·mean|x| of the mean. A plain two-pass (or Welford's update, whose
  variance is off by δ·σ) leaves δ in x − μ and 2σδ + δ² in the variance: the result of other x, changed by their own
  last digits. Taking the remainder out afterwards (corrected two-pass) leaves u·(2|x − μ| + δ) + (k + 1)·u·(σ + δ)
  in x − μ and (k + 5)·u·(σ² + δ²) + 2(k + 2)·u·(σδ + δ²) in the variance: δ·u, of second order. `corrected` says
  which of the two is asked for; on a row such as 1e4 ± .005 the first has hardly a right digit left.
* Adding ε, the root, the division and the product add one rounding each; 6·u covers them and a power in place of a
  root.

Declared roundings never swap two numbers, so an interval of possible x̂ goes through them end by end: what comes out is
the set of right answers, often a single number in a half type. Only where results are subnormal may they also be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.kernels.rounding import HALVES, result_dtype
from normkit.spec import NormSpec

DEPTH = 128


def unit(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def spacing(dtype: torch.dtype) -> float:
    """Return the smallest positive number."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to ``dtype`` and back. By way of float32, as every kernel with a float32 result does."""
    if dtype in HALVES:
        value = value.to(torch.float32)
    return value.to(dtype).double()


@dataclass(frozen=True)
class Statistics:
    """A row's statistics in float64, with the error that a careful float32 computation may have.

    Args:
        xhat, error: (x − μ) · inverse and its absolute error, per element.
        deviation: the derivative's direction: (x − μ) · inverse also where the spec centres the statistic alone.
        inverse, relative: what rows are multiplied by and its relative error, per row.
        pull: factor of the term that the statistic's derivative adds to dx (0 where ε alone divides).
        total: mean or sum, as the statistic is formed.
    """

    xhat: Tensor
    error: Tensor
    deviation: Tensor
    inverse: Tensor
    relative: Tensor
    pull: Tensor
    summed: bool
    u: float

    def collect(self, t: Tensor) -> Tensor:
        """Return the mean of ``t`` along a row, or the sum for sums of squares."""
        return t.sum(-1, keepdim=True) if self.summed else t.mean(-1, keepdim=True)


def statistics_unit(spec: NormSpec, dtype: torch.dtype) -> float:
    """Return the unit roundoff of the statistics for input of ``dtype``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return unit(dtype if spec.statistic_dtype == "input" else wide)


def statistics(x: Tensor, spec: NormSpec, eps: float, *, corrected: bool = True) -> Statistics:
    """Return the statistics of the rows of ``x`` (R, n), with the errors of a corrected or a plain two-pass."""
    u, n = statistics_unit(spec, x.dtype), x.shape[-1]
    k = min(n, DEPTH)
    wide = x.double()
    v = wide - wide.mean(-1, keepdim=True)
    v = v - v.mean(-1, keepdim=True)  # float64's own remainder
    centred_square = spec.centered or spec.statistic == "unbiased"
    dev = v if centred_square else wide
    square = dev.square().sum(-1, keepdim=True) if spec.statistic == "sum" else dev.square().mean(-1, keepdim=True)
    sigma = square.sqrt()
    delta = (k + 2) * u * wide.abs().mean(-1, keepdim=True)
    square_error = (k + 2) * u * square
    if corrected:
        v_error = u * (2 * v.abs() + delta) + (k + 1) * u * (sigma + delta)
    else:
        v_error = u * (2 * v.abs() + delta) + delta
    if centred_square:
        square_error = (k + 5) * u * (square + delta**2) + 2 * (k + 2) * u * (sigma * delta + delta**2)
        square_error = square_error if corrected else square_error + 2 * sigma * delta + delta**2
    correction = n / (n - 1) if spec.statistic == "unbiased" and n > 1 else 1.0
    square, square_error, sigma = square * correction, square_error * correction, sigma * correction**0.5
    if spec.eps == "inside":
        total = square + eps
        inverse, pull = total.rsqrt(), torch.full_like(total, correction)
        relative = (square_error + u * eps) / (2 * total) + 6 * u
    else:
        bottom = sigma + eps if spec.eps == "outside" else sigma.clamp(min=eps)
        share = torch.where(sigma > 0, square_error / (2 * sigma), 0.0) / bottom
        inverse, relative = 1 / bottom, share + 6 * u
        live = (sigma > 0) & ((sigma >= eps) if spec.eps == "max" else torch.ones_like(sigma, dtype=torch.bool))
        pull = torch.where(live, correction * bottom / torch.where(live, sigma, 1.0), 0.0)
    value, value_error = (v, v_error) if spec.centered else (wide, torch.zeros_like(wide))
    xhat = value * inverse
    grain = spacing(torch.float64 if x.dtype == torch.float64 else torch.float32)  # where x̂ is subnormal
    error = 1.01 * (value_error * inverse + xhat.abs() * (relative + u)) + grain
    return Statistics(xhat, error, dev * inverse, inverse, relative, pull, spec.statistic == "sum", u)


def gain_of(weight: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor | None:
    """Return γ in float64 as the spec forms it for input of ``dtype``; None stands for 1."""
    if weight is None:
        return None
    if spec.weight == "one_plus":
        return rounded(1 + weight.double(), torch.float64 if dtype == torch.float64 else torch.float32)
    return rounded(1 + weight.double(), weight.dtype) if spec.weight == "one_plus_rounded" else weight.double()


@dataclass(frozen=True)
class Admissible:
    """The exact value and the closed interval of right answers, all float64, and the dtype they come in."""

    exact: Tensor
    low: Tensor
    high: Tensor
    dtype: torch.dtype

    def wrong(self, got: Tensor) -> Tensor:
        """Return where ``got`` is no right answer; NaN is wrong unless the declared roundings lead there."""
        y = got.double()
        lost = self.exact.isnan() | (self.low.isnan() & self.high.isnan())  # such as 0 · (1/√ε beyond float16)
        return ~((y >= self.low) & (y <= self.high)) & ~(lost & y.isnan())


def forward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: torch.dtype | None = None,
    *,
    corrected: bool = True,
) -> Admissible:
    """Return the right answers of ``spec`` for the rows of ``x``; parameters broadcast to x."""
    target = target or x.dtype
    s = statistics(x, spec, eps, corrected=corrected)
    out = result_dtype(spec, target, *(None if p is None else p.dtype for p in (weight, bias)))
    gain, b = gain_of(weight, spec, x.dtype), None if bias is None else bias.double()
    exact = (s.xhat if gain is None else s.xhat * gain) + (0.0 if b is None else b)
    low, high = s.xhat - s.error, s.xhat + s.error
    if spec.root_rounding == "input":
        ends = [
            rounded(x.double() * rounded(s.inverse * (1 + sign * s.relative), x.dtype), x.dtype) for sign in (-1, 1)
        ]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
    chain = _last if spec.cast == "last" else _first
    low, high = chain(low, high, spec, gain, b, weight, bias, target, s.u)
    low, high = rounded(low, out), rounded(high, out)
    tiny = exact.abs() < torch.finfo(out).smallest_normal
    low, high = torch.where(tiny, low.clamp(max=0), low), torch.where(tiny, high.clamp(min=0), high)
    return Admissible(exact, low, high, out)


def _scaled(low: Tensor, high: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    if gain is None:
        return low, high
    return torch.minimum(low * gain, high * gain), torch.maximum(low * gain, high * gain)


def _last(
    low: Tensor,
    high: Tensor,
    spec: NormSpec,
    gain: Tensor | None,
    b: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    target: torch.dtype,
    u: float,
) -> tuple[Tensor, Tensor]:
    """Weigh and shift in the statistics' dtype: two roundings for x·(w/σ) in either order, one for the sum."""
    low, high = _scaled(low, high, gain)
    slack = 2 * u * torch.maximum(low.abs(), high.abs()) + spacing(torch.float32)
    if b is not None:
        slack = slack + u * (torch.maximum(low.abs(), high.abs()) + b.abs())
        low, high = low + b, high + b
    return low - 1.01 * slack, high + 1.01 * slack


def _first(
    low: Tensor,
    high: Tensor,
    spec: NormSpec,
    gain: Tensor | None,
    b: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    target: torch.dtype,
    u: float,
) -> tuple[Tensor, Tensor]:
    """Round, then weigh and shift with a rounding each in the promoted dtype."""
    dtype = target
    if spec.cast == "t5":
        wide = torch.float64 if target == torch.float64 else torch.float32
        dtype = weight.dtype if weight is not None and weight.dtype in HALVES else wide
    low, high = rounded(low, dtype), rounded(high, dtype)
    if weight is not None:
        held = torch.promote_types(dtype, torch.float32) if spec.weight == "one_plus" else weight.dtype
        dtype = torch.promote_types(dtype, held)
        low, high = (rounded(end, dtype) for end in _scaled(low, high, gain))
    if bias is not None and b is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
        low, high = rounded(low + b, dtype), rounded(high + b, dtype)
    return low, high


@dataclass(frozen=True)
class Gradient:
    """An exact gradient in float64, how far a careful computation may lie from it, and Σ|terms| it is made of."""

    exact: Tensor
    bound: Tensor
    terms: Tensor

    def wrong(self, got: Tensor) -> Tensor:
        """Return where ``got`` lies outside; beyond the dtype's range an infinity of that sign is right."""
        top = torch.finfo(got.dtype).max
        y = got.double().clamp(-2 * top, 2 * top) if got.dtype != torch.float64 else got
        exact = self.exact.clamp(-2 * top, 2 * top) if got.dtype != torch.float64 else self.exact
        overflow = (self.exact.abs() + self.bound > top) & (got.double().abs() >= top) & (y * exact > 0)
        return ~((y - exact).abs() <= self.bound) & ~overflow


@dataclass(frozen=True)
class Gradients:
    """Gradients of Σ(y·dy), those of the parameters per element, to be summed over whatever they broadcast along."""

    dx: Gradient
    dw: Gradient
    db: Gradient


def backward(
    x: Tensor, spec: NormSpec, weight: Tensor | None, eps: float, dy: Tensor, *, corrected: bool = True
) -> Gradients:
    r"""Return exact gradients with bounds.

    With g = dy·γ, dx = inverse·(g − mean g − x̂·mean(g·x̂)) (no mean g without centring). It passes through two sums of
    depth k and fewer than 20 further roundings of terms, sees x̂'s error twice and the inverse's twice more. Where the
    spec rounds before it weighs, x̂ and g are of that half type, as are their products: four of its roundings.
    """
    s = statistics(x, spec, eps, corrected=corrected)
    n, u = x.shape[-1], s.u
    wide, gain = dy.double(), gain_of(weight, spec, x.dtype)
    g = wide if gain is None else wide * gain
    early = spec.cast != "last" or spec.root_rounding == "input" or spec.statistic_dtype == "input"
    half = 4 * unit(x.dtype) if early else 0.0
    mean_g = g.mean(-1, keepdim=True) if spec.centered else torch.zeros_like(s.inverse)
    along = s.collect(g * s.xhat) * s.pull
    dx = s.inverse * (g - mean_g - s.deviation * along)
    size, dev = s.xhat.abs(), s.deviation.abs()
    mean_abs = g.abs().mean(-1, keepdim=True) if spec.centered else torch.zeros_like(s.inverse)
    pulled = s.collect(g.abs() * size) * s.pull
    terms = s.inverse * (g.abs() + mean_abs + dev * pulled)
    rounding = (2 * min(n, DEPTH) + 20) * u + 2 * s.relative + half
    through = s.inverse * (s.error * pulled + dev * s.collect(g.abs() * s.error) * s.pull)
    floor = spacing(x.dtype) + (0.0 if x.dtype == torch.float16 else torch.finfo(x.dtype).smallest_normal)
    bound = 1.01 * (rounding * terms + through) + unit(x.dtype) * dx.abs() + floor
    dw_terms = wide.abs() * size
    dw_bound = 1.01 * (wide.abs() * s.error + (half + 2 * u) * dw_terms)
    return Gradients(
        Gradient(dx, bound, terms),
        Gradient(wide * s.xhat, dw_bound, dw_terms),
        Gradient(wide, torch.zeros_like(wide), wide.abs()),
    )


def summed(per_element: Gradient, shape: torch.Size, dtype: torch.dtype, u: float) -> Gradient:
    """Add a parameter's gradient up to ``shape`` and round it to ``dtype``.

    A sum of r terms in any order of float32 additions is off by r·u·Σ|t|.
    """
    exact = per_element.exact.sum_to_size(shape)
    terms = per_element.terms.sum_to_size(shape)
    count = per_element.exact.numel() // max(exact.numel(), 1)
    bound = per_element.bound.sum_to_size(shape) + count * u * terms
    floor = spacing(dtype) + (0.0 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal)
    return Gradient(exact, 1.01 * bound + unit(dtype) * exact.abs() + floor, terms)


def plain(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the formula as differentiable float64 operators, without any rounding: for derivatives of higher order."""
    wide = x.double()
    centred_square = spec.centered or spec.statistic == "unbiased"
    dev = wide - wide.mean(-1, keepdim=True) if centred_square else wide
    square = dev.square().sum(-1, keepdim=True) if spec.statistic == "sum" else dev.square().mean(-1, keepdim=True)
    if spec.statistic == "unbiased":
        square = square * (x.shape[-1] / (x.shape[-1] - 1))
    if spec.eps == "inside":
        inverse = (square + eps).rsqrt()
    else:
        inverse = 1 / (square.sqrt() + eps) if spec.eps == "outside" else 1 / square.sqrt().clamp(min=eps)
    y = (dev if spec.centered else wide) * inverse
    if weight is not None:
        y = y * (1 + weight.double() if spec.weight.startswith("one_plus") else weight.double())
    return y if bias is None else y + bias.double()
