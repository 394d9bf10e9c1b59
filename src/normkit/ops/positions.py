"""A norm whose statistics cross positions as PyTorch sees it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.conventions import TORCH_LAYER_NORM
from normkit.kernels import reference, registry
from normkit.kernels.contract import Found, Kernel, Request
from normkit.kernels.registry import REFERENCE
from normkit.kernels.statistics import Moments, moments_of
from normkit.ops import telling
from normkit.ops.through import check_invariant, through
from normkit.ops.watch import choose, needs_grad, plain, watched


class Statistic(NamedTuple):
    """What a statistic covers, and its ε.

    Args:
        channel: the channel axis.
        groups: how many groups of channels have a statistic of their own: C for one each.
        per_sample: whether samples (axis 0) have their own, too.
        eps: ε.
        mask: bool, broadcastable to x, alike for all channels; True = counted.
    """

    channel: int
    groups: int
    per_sample: bool
    eps: float
    mask: Tensor | None = None

    def axes(self, x: Tensor) -> tuple[int, ...]:
        """Return the axes that a statistic runs over whole."""
        return tuple(a for a in range(x.dim()) if a != self.channel and not (self.per_sample and a == 0))


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic) -> tuple[Tensor, Found]:
    """Return (x − μ)/√(σ² + ε)·γ + β, and the moments behind it; γ, β have one value a channel."""
    if not watched():
        kernel = _chosen(x, weight, bias, statistic)
        if kernel is not REFERENCE:
            if needs_grad(x, weight, bias):
                into: list[Found] = []
                y: Tensor = _Columns.apply(x, weight, bias, statistic, kernel.columns, into)  # type: ignore[assignment]
                return y, into[0]
            y, _, _, found = _forward(kernel.columns, x, weight, bias, statistic)
            return y, found
    else:
        registry.refuse_invariant("this norm has no registered operator, and something looks inside operators")
    y = by_reference(x, weight, bias, statistic)
    return y, Found(partial(moments_of, x.detach(), statistic.axes(x), statistic.mask))


_known: dict[Any, Kernel] = {}
_KEPT = 256  # answers; a model has a few shapes, ragged batches have any number


def _chosen(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic) -> Kernel:
    """Return the kernel of a call, remembered for ordinary CPU tensors where no backend was asked for.

    Asking anew would be a large part of the Python around a batch norm whose tensors leave nothing of it in the caches.
    """
    mask = statistic.mask
    if registry.backend() != "auto" or not (plain(x) and plain(weight) and plain(bias) and plain(mask)):
        return choose(request_of(x, weight, bias, statistic), x, weight, bias, mask)
    key = (
        *(x.shape, x.stride(), x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype),
        *(statistic.channel, statistic.per_sample, mask is None),
    )
    kernel = _known.get(key)
    if kernel is None:
        kernel = choose(request_of(x, weight, bias, statistic), x, weight, bias, mask)
        if kernel is REFERENCE:
            return kernel
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = kernel
    return kernel


def spread(p: Tensor, like: Tensor, channel: int) -> Tensor:
    """Return ``p``, one value a channel, shaped to broadcast against ``like``."""
    return p.reshape([-1 if a == channel else 1 for a in range(like.dim())])


def spread_affine(
    weight: Tensor | None, bias: Tensor | None, like: Tensor, channel: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return γ and β so shaped, where there are any."""
    return (
        None if weight is None else spread(weight, like, channel),
        None if bias is None else spread(bias, like, channel),
    )


def apply_statistics(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    channel: int,
    eps: float,
    mask: Tensor | None,
) -> Tensor:
    """Return (x − mean)/√(variance + ε)·γ + β with given statistics; all of them have one value a channel."""
    given = Statistic(channel, x.shape[channel], False, eps, mask)
    if not watched():
        kernel = choose(request_of(x, weight, bias, given), x, weight, bias, mask, mean, variance)
        if kernel is not REFERENCE and needs_grad(mean, variance):
            registry.check_reference("running statistics that need a gradient have no kernel")
        elif kernel is not REFERENCE:
            table = _table(mean, variance, eps)
            if needs_grad(x, weight, bias):
                return _Applied.apply(x, weight, bias, table, given, kernel.columns)  # type: ignore[no-any-return]
            assert kernel.columns is not None
            return kernel.columns.apply(x, table, weight, bias, channel=channel, mask=mask)[0]  # type: ignore[no-any-return]
    mean, variance = spread(mean, x, channel), spread(variance, x, channel)
    weight, bias = spread_affine(weight, bias, x, channel)
    return reference.apply_statistics(x, mean, variance, weight, bias, eps=eps, mask=mask)


