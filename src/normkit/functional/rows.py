"""Norms whose statistics stay inside one row: layer, rms, l2, scale, and the formula itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.checks import Eps, align_parameter, check_axes, check_eps, check_float, eps_value
from normkit.conventions import L2_NORM, SCALE_NORM, TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.functional.ragged import is_jagged, opened
from normkit.kernels.rounding import result_dtype
from normkit.ops import rows as ops
from normkit.spec import NormSpec


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axes: int | Sequence[int] = -1,
    eps: Eps,
    out: Tensor | None = None,
) -> Tensor:
    r"""Compute any `NormSpec`: ``y = (x − μ) · 1/√(σ² + ε) · γ + β``.

    μ is 0 where the spec is not centred; γ is 1 without a weight, w or 1 + w with one; β is 0 without a bias.

    Args:
        x: any shape with the axes named; float16, bfloat16, float32 or float64. Jagged nested tensors, here and in
            every norm, come back jagged, with their own offsets; the axes are then other than the ragged one.
        spec: the conventions.
        weight, bias: of x's shape along ``axes``, or broadcastable to x; any floating dtype. A missing weight is
            exactly 1, a missing bias exactly 0.
        axes: what a statistic runs over.
        eps: a finite number ≥ 0, or `TORCH_DEFAULT`.
        out: where to write; without gradients only, of the result's shape and dtype.

    Returns:
        A tensor of x's shape; dtype as the spec says (x's, or promoted with the weight's).

    Numerics:
        Statistics in float32 (float64 for float64), the squares taken after the upcast; corrected two-pass mean and
        variance; 1/√ by IEEE operations; rows whose squares would overflow are rescaled by a power of two. One
        rounding at the end unless the spec declares another. Differentiable to any order.

    Raises:
        TypeError: x or a parameter is no floating tensor of 16 to 64 bits; eps is no number.
        ValueError: eps is None, negative or not finite; axes or shapes do not fit; a gated spec (use
            `gated_rms_norm`); a weight given to a weightless spec; ``out`` with gradients or of another shape or dtype.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> nk.normalize(x, nk.L2_NORM, eps=0.0)
        tensor([[0.6000, 0.8000]])
    """
    name = "normalize"
    if spec.gate != "none":
        raise ValueError(f"{name}: {spec.code} has a gate; use gated_rms_norm")
    return _row_norm(x, weight, bias, eps=eps, axis=axes, spec=spec, out=out, name=name)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: Eps = 1e-5,
    axis: int | Sequence[int] = -1,
    spec: NormSpec = TORCH_LAYER_NORM,
    out: Tensor | None = None,
) -> Tensor:
    r"""Layer normalization: ``y = (x − μ) / √(σ² + ε) · w + b``, μ and σ² (biased) over ``axis``.

    Args:
        x: any shape; float16, bfloat16, float32 or float64.
        weight, bias: of x's shape along ``axis``, or broadcastable to x.
        eps: 1e-5 unless given.
        axis: the normalised axis or axes; the default is the last.
        spec: a centred convention; by default PyTorch's (float32 statistics, one rounding, x's dtype out).
        out: where to write, without gradients.

    Raises:
        TypeError, ValueError: as `normalize`; also for a spec that is not centred.

    Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.

    Example:
        >>> import torch, normkit as nk
        >>> nk.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), eps=0.0)
        tensor([[-1.2247,  0.0000,  1.2247]])
    """
    if axis == -1 and spec.centered:
        quick = ops.quick(x, weight, bias, eps, spec, out)
        if quick is not None:
            return quick
    _require(spec, "layer", "layer_norm")
    return _row_norm(x, weight, bias, eps=eps, axis=axis, spec=spec, out=out, name="layer_norm")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: Eps = 1e-6,
    axis: int | Sequence[int] = -1,
    spec: NormSpec = TORCH_RMS_NORM,
    out: Tensor | None = None,
) -> Tensor:
    r"""Root-mean-square normalization: ``y = x / √(mean(x²) + ε) · w + b``.

    Args:
        x: any shape; float16, bfloat16, float32 or float64.
        weight, bias: of x's shape along ``axis``, or broadcastable to x. Under ``spec=nk.GEMMA`` the gain is 1 +
            weight.
        eps: 1e-6 unless given; nn.RMSNorm's None is `TORCH_DEFAULT`.
        axis: the normalised axis or axes; the default is the last.
        spec: an rms convention; by default float32 statistics, weight before the one rounding, x's dtype out.
            ``nk.LLAMA`` rounds before the weight, ``nk.T5`` lets a half weight decide the dtype, and so on.
        out: where to write, without gradients.

    Raises:
        TypeError, ValueError: as `normalize`; also for a spec that is not an rms norm.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467 (whose code adds ε outside the root; every model here adds it
        inside).

    Example:
        >>> import torch, normkit as nk
        >>> nk.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), eps=0.0)
        tensor([[ 0.8485, 11.3137]])
    """
    if axis == -1 and not spec.centered and spec.statistic != "sum":
        quick = ops.quick(x, weight, bias, eps, spec, out)
        if quick is not None:
            return quick
    _require(spec, "rms", "rms_norm")
    return _row_norm(x, weight, bias, eps=eps, axis=axis, spec=spec, out=out, name="rms_norm")


def l2_norm(x: Tensor, *, eps: Eps = 1e-6, axis: int | Sequence[int] = -1, out: Tensor | None = None) -> Tensor:
    r"""Scale to unit length: ``y = x / √(Σx² + ε)``, in float32, rounded once.

    ε is inside the root, as linear-attention models have it; ``F.normalize`` instead divides by max(‖x‖, ε).

    Args:
        x: any shape; float16, bfloat16, float32 or float64.
        eps: 1e-6 unless given.
        axis: the axis or axes of a vector.
        out: where to write, without gradients.

    Raises:
        TypeError, ValueError: as `normalize`.

    Source: the q/k norm of gated delta nets (Qwen3-Next, Kimi Linear).

    Example:
        >>> import torch, normkit as nk
        >>> nk.l2_norm(torch.tensor([3.0, 4.0]), eps=0.0)
        tensor([0.6000, 0.8000])
    """
    return _row_norm(x, None, None, eps=eps, axis=axis, spec=L2_NORM, out=out, name="l2_norm")


def scale_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: Eps = 1e-6,
    axis: int | Sequence[int] = -1,
    out: Tensor | None = None,
) -> Tensor:
    r"""ScaleNorm: ``y = g · x / max(‖x‖, ε)`` with one learned scalar g.

    With g = √d it is RMSNorm with a tied gain.

    Args:
        x: any shape; float16, bfloat16, float32 or float64.
        weight: g, a tensor with one element.
        eps: lower bound of the length, 1e-6 unless given.
        axis: the axis or axes of a vector.
        out: where to write, without gradients.

    Raises:
        TypeError, ValueError: as `normalize`; also for a weight that is no scalar.

    Source: Nguyen and Salazar 2019, arXiv 1910.05895.

    Example:
        >>> import torch, normkit as nk
        >>> nk.scale_norm(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
        tensor([6., 8.])
    """
    if check_float(weight, "scale_norm", "weight").numel() != 1:
        raise ValueError(f"scale_norm: weight must be one number (g), got shape {tuple(weight.shape)}")
    scalar = weight.reshape(())
    return _row_norm(x, scalar, None, eps=eps, axis=axis, spec=SCALE_NORM, out=out, name="scale_norm")


def _require(spec: NormSpec, kind: str, name: str) -> None:
    if spec.kind != kind or spec.gate != "none":
        other = {"layer": "layer_norm", "rms": "rms_norm", "l2": "l2_norm, scale_norm or normalize"}[spec.kind]
        remedy = other if spec.gate == "none" else "gated_rms_norm"
        raise ValueError(f"{name}: expected an ungated {kind} spec, got {spec.code}; use {remedy}")


def check_parameters(spec: NormSpec, weight: Tensor | None, name: str) -> None:
    """Refuse a weight where the spec has none."""
    if spec.weight == "none" and weight is not None:
        raise ValueError(f"{name}: {spec.code} has no weight, but one was given; pass weight=None or another spec")


def _row_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: Eps,
    axis: int | Sequence[int],
    spec: NormSpec,
    out: Tensor | None,
    name: str,
) -> Tensor:
    check_float(x, name)
    if is_jagged(x):
        whole = opened(x, name)
        within = whole.axes(axis)
        w, b = (whole.parameter(p, what, within) for p, what in ((weight, "weight"), (bias, "bias")))
        to = None if out is None else whole.alike(out, "out")
        y = _row_norm(whole.values, w, b, eps=eps, axis=within, spec=spec, out=to, name=name)
        return whole.joined(y) if out is None else out
    number = eps_value(check_eps(eps, name), x.dtype)
    axes = check_axes(axis, x, name)
    check_parameters(spec, weight, name)
    w = align_parameter(weight, x, axes, name, "weight")
    b = align_parameter(bias, x, axes, name, "bias")
    if out is not None:
        check_out(out, dtype_of_result(x, weight, bias, spec), (x, weight, bias), name)
    return ops.normalize(x, spec, w, b, axes=axes, eps=number, out=out)


def check_out(
    out: Tensor, dtype: torch.dtype, inputs: tuple[Tensor, Tensor | None, Tensor | None], name: str, what: str = "out"
) -> None:
    """Refuse an ``out=`` that is no tensor, is not of the result's dtype and x's shape, or would lose a gradient."""
    if not isinstance(out, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: {what} must be a torch.Tensor, got {type(out).__name__}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, out)):
        raise ValueError(f"{name}: out= cannot record a gradient; call it under torch.no_grad(), or leave out= away")
    shape = inputs[0].shape
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{name}: {what} must be {dtype} of shape {tuple(shape)}, got {out.dtype} of {tuple(out.shape)}"
        )


def dtype_of_result(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> torch.dtype:
    """Return the dtype that a norm ends in."""
    return result_dtype(spec, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
