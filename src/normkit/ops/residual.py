"""A residual add and norm as PyTorch sees it."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from normkit.kernels import registry
from normkit.kernels.contract import Request
from normkit.kernels.registry import REFERENCE
from normkit.kernels.rounding import result_dtype, round_to
from normkit.kernels.statistics import accumulation_dtype
from normkit.ops import telling
from normkit.ops.outputs import may_fill_both, may_write_both
from normkit.ops.rows import LARGEST_EPS, is_row
from normkit.ops.through import scaled, through_reference
from normkit.ops.watch import choose, is_dtensor, needs_grad, ordinary, plain, side_by_side, watched
from normkit.spec import NormSpec


def add_normalize(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``s = α·residual + β·x`` and s itself, rounded before its statistic is taken."""
    if is_dtensor(x) and out is None:
        return _of_shards(x, residual, spec, weight, bias, alpha, beta, axes, eps)
    if out is not None:
        return _write(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps, out=out)
    if not watched():
        request = Request(spec, x, axes, weight, bias, residual=residual)
        kernel = choose(request, x, residual, weight, bias)
        if kernel is not REFERENCE:
            if needs_grad(x, residual, weight, bias):
                return _AddNorm.apply(x, residual, weight, bias, spec, axes, eps, alpha, beta, kernel, None)  # type: ignore[no-any-return]
            y, s, _ = kernel.add_forward(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps)
            return y, s
    elif registry.batch_invariant():
        from normkit.ops import opaque  # registers the operators

        return opaque.add_normalize(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps)
    return _add_reference(x, residual, spec, weight, bias, alpha, beta, axes, eps)


