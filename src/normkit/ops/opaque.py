"""The fused norms as registered operators, for ``use(batch_invariant=True)`` where something looks inside operators.

A compiler that sees the formula fuses it as it likes, and the order of its sums follows the shapes of a call. A
registered operator it calls as it is: the kernel of eager mode runs, with its bits. The spec travels as its code, a
string, and eps as a number.

These operators are no way to call a norm without a compiler (see `normkit.ops`). What PyTorch would do with them by
default and get wrong is refused here: forward mode (tangents would be dropped), `torch.func` and second derivatives.
Importing this module registers them; nothing does so before the first call that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit.kernels.refusals import one_row
from normkit.kernels.registry import not_invariant
from normkit.ops import operators
from normkit.ops.through import scaled
from normkit.ops.watch import needs_grad
from normkit.spec import NormSpec

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_LIBRARY = torch.library.Library("normkit", "FRAGMENT")
_INPUTS = "Tensor x, Tensor? weight, Tensor? bias, str spec, int[] axes, float eps"
_SCHEMAS = (
    f"row_norm({_INPUTS}) -> Tensor",
    f"row_norm_keep({_INPUTS}) -> (Tensor y, Tensor statistics)",
    f"add_norm(Tensor residual, float alpha, float beta, {_INPUTS}) -> (Tensor y, Tensor s)",
    f"add_norm_keep(Tensor residual, float alpha, float beta, {_INPUTS}) -> (Tensor y, Tensor s, Tensor statistics)",
    "row_norm_backward(Tensor dy, Tensor? extra, Tensor statistics, Tensor x, Tensor? weight, Tensor? bias, str spec, "
    "int[] axes, bool[] wanted, ScalarType? target) -> (Tensor dx, Tensor dw, Tensor db)",
)


def cannot() -> str | None:
    """Return why a registered operator would be wrong in this surrounding, or None."""
    if torch.compiler.is_exporting():
        return "an exported graph holds plain ATen operators"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "forward-mode differentiation"
    if torch.compiler.is_compiling():
        return None  # torch.func inside what is compiled is noticed by the operator itself
    if _C._functorch.maybe_current_level() is not None:
        return "a torch.func transform"
    if _C._is_torch_function_mode_enabled():
        return "a torch function mode"
    if _C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return None


def check_surrounding(*, gated: bool = False) -> None:
    """Raise where a registered operator would be wrong, or has no kernel to call.

    Raises:
        ValueError: with the reason.
    """
    why = "gated norms have no registered operator" if gated else cannot()
    if why is not None:
        raise not_invariant(why)


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
) -> Tensor:
    """Call the fused norm as an operator; arguments as `normkit.kernels.reference.normalize` takes them.

    Raises:
        ValueError: with the reason, where no kernel or no registered operator can compute this.
    """
    check_surrounding()
    return torch.ops.normkit.row_norm(x, weight, bias, spec.code, axes, eps)  # type: ignore[no-any-return]


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
) -> tuple[Tensor, Tensor]:
    """Call the fused residual add and norm as an operator; returns (y, s), as `normkit.ops.residual` does.

    Raises:
        ValueError: as `normalize`.
    """
    check_surrounding()
    return torch.ops.normkit.add_norm(residual, alpha, beta, x, weight, bias, spec.code, axes, eps)  # type: ignore[no-any-return]


def _refuse_transforms(*tensors: Tensor | None) -> None:
    if _C._functorch.maybe_current_level() is not None:
        raise not_invariant("a torch.func transform")
    if forward_ad._current_level >= 0 and any(  # pyright: ignore[reportPrivateUsage]
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise not_invariant("forward-mode differentiation")


def _check_trained(
    wanted: Sequence[bool], parameters: tuple[Tensor | None, ...], x: Tensor, axes: Sequence[int]
) -> None:
    """Refuse a trainable parameter that differs from row to row: the kernel, asked later, cannot see who is trained."""
    for want, p in zip(wanted, parameters, strict=True):
        if want and p is not None and not one_row(p, x, tuple(axes)):
            raise not_invariant("a trainable weight or bias differs from row to row; its gradient has no kernel")


def _row_norm_autograd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: str, axes: list[int], eps: float
) -> Tensor:
    _refuse_transforms(x, weight, bias)
    if needs_grad(x, weight, bias):
        return _RowNorm.apply(x, weight, bias, spec, axes, eps)  # type: ignore[no-any-return]
    with _C._AutoDispatchBelowAutograd():
        return torch.ops.normkit.row_norm(x, weight, bias, spec, axes, eps)  # type: ignore[no-any-return]


def _add_norm_autograd(
    residual: Tensor,
    alpha: float,
    beta: float,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: str,
    axes: list[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    _refuse_transforms(x, residual, weight, bias)
    if needs_grad(x, residual, weight, bias):
        return _AddNorm.apply(x, residual, weight, bias, alpha, beta, spec, axes, eps)  # type: ignore[no-any-return]
    with _C._AutoDispatchBelowAutograd():
        return torch.ops.normkit.add_norm(residual, alpha, beta, x, weight, bias, spec, axes, eps)  # type: ignore[no-any-return]


def _no_further(name: str) -> Any:
    operator = getattr(torch.ops.normkit, name)

    def autograd(*arguments: Any) -> Any:
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        _refuse_transforms(*tensors)
        if needs_grad(*tensors):
            raise RuntimeError(
                "normkit: second derivatives are not computed under batch_invariant=True: only the reference has "
                "them, and it does not keep a row's bits apart from its batch. Leave batch_invariant off for them"
            )
        with _C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return autograd


class _RowNorm(torch.autograd.Function):
    """The first derivative of ``normkit::row_norm``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: str, axes: list[int], eps: float
    ) -> Tensor:
        _check_trained(ctx.needs_input_grad[1:3], (weight, bias), x, axes)
        with _C._AutoDispatchBelowAutograd():
            y, statistics = torch.ops.normkit.row_norm_keep(x, weight, bias, spec, axes, eps)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.spec, ctx.axes = spec, axes
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, bias, statistics = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = torch.ops.normkit.row_norm_backward(
            dy, None, statistics, x, weight, bias, ctx.spec, ctx.axes, wanted, None
        )
        return (*(g if w else None for g, w in zip(found, wanted, strict=True)), None, None, None)


