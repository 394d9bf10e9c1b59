"""The formula, in plain ATen: what every kernel is held against.

Any axes, any floating dtype, any layout, masks. Differentiable to any order, in forward mode, under vmap, compile
and export, because it is nothing but PyTorch operators without a data-dependent branch. It promises the error bound
of float32 statistics with one IEEE 1/√; it does not promise that a row's bits are independent of the batch
(PyTorch's sums choose their order by shape). Compiled and exported code keeps every declared rounding; only
statistics in the input's own half type (``statistic_dtype="input"``) are formed wider there than in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.kernels.rounding import keep_rounded, result_dtype, round_to
from normkit.kernels.statistics import Count, accumulation_dtype, center, rescaled_epsilon, rescaling
from normkit.spec import NormSpec

_HALVES = (torch.float16, torch.bfloat16)


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: Sequence[int],
    eps: float,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``spec`` on ``x``; ``weight``, ``bias``, ``gate`` and ``mask`` already broadcast to x.

    Masked-out positions neither enter a statistic nor keep a value: they come out as 0. ``out_dtype`` replaces x's
    dtype where ``spec.output == "input"`` (the residual form normalises a sum of another dtype).
    """
    target = out_dtype or x.dtype
    work = x if spec.statistic_dtype == "input" else x.to(accumulation_dtype(x.dtype))
    if spec.gate == "before" and gate is not None:
        work = work * activate(gate, spec.activation).to(work.dtype)
    # With no element there is nothing to normalise; the parameters still receive (zero) gradients.
    count = Count.of(work, axes, mask)
    normed = _normalized(work, spec, axes, eps, count, x.dtype) if x.numel() else work.clone()
    y = apply_weight(normed, spec, weight, bias, target)
    if spec.gate == "after" and gate is not None:
        dtypes = (None if p is None else p.dtype for p in (weight, bias))
        y = (y * activate(gate, spec.activation)).to(result_dtype(spec, target, *dtypes))
    return y if mask is None else torch.where(mask, y, torch.zeros((), dtype=y.dtype, device=y.device))


def _normalized(
    x: Tensor, spec: NormSpec, axes: Sequence[int], eps: float, count: Count, input_dtype: torch.dtype
) -> Tensor:
    """Return (x − μ) / √(σ² + ε) in the dtype of the statistics."""
    x = count.drop(x)
    scale: Tensor | None = None
    # The squares of float16 values cannot leave float32; those of a gated value can.
    if x.dtype not in _HALVES and (input_dtype != torch.float16 or spec.gate == "before"):
        scale = rescaling(x, axes, eps**0.5 if spec.eps == "inside" else eps)
        x = x * scale
    value = x
    if spec.centered or spec.statistic == "unbiased":
        _, deviation, remainder = center(x, axes, count)
        square = count.mean(deviation * deviation, axes) - remainder * remainder
        square = square.clamp(min=0)
        if spec.centered:
            value = deviation - remainder
        if spec.statistic == "unbiased":
            square = count.unbiased(square)
    elif spec.statistic == "sum":
        square = count.drop(x * x).sum(dim=tuple(axes), keepdim=True)
    else:
        square = count.mean(x * x, axes)
    return _divide(value, square, spec, eps, scale, input_dtype)


def _divide(
    value: Tensor, square: Tensor, spec: NormSpec, eps: float, scale: Tensor | None, input_dtype: torch.dtype
) -> Tensor:
    """Divide by the root of ``square``, with ε where the spec wants it and rescaled as the row was."""
    if spec.eps == "inside":
        epsilon = eps if scale is None else rescaled_epsilon(eps, scale)
        radicand = square + epsilon
        if spec.root == "divide":
            return value / torch.sqrt(radicand)
        inverse = torch.pow(radicand, -0.5) if spec.root == "power" else inverse_root(radicand)
    else:
        # √0 has an infinite slope; where() on both sides keeps a zero row's gradient at the value of the ε branch.
        nonzero = square != 0  # true for NaN, which must not pass for a zero row
        norm = torch.where(nonzero, torch.where(nonzero, square, 1.0).sqrt(), 0.0)
        epsilon = eps if scale is None else scale * eps
        if spec.eps == "max":
            floor = torch.as_tensor(epsilon, dtype=norm.dtype, device=norm.device)
            denominator = torch.maximum(norm, floor)
        else:
            denominator = norm + epsilon
        if spec.root == "divide":
            return value / denominator
        inverse = 1 / denominator
    if spec.root_rounding == "input":
        factor = inverse if scale is None else inverse * scale
        original = value if scale is None else value / scale
        return (round_to(original, input_dtype) * round_to(factor, input_dtype)).to(value.dtype)
    return value * inverse


def inverse_root(v: Tensor) -> Tensor:
    """Return IEEE 1/√v: on the CPU torch.rsqrt has those bits (torch.sqrt has not), on a GPU it approximates."""
    return torch.rsqrt(v) if v.device.type == "cpu" else 1 / torch.sqrt(v)


def apply_weight(
    normed: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, target: torch.dtype
) -> Tensor:
    """Weigh, shift and round, in the spec's order."""
    gain = None if weight is None else gain_of(weight, spec, normed.dtype)
    if spec.cast == "last":
        y = normed if gain is None else normed * gain.to(normed.dtype)
        y = y if bias is None else y + bias.to(y.dtype)
        if spec.gate == "after":  # the gate multiplies before the one rounding
            return y
        if spec.output == "input":
            return y.to(target)
        return y.to(_promoted(target, weight, bias))
    # Rounded first. The parameters then act in the promoted dtype, each operation rounded there, as models do it.
    if spec.cast == "t5":
        y = round_to(normed, weight.dtype) if weight is not None and weight.dtype in _HALVES else normed
    else:
        y = round_to(normed, target)
    y = y if gain is None else keep_rounded(gain * y)
    y = y if bias is None else keep_rounded(y + bias)
    return y.to(target) if spec.output == "input" and spec.gate != "after" else y


def gain_of(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """Return γ: the weight, or 1 + weight added in ``dtype`` (the statistics') or rounded to the weight's own dtype."""
    if spec.weight == "one_plus":
        return 1 + weight.to(dtype)
    return keep_rounded(1 + weight) if spec.weight == "one_plus_rounded" else weight


def _promoted(dtype: torch.dtype, *parameters: Tensor | None) -> torch.dtype:
    for p in parameters:
        dtype = dtype if p is None else torch.promote_types(dtype, p.dtype)
    return dtype


def activate(gate: Tensor, activation: str) -> Tensor:
    """Return silu(gate) or sigmoid(gate) in the accumulation dtype."""
    g = gate.to(accumulation_dtype(gate.dtype))
    return F.silu(g) if activation == "silu" else torch.sigmoid(g)


def apply_statistics(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return (x − mean) · 1/√(variance + ε) · weight + bias, rounded once (batch norm at inference)."""
    inverse = inverse_root(variance.to(accumulation_dtype(x.dtype)) + eps)
    return apply_inverse(x, mean, inverse, weight, bias, mask=mask)


def apply_inverse(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None, *, mask: Tensor | None = None
) -> Tensor:
    """Return (x − mean) · inverse · weight + bias, rounded once."""
    work = Count(mask, 0).drop(x).to(accumulation_dtype(x.dtype))  # a NaN there would reach the weight's gradient
    y = (work - mean.to(work.dtype)) * inverse
    y = y if weight is None else y * weight.to(work.dtype)
    y = (y if bias is None else y + bias.to(work.dtype)).to(x.dtype)
    return y if mask is None else torch.where(mask, y, torch.zeros((), dtype=y.dtype, device=y.device))
