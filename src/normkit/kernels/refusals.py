"""What no fused kernel computes, on whatever machine: why a request goes to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.kernels.column_layout import shape_of
from normkit.kernels.contract import Request
from normkit.kernels.layout import lay
from normkit.spec import NormSpec


def of_spec(spec: NormSpec) -> str | None:
    """Return why a spec has no kernel, or None."""
    checks = (
        (spec.statistic_dtype == "input", "every intermediate is to be in x's dtype; the kernels compute in float32"),
        (spec.statistic == "unbiased", "the unbiased variance has no kernel"),
        (spec.eps != "inside", "ε is not inside the root"),
        (spec.root != "reciprocal", f"root={spec.root!r}; the kernels multiply by 1/√"),
        (spec.root_rounding != "none", "the inverse root is to be rounded to x's dtype"),
        (spec.gate != "none" and spec.kind != "rms", f"gated {spec.kind} norms have no kernel"),
    )
    return next((why for wrong, why in checks if wrong), None)


def of_rows(request: Request, contiguous: bool = False) -> str | None:
    """Return why a request of a row norm has no kernel, or None; rows known to be contiguous need no folding."""
    parameters = (request.weight, request.bias)
    if request.masked:
        return "masks have no row kernel"
    if (request.gate is None) != (request.spec.gate == "none"):
        return "the spec and the call disagree on whether there is a gate"
    if request.gate is not None and (request.bias is not None or request.residual is not None):
        return "a gated norm with a bias or a residual has no kernel"
    if (request.gate is not None or not contiguous) and not _foldable(request):
        return "the normalised axes form no single row, or more than three outer axes cannot be merged"
    trained = [p for p in parameters if p is not None and p.requires_grad and torch.is_grad_enabled()]
    if any(not one_row(p, request.x, sharing(request)) for p in trained):
        return "a trainable weight or bias differs from row to row; its gradient has no kernel"
    return None


def of_columns(request: Request) -> str | None:
    """Return why a norm across positions has no kernel for the layout of x, or None."""
    assert request.channel is not None
    if shape_of(request.x, request.channel, 0 not in request.axes) is None:
        return "neither channels nor positions lie side by side, or the positions of a sample lie on no single stride"
    return None


def _foldable(request: Request) -> bool:
    x, axes = request.x, request.axes
    # However x lies: results are contiguous, and there only neighbouring axes form a row.
    if any(a not in axes and x.shape[a] != 1 for a in range(axes[0], axes[-1])):
        return False
    return lay(axes, tuple(request.tensors.values()), x.shape) is not None


def sharing(request: Request) -> tuple[int, ...]:
    """Return the axes along which a weight has values of its own: of a row, gated of a row for every group."""
    return request.axes if request.gate is None else (request.x.dim() - 2, request.x.dim() - 1)


def one_row(p: Tensor, x: Tensor, axes: tuple[int, ...]) -> bool:
    """Say whether every row uses the same values of ``p``, so that its gradient is one sum over rows."""
    missing = x.dim() - p.dim()
    return all(p.shape[a - missing] == 1 for a in range(missing, x.dim()) if a not in axes)