def moments(x: Tensor, axes: tuple[int, ...], mask: Tensor | None) -> Moments:
    """Return the moments of ``x`` along ``axes``; ``mask`` has x's dimensions.

    A kernel computes those that keep one axis, or the first and another, where the mask is alike along it.
    """
    if watched():
        return moments_of(x, axes, mask)
    if needs_grad(x):
        registry.check_reference("moments that need a gradient have no kernel")
        return moments_of(x, axes, mask)
    kept = [a for a in range(x.dim()) if a not in axes]
    wide, wide_mask, channel = x, mask, x.dim()
    if not kept:  # a channel of its own
        wide, wide_mask = x.unsqueeze(-1), None if mask is None else mask.unsqueeze(-1)
    elif kept == [0] and x.dim() > 1:  # the first axis is where samples are looked for
        wide, wide_mask, channel = x.transpose(0, 1), None if mask is None else mask.transpose(0, 1), 1
    else:
        channel = kept[-1]
    per_sample = len(kept) == 2
    if channel == 0 or len(kept) > 2 or (per_sample and kept[0] != 0) or x.dim() == 0:
        registry.check_reference("the kernels keep one axis of x, or the first and another")
    elif wide_mask is not None and wide_mask.shape[channel] != 1:
        registry.check_reference("the mask differs along the axis that is kept")
    else:
        request = request_of(wide, None, None, Statistic(channel, 1, per_sample, 1.0, wide_mask))
        kernel = choose(request, x, mask)
        if kernel is not REFERENCE:
            assert kernel.columns is not None
            found: Moments = kernel.columns.moments(wide, channel=channel, per_sample=per_sample, mask=wide_mask)
            if kept:
                return found
            return Moments(*(t.reshape(()) for t in (found.count, found.mean, found.m2, found.remainder)))
    return moments_of(x, axes, mask)


def by_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic) -> Tensor:
    """Compute it in plain ATen."""
    axes, channel, mask = statistic.axes(x), statistic.channel, statistic.mask
    weight, bias = spread_affine(weight, bias, x, channel)
    if statistic.groups == x.shape[channel]:
        kind = "instance" if statistic.per_sample else "batch"
        return telling.normalize(x, TORCH_LAYER_NORM, weight, bias, axes=axes, eps=statistic.eps, mask=mask, kind=kind)
    split = (statistic.groups, x.shape[channel] // statistic.groups)
    weight, bias = (None if t is None else t.unflatten(channel, split) for t in (weight, bias))
    mask = None if mask is None else mask.unsqueeze(channel)
    axes = tuple(a if a < channel else a + 1 for a in sorted((*axes, channel)))
    y = telling.normalize(
        x.unflatten(channel, split),
        TORCH_LAYER_NORM,
        weight,
        bias,
        axes=axes,
        eps=statistic.eps,
        mask=mask,
        kind="group",
    )
    return y.flatten(channel, channel + 1)


def request_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic) -> Request:
    """Return the request by which a kernel is chosen for `normalize`."""
    masked = statistic.mask is not None
    return Request(TORCH_LAYER_NORM, x, statistic.axes(x), weight, bias, masked=masked, channel=statistic.channel)


def _table(mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return (mean, remainder 0, 1/√(variance + ε), scale 1) of every channel, (1, 4, C), in float32."""
    with torch.no_grad():
        table = torch.zeros(1, 4, mean.numel(), dtype=torch.float32, device=mean.device)
        table[0, 0] = mean.reshape(-1)
        table[0, 2] = reference.inverse_root(variance.reshape(-1).float() + eps)
        table[0, 3] = 1.0
    return table


def _forward(columns: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic) -> Any:
    return columns.forward(
        x, weight, bias, channel=statistic.channel, groups=statistic.groups, per_sample=statistic.per_sample,
        eps=statistic.eps, mask=statistic.mask,
    )  # fmt: skip


def _applied(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, table: Tensor, channel: int, mask: Tensor | None
) -> Tensor:
    weight, bias = spread_affine(weight, bias, x, channel)
    mean, inverse = spread(table[0, 0], x, channel), spread(table[0, 2], x, channel)
    return reference.apply_inverse(x, mean, inverse, weight, bias, mask=mask)


def shaped(gradient: Tensor | None, p: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter from that of its channels."""
    return None if gradient is None or p is None else gradient.view(p.shape).to(p.dtype)


class _Columns(torch.autograd.Function):
    """The fused norm as autograd sees it: saves x, the mask and float32 statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistic: Statistic,
        columns: Any,
        into: list[Found],
    ) -> Tensor:
        y, table, plan, found = _forward(columns, x, weight, bias, statistic)
        into.append(found)
        ctx.save_for_backward(x, weight, bias, statistic.mask, table)
        ctx.statistic, ctx.columns, ctx.plan = statistic, columns, plan
        ctx.batch_invariant = registry.batch_invariant()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, bias, _, table = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or watched() or not all(map(plain, (dy, x, weight))):
            check_invariant(ctx)
            norm = partial(by_reference, statistic=ctx.statistic)
            return (*through(norm, (x, weight, bias), wanted, dy), None, None, None)
        dx, dw, db = ctx.columns.backward(x, weight, dy, table, ctx.plan, wanted=wanted)
        return dx, shaped(dw, weight), shaped(db, bias), None, None, None


class _Applied(torch.autograd.Function):
    """Normalising with given statistics as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        table: Tensor,
        given: Statistic,
        columns: Any,
    ) -> Tensor:
        y, plan = columns.apply(x, table, weight, bias, channel=given.channel, mask=given.mask)
        # Not the running buffers themselves: a training step may move them before this backward runs.
        ctx.save_for_backward(x, weight, bias, given.mask, table)
        ctx.given, ctx.columns, ctx.plan = given, columns, plan
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, bias, mask, table = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or watched() or not all(map(plain, (dy, x, weight))):
            norm = partial(_applied, table=table, channel=ctx.given.channel, mask=mask)
            return (*through(norm, (x, weight, bias), wanted, dy), None, None, None)
        dx, dw, db = ctx.columns.apply_backward(x, weight, dy, table, ctx.plan, wanted=wanted)
        return dx, shaped(dw, weight), shaped(db, bias), None, None, None