class _AddNorm(torch.autograd.Function):
    """The first derivative of ``normkit::add_norm``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        alpha: float,
        beta: float,
        spec: str,
        axes: list[int],
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        _check_trained(ctx.needs_input_grad[2:4], (weight, bias), x, axes)
        with _C._AutoDispatchBelowAutograd():
            y, s, statistics = torch.ops.normkit.add_norm_keep(residual, alpha, beta, x, weight, bias, spec, axes, eps)
        ctx.save_for_backward(s, weight, bias, statistics)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.axes, ctx.scales, ctx.dtypes = spec, axes, (alpha, beta), (x.dtype, residual.dtype)
        return y, s

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, ds = gradients
        s, weight, bias, statistics = ctx.saved_tensors
        want_x, want_residual, want_w, want_b = ctx.needs_input_grad[:4]
        total, dw, db = ds, None, None
        if dy is not None:
            wanted = [want_x or want_residual, want_w, want_b]
            found = torch.ops.normkit.row_norm_backward(
                dy, ds, statistics, s, weight, bias, ctx.spec, ctx.axes, wanted, ctx.dtypes[0]
            )
            total, dw, db = (g if w else None for g, w in zip(found, wanted, strict=True))
        (alpha, beta), (dtype_x, dtype_residual) = ctx.scales, ctx.dtypes
        dx = scaled(total, beta, dtype_x) if want_x else None
        dr = scaled(total, alpha, dtype_residual) if want_residual else None
        return dx, dr, dw, db, None, None, None, None, None


def _register() -> None:
    for schema in _SCHEMAS:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, compute, shapes, autograd in (
        ("row_norm", operators.row_norm, operators.shape_row_norm, _row_norm_autograd),
        ("row_norm_keep", operators.row_norm_keep, operators.shapes_keep, None),
        ("add_norm", operators.add_norm, operators.shapes_add, _add_norm_autograd),
        ("add_norm_keep", operators.add_norm_keep, operators.shapes_add_keep, None),
        ("row_norm_backward", operators.row_norm_backward, operators.shapes_backward, None),
    ):
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"normkit::{name}", shapes, lib=_LIBRARY)
        _LIBRARY.impl(name, autograd or _no_further(name), "Autograd")


_register()