def _of_shards(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    from normkit.ops import sharded  # torch.distributed, which not every build of PyTorch has

    def local(x: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_normalize(x, r, spec, w, b, alpha=alpha, beta=beta, axes=axes, eps=eps)

    def add(x: Tensor, r: Tensor) -> Tensor:
        return _sum_of(x, r, alpha, beta)

    name = f"add_{spec.kind}_norm"
    return sharded.add_normalize(x, residual, spec, weight, bias, axes=axes, eps=eps, local=local, add=add, name=name)


def _write(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
    out: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Write into the caller's tensors, straight from the kernel where nothing they hold is still to be read."""
    y, s = out
    if not watched() and may_write_both(y, s, (x, residual), weight, bias):
        kernel = choose(Request(spec, x, axes, weight, bias, residual=residual), x, residual, weight, bias, y, s)
        if kernel is not REFERENCE:
            kernel.add_forward(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps, out=out)
            increment_version(out)  # a backward that saved the old values must notice
            return out
    fresh = add_normalize(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps)
    return y.copy_(fresh[0]), s.copy_(fresh[1])


def quick_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: object,
    spec: NormSpec,
    alpha: object,
    beta: object,
    out: object = None,
) -> tuple[Tensor, Tensor] | None:
    """As `normkit.ops.rows.quick`, of a residual add and norm."""
    if (
        watched()
        or type(eps) is not float
        or type(alpha) is not float
        or type(beta) is not float
        or registry.backend() != "auto"
    ):
        return None
    if not 0.0 <= eps < LARGEST_EPS:
        return None
    device = None
    if not (plain(x) and plain(residual) and plain(weight) and plain(bias)):
        device = side_by_side(x, residual, weight, bias) if x.is_cuda else None
        if device is None:
            return None
    if x.shape != residual.shape or not (x.is_contiguous() and residual.is_contiguous()) or not x.numel():
        return None
    if not (x.dim() and is_row(weight, x.shape[-1]) and is_row(bias, x.shape[-1])):
        return None
    dtypes = x.dtype, residual.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype
    found = _quick.get((spec, dtypes, device))
    if found is None:
        if spec.gate != "none" or (spec.weight == "none" and weight is not None):
            return None
        request = Request(spec, x, (x.dim() - 1,), weight, bias, residual=residual)
        kernel = registry.choose(request).kernel
        if kernel is REFERENCE:
            return None
        found = _quick[spec, dtypes, device] = (kernel, kernel.quick_add(request))
    kernel, run = found
    if out is not None:
        if not _may_take(out, x, residual, weight, bias, spec):
            return None
        run(x, residual, weight, bias, eps, alpha, beta, False, out)
        increment_version(out)  # a backward that saved the old values must notice
        return out
    if needs_grad(x, residual, weight, bias):
        axes = (x.dim() - 1,)
        return _AddNorm.apply(x, residual, weight, bias, spec, axes, eps, alpha, beta, kernel, run)  # type: ignore[no-any-return]
    return run(x, residual, weight, bias, eps, alpha, beta, False)[:2]  # type: ignore[no-any-return]


def _may_take(
    out: object, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec
) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Say whether ``out`` is all that the common case asks of it: a pair of contiguous tensors with memory to fill."""
    if type(out) is not tuple or len(out) != 2:
        return False
    y, s = out
    if not (
        type(y) is Tensor and type(s) is Tensor and ordinary(y) and ordinary(s) and y.device == s.device == x.device
    ):
        return False
    if needs_grad(x, residual, weight, bias) or (torch.is_grad_enabled() and (y.requires_grad or s.requires_grad)):
        return False
    dtype = result_dtype(spec, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    fit = y.dtype == dtype and s.dtype == torch.promote_types(x.dtype, residual.dtype)
    if not fit or y.shape != x.shape or s.shape != x.shape or not (y.is_contiguous() and s.is_contiguous()):
        return False
    return may_fill_both(y, s, x, residual, weight, bias)


_quick: dict[Any, Any] = {}


def _add_reference(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    s = _sum_of(x, residual, alpha, beta)
    return telling.normalize(s, spec, weight, bias, axes=axes, eps=eps, out_dtype=x.dtype), s


def _sum_of(x: Tensor, residual: Tensor, alpha: float, beta: float) -> Tensor:
    stream = torch.promote_types(x.dtype, residual.dtype)
    wide = accumulation_dtype(stream)
    # Scales of 1 are left out, so that the sum is the plain sum; α·r + β·x is formed wide and then rounded.
    scaled = residual.to(wide) if alpha == 1 else residual.to(wide) * alpha
    branch = x.to(wide) if beta == 1 else x.to(wide) * beta
    return round_to(scaled + branch, stream)


class _AddNorm(torch.autograd.Function):
    """The fused residual add and norm as autograd sees it: saves the sum, from which both gradients follow."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: NormSpec,
        axes: tuple[int, ...],
        eps: float,
        alpha: float,
        beta: float,
        kernel: Any,
        run: Any,
    ) -> tuple[Tensor, Tensor]:
        if run is None:
            y, s, stats = kernel.add_forward(
                x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps, keep=True
            )
        else:
            y, s, stats = run(x, residual, weight, bias, eps, alpha, beta, True)
        ctx.save_for_backward(s, weight, bias, stats)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.axes, ctx.eps, ctx.kernel, ctx.scales = spec, axes, eps, kernel, (alpha, beta)
        ctx.dtypes, ctx.batch_invariant = (x.dtype, residual.dtype), registry.batch_invariant()
        return y, s

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, ds = gradients
        s, weight, bias, stats = ctx.saved_tensors
        alpha, beta = ctx.scales
        dtype_x, dtype_residual = ctx.dtypes
        want_x, want_residual, want_w, want_b = ctx.needs_input_grad[:4]
        want_s = want_x or want_residual
        total, dw, db = ds, None, None
        if dy is not None:
            if torch.is_grad_enabled() or watched() or not all(map(ordinary, (dy, ds, s, weight))):
                through, dw, db = through_reference(
                    ctx, (s, weight, bias), (want_s, want_w, want_b), dy, out_dtype=dtype_x
                )
                total = through if ds is None or through is None else through + ds
            else:
                total, dw, db = ctx.kernel.backward(
                    s,
                    ctx.spec,
                    weight,
                    bias,
                    dy,
                    stats,
                    axes=ctx.axes,
                    wanted=(want_s, want_w, want_b),
                    extra=ds,
                    target=dtype_x,
                )
        dx = scaled(total, beta, dtype_x) if want_x else None
        dr = scaled(total, alpha, dtype_residual) if want_residual else None
        return dx, dr, dw, db, None, None, None, None, None, None, None
