"""What both backwards share: the way through the reference, which can be differentiated, and a summand's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.registry import not_invariant


def through_reference(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    dy: Tensor,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Differentiate the reference at saved (x or sum, weight, bias[, gate]): the way to second derivatives.

    Raises:
        ValueError: where the forward promised rows that do not depend on their batch; the reference cannot.
    """
    check_invariant(ctx)

    def norm(x: Tensor, w: Tensor | None, b: Tensor | None, gate: Tensor | None = None) -> Tensor:
        return reference.normalize(x, ctx.spec, w, b, axes=ctx.axes, eps=ctx.eps, gate=gate, out_dtype=out_dtype)

    return through(norm, inputs, wanted, dy)


def check_invariant(ctx: Any) -> None:
    """Refuse what the reference would answer where the forward promised rows that do not depend on their batch."""
    if ctx.batch_invariant:
        raise not_invariant("its backward is itself differentiated, or something looks inside its operators")


def through(
    norm: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate ``norm``, plain ATen, at saved inputs, x first."""
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a leaf's own gradient is not what is asked for, while its graph stays connected.
        leaves = tuple(
            None if t is None else (t.view_as(t) if t.requires_grad else t.detach().requires_grad_(w))
            for t, w in zip(inputs, wanted, strict=True)
        )
        y = norm(*leaves)
        asked = [t for t, w in zip(leaves, wanted, strict=True) if w and t is not None]
        found = iter(torch.autograd.grad(y, asked, dy, create_graph=keep_graph, allow_unused=True))
    return tuple(next(found) if w and t is not None else None for t, w in zip(leaves, wanted, strict=True))


def scaled(total: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor | None:
    """Return the gradient of one summand from that of the sum."""
    if total is None:
        return None
    return (total if factor == 1 else total * factor).to(dtype)
