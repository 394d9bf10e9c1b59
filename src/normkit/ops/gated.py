"""A gated norm as PyTorch sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.kernels import registry
from normkit.kernels.contract import Request
from normkit.kernels.registry import REFERENCE
from normkit.ops import telling
from normkit.ops.through import through_reference
from normkit.ops.watch import choose, needs_grad, plain, watched
from normkit.spec import NormSpec


def gate_normalize(
    x: Tensor, gate: Tensor, spec: NormSpec, weight: Tensor | None, *, axes: tuple[int, ...], eps: float
) -> Tensor:
    """Compute a gated ``spec`` on x and gate of shape (…, groups, width), to which the weight broadcasts."""
    if not watched():
        kernel = choose(Request(spec, x, axes, weight, gate=gate), x, gate, weight)
        if kernel is not REFERENCE:
            if needs_grad(x, gate, weight):
                return _GatedNorm.apply(x, gate, weight, spec, axes, eps, kernel)  # type: ignore[no-any-return]
            return kernel.gated_forward(x, gate, spec, weight, axes=axes, eps=eps)[0]  # type: ignore[no-any-return]
    else:
        registry.refuse_invariant("gated norms have no registered operator, and something looks inside operators")
    return telling.normalize(x, spec, weight, None, axes=axes, eps=eps, gate=gate)


class _GatedNorm(torch.autograd.Function):
    """The fused gated norm as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        spec: NormSpec,
        axes: tuple[int, ...],
        eps: float,
        kernel: Any,
    ) -> Tensor:
        y, stats = kernel.gated_forward(x, gate, spec, weight, axes=axes, eps=eps, keep=True)
        ctx.save_for_backward(x, gate, weight, stats)
        ctx.spec, ctx.axes, ctx.eps, ctx.kernel = spec, axes, eps, kernel
        ctx.batch_invariant = registry.batch_invariant()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, gate, weight, stats = ctx.saved_tensors
        wanted = want_x, want_gate, want_w = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or watched() or not all(map(plain, (dy, x, gate, weight))):
            order = (want_x, want_w, False, want_gate)
            dx, dw, _, dgate = through_reference(ctx, (x, weight, None, gate), order, dy)
        else:
            dx, dgate, dw = ctx.kernel.gated_backward(
                x, gate, ctx.spec, weight, dy, stats, axes=ctx.axes, wanted=wanted
            )
        return dx, dgate, dw, None, None, None, None
