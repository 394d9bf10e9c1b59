"""Stand-ins for a norm that take no statistic: DyT and Derf."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.checks import align_parameter, check_float
from normkit.functional.ragged import is_jagged, opened
from normkit.kernels.statistics import accumulation_dtype


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    r"""Dynamic tanh: ``y = tanh(α·x) · w + b``, computed in float32 and rounded once to x's dtype.

    Args:
        x: (…, C); float16, bfloat16, float32 or float64.
        alpha: learned scalar (0.5 at the start is the paper's choice).
        weight, bias: (C,), or broadcastable to x.

    Raises:
        TypeError: x or a parameter is no floating tensor of 16 to 64 bits.
        ValueError: shapes that do not broadcast to x.

    Source: Zhu et al. 2025, arXiv 2503.10622.

    Example:
        >>> import torch, normkit as nk
        >>> nk.dyt(torch.tensor([-100.0, 0.0, 1.0]), torch.tensor(0.5))
        tensor([-1.0000,  0.0000,  0.4621])
    """
    if is_jagged(x):
        whole = opened(x, "dyt")
        w, b = whole.parameter(weight, "weight"), whole.parameter(bias, "bias")
        return whole.joined(dyt(whole.values, alpha, w, b))
    wide, w, b = _wide(x, weight, bias, "dyt")
    return _affine(torch.tanh(_parameter(alpha, x, "dyt", "alpha") * wide), w, b).to(x.dtype)


def derf(x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    r"""Dynamic erf: ``y = erf(α·x + s) · w + b``, computed in float32 and rounded once to x's dtype.

    Args:
        x: (…, C); float16, bfloat16, float32 or float64.
        alpha, shift: learned scalars α and s.
        weight, bias: (C,), or broadcastable to x.

    Raises:
        TypeError: x or a parameter is no floating tensor of 16 to 64 bits.
        ValueError: shapes that do not broadcast to x.

    Source: Chen et al. 2025, arXiv 2512.10938.

    Example:
        >>> import torch, normkit as nk
        >>> nk.derf(torch.tensor([-100.0, 0.0, 1.0]), torch.tensor(0.5), torch.tensor(0.0))
        tensor([-1.0000,  0.0000,  0.5205])
    """
    if is_jagged(x):
        whole = opened(x, "derf")
        w, b = whole.parameter(weight, "weight"), whole.parameter(bias, "bias")
        return whole.joined(derf(whole.values, alpha, shift, w, b))
    wide, w, b = _wide(x, weight, bias, "derf")
    inner = _parameter(alpha, x, "derf", "alpha") * wide + _parameter(shift, x, "derf", "shift")
    return _affine(torch.erf(inner), w, b).to(x.dtype)


def _wide(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, name: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    check_float(x, name)
    axes = (x.dim() - 1,) if x.dim() else ()
    w = align_parameter(weight, x, axes, name, "weight")
    b = align_parameter(bias, x, axes, name, "bias")
    return x.to(accumulation_dtype(x.dtype)), w, b


def _parameter(p: Tensor, x: Tensor, name: str, what: str) -> Tensor:
    aligned = align_parameter(check_float(p, name, what), x, (), name, what)
    assert aligned is not None
    return aligned.to(accumulation_dtype(x.dtype))


def _affine(value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    value = value if weight is None else value * weight.to(value.dtype)
    return value if bias is None else value + bias.to(value.dtype)
