"""Roundings: the dtype a norm ends in, and conversions that survive a compiler."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.spec import NormSpec

HALVES = (torch.float16, torch.bfloat16)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)`` where the rounding is part of the result, also in compiled code and in other runtimes.

    Inductor computes half-precision operators in float32 and drops a conversion to a half type whose result it converts
    back: a quarter of a Llama norm's bfloat16 outputs then differ from eager ones in the last bit. onnxruntime does the
    same for float16 on a CPU, where it puts conversions around every operator and takes pairs of them out again. Under
    ``torch.compile`` and in exported graphs the rounding is therefore done in float32 first, so that the conversion has
    nothing left to round. Eager calls hold the plain conversion; the derivative is the conversion's everywhere.
    """
    if x.dtype == dtype or dtype not in HALVES or not _traced():
        return x.to(dtype)
    wide = x.to(torch.float32)
    fixed = wide.detach()
    rounded = by_arithmetic(fixed, dtype) if torch.compiler.is_exporting() else nearest(fixed, dtype)
    finite = fixed.abs() <= torch.finfo(torch.float32).max
    change = torch.where(finite, rounded - fixed, torch.zeros_like(fixed))
    return (wide + change).to(dtype)  # exact: both terms are multiples of wide's last bit


def keep_rounded(x: Tensor) -> Tensor:
    """Return ``x``, just computed in a half type, with that rounding made binding as in `round_to`."""
    return round_to(x.to(torch.float32), x.dtype) if x.dtype in HALVES and _traced() else x


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 ``x`` rounded to ``dtype``'s values, ties to even, as float32; right for all but NaN."""
    drop = 16 if dtype == torch.bfloat16 else 13
    bits = x.view(torch.int32)
    tie_to_even = (bits >> drop) & 1
    value = ((bits + ((1 << (drop - 1)) - 1) + tie_to_even) & -(1 << drop)).view(torch.float32)
    if dtype == torch.bfloat16:
        return value
    # float16 has fewer exponents: steps of 2^-24 below 2^-14 (float32's between 1/2 and 1), and nothing beyond 65504.
    subnormal = torch.copysign((x.abs() + 0.5) - 0.5, x)
    value = torch.where(x.abs() < 2.0**-14, subnormal, value)
    return torch.where(value.abs() > 65504.0, torch.copysign(torch.full_like(x, math.inf), x), value)


def by_arithmetic(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same for finite ``x`` without a look at its bits, which no other runtime could give.

    Veltkamp's splitting: γ = (2^s + 1)·x, then γ + (x − γ) is x rounded to 24 − s bits. A tie ends in 2^(s−1) and is
    therefore even in its last place, so that the roundings inside, ties to even, send it to even.

    Source: Dekker 1971; Boldo 2006 for the proof.
    """
    info, drop = torch.finfo(dtype), 16 if dtype == torch.bfloat16 else 13
    size = x.abs()
    large = size > 2.0**100  # γ would overflow
    small = torch.where(large, size * 2.0**-64, size)
    product = small * (2.0**drop + 1)
    value = product + (small - product)
    value = torch.where(large, value * 2.0**64, value)
    # Below its normal numbers dtype has steps of one size: those of float32 around 2^23 of them.
    coarse = info.smallest_normal * info.eps * 2.0**23
    value = torch.where(size < info.smallest_normal, (size + coarse) - coarse, value)
    value = torch.where(value > info.max, math.inf, value)
    return torch.where(x < 0, -value, value)


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def result_dtype(
    spec: NormSpec, target: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of y: ``target`` (x's, save in the residual form), or promoted with the parameters'."""
    if spec.output == "input":
        return target
    statistics = target if spec.statistic_dtype == "input" else torch.promote_types(target, torch.float32)
    if spec.cast == "t5":
        target = weight if weight is not None and weight in HALVES else statistics
    if spec.weight == "one_plus" and spec.cast == "first" and weight is not None:
        weight = statistics  # the gain is formed there and stays there
    for dtype in (weight, bias):
        target = target if dtype is None else torch.promote_types(target, dtype)
    return target


def rounds_first(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of the rounding before the weight, or None where there is none."""
    if spec.cast == "first":
        return x
    return weight if spec.cast == "t5" and weight in HALVES else None


def product_dtype(spec: NormSpec, first: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the product with the weight, before a bias or a gate; ``first``: of the value weighted."""
    if weight is None or spec.weight == "one_plus":  # a gain formed in float32 keeps it there
        return torch.float32
    return torch.promote_types(first, weight)
