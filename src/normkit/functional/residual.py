"""Residual add and norm in one step, returning both the normalised value and the new stream."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.checks import Eps, align_parameter, check_eps, check_float, eps_value
from normkit.conventions import TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.functional.ragged import is_jagged, opened
from normkit.functional.rows import check_out, check_parameters, dtype_of_result
from normkit.ops.outputs import overlap, shares_itself
from normkit.ops.residual import add_normalize, quick_add
from normkit.ops.watch import ordinary, watched
from normkit.spec import NormSpec


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    branch_scale: float = 1.0,
    eps: Eps = 1e-5,
    spec: NormSpec = TORCH_LAYER_NORM,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return ``(y, s)``: ``s = α·residual + branch_scale·x``, ``y = LayerNorm(s)`` over the last axis.

    s is formed in float32 (float64 for a float64 stream) and rounded to the stream's dtype. The statistic is that of
    the rounded s, so y is what a separate add and norm would give, bit for bit.

    Args:
        x: the sublayer's output, any shape.
        residual: the stream, of x's shape; its dtype may differ.
        weight, bias: of x's last size, or broadcastable to x.
        alpha: scale of the stream (DeepNorm's α).
        branch_scale: scale of x (residual multipliers).
        eps: 1e-5 unless given.
        spec: a centred convention.
        out: (y, s), tensors to write into instead of new ones, without gradients. y and s may each be x or residual
            itself: ``out=(x, residual)`` works in place. New memory costs more than the norm where tensors are large.

    Returns:
        y in x's dtype (unless the spec promotes) and s in the promoted dtype of x and residual: a float32 stream
        stays float32.

    Raises:
        TypeError, ValueError: as `layer_norm`; also for shapes of x and residual that differ, and for an ``out`` whose
            two tensors share memory.

    Source: post-norm, arXiv 1706.03762; α: DeepNet, arXiv 2203.00555.

    Example:
        >>> import torch, normkit as nk
        >>> y, s = nk.add_layer_norm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), alpha=2.0, eps=0.0)
        >>> y, s
        (tensor([-1.,  1.]), tensor([3., 5.]))
    """
    return _add_norm(x, residual, weight, bias, alpha, branch_scale, eps, spec, out, "layer", "add_layer_norm")


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    branch_scale: float = 1.0,
    eps: Eps = 1e-6,
    spec: NormSpec = TORCH_RMS_NORM,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return ``(y, s)``: ``s = α·residual + branch_scale·x``, ``y = RMSNorm(s)`` over the last axis.

    s is formed in float32 (float64 for a float64 stream) and rounded to the stream's dtype. The statistic is that of
    the rounded s, so y is what a separate add and norm would give, bit for bit.

    Args:
        x: the sublayer's output, any shape.
        residual: the stream, of x's shape; its dtype may differ.
        weight, bias: of x's last size, or broadcastable to x.
        alpha: scale of the stream.
        branch_scale: scale of x (residual multipliers, e.g. Granite's).
        eps: 1e-6 unless given.
        spec: an rms convention.
        out: (y, s), tensors to write into instead of new ones, without gradients. y and s may each be x or residual
            itself: ``out=(x, residual)`` works in place. New memory costs more than the norm where tensors are large.

    Returns:
        y in x's dtype (unless the spec promotes) and s in the promoted dtype of x and residual: a float32 stream
        stays float32.

    Raises:
        TypeError, ValueError: as `rms_norm`; also for shapes of x and residual that differ, and for an ``out`` whose
            two tensors share memory.

    Source: the pre-norm decoder step of Llama-like models.

    Example:
        >>> import torch, normkit as nk
        >>> y, s = nk.add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), eps=0.0)
        >>> y, s
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    return _add_norm(x, residual, weight, bias, alpha, branch_scale, eps, spec, out, "rms", "add_rms_norm")


def _add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    branch_scale: float,
    eps: Eps,
    spec: NormSpec,
    out: tuple[Tensor, Tensor] | None,
    kind: str,
    name: str,
) -> tuple[Tensor, Tensor]:
    if spec.kind == kind:
        quick = quick_add(x, residual, weight, bias, eps, spec, alpha, branch_scale, out)
        if quick is not None:
            return quick
    check_float(x, name)
    check_float(residual, name, "residual")
    if is_jagged(x) or is_jagged(residual):
        return _add_jagged(x, residual, weight, bias, alpha, branch_scale, eps, spec, out, kind, name)
    if x.shape != residual.shape:
        raise ValueError(
            f"{name}: x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}"
        )
    if x.dim() == 0:
        raise ValueError(f"{name}: x needs at least one axis, got a scalar")
    if spec.kind != kind or spec.gate != "none":
        raise ValueError(f"{name}: expected an ungated {kind} spec, got {spec.code}")
    stream = torch.promote_types(x.dtype, residual.dtype)
    number = eps_value(check_eps(eps, name), stream)
    check_parameters(spec, weight, name)
    axes = (x.dim() - 1,)
    w = align_parameter(weight, x, axes, name, "weight")
    b = align_parameter(bias, x, axes, name, "bias")
    if out is not None:
        _check_outs(out, x, residual, weight, bias, spec, name)
    return add_normalize(
        x, residual, spec, w, b, alpha=float(alpha), beta=float(branch_scale), axes=axes, eps=number, out=out
    )


def _add_jagged(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    branch_scale: float,
    eps: Eps,
    spec: NormSpec,
    out: tuple[Tensor, Tensor] | None,
    kind: str,
    name: str,
) -> tuple[Tensor, Tensor]:
    if not x.is_nested:
        opened(residual, name).alike(x, "x")  # refuses, and says what to do
    whole = opened(x, name)
    (last,) = within = whole.axes(-1)
    assert last == whole.values.dim() - 1
    w, b = (whole.parameter(p, what, within) for p, what in ((weight, "weight"), (bias, "bias")))
    to = None
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise TypeError(f"{name}: out must be a pair of tensors (y, s), got {type(out).__name__}")
        to = (whole.alike(out[0], "out[0] (y)"), whole.alike(out[1], "out[1] (s)"))
    stream = whole.alike(residual, "residual")
    y, s = _add_norm(whole.values, stream, w, b, alpha, branch_scale, eps, spec, to, kind, name)
    return (whole.joined(y), whole.joined(s)) if out is None else out


def _check_outs(
    out: tuple[Tensor, Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    name: str,
) -> None:
    """Refuse an ``out=`` that is no pair (y, s), does not fit the results, or where a gradient would be lost."""
    if not isinstance(out, tuple) or len(out) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise TypeError(f"{name}: out must be a pair of tensors (y, s), got {type(out).__name__}")
    y, s = out
    check_out(y, dtype_of_result(x, weight, bias, spec), (x, weight, bias), name, "out[0] (y)")
    stream = torch.promote_types(x.dtype, residual.dtype)
    check_out(s, stream, (residual, None, None), name, "out[1] (s)")
    if any(map(shares_itself, out)):
        raise ValueError(f"{name}: out must hold every element once, got an expanded tensor")
    if not watched() and ordinary(y) and ordinary(s) and overlap(y, s):
        raise ValueError(f"{name}: out must be two tensors that share no memory, got y and s that do")
