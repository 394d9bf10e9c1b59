"""Norms whose statistics cross positions: group, instance, batch, and mergeable moments.

Their axes are those of `normkit.coverage.COVERAGE` (instance: group with one channel a group).

Channels last is first-class: (N, L, C), or any (N, …, C) with ``channel_axis=-1``; (N, C, …) with ``channel_axis=1``.

The fused CPU kernels take whatever has its channels, or the positions of a sample, side by side in memory. A result's
bits then depend on the valid values that share its statistics, in their order, and on which of the two lie side by
side: not on padding, other strides, the number of threads, or (group and instance norm) other samples. For
everything else, and in float64, the reference promises its error bound. `normkit.explain` tells which of the two runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.checks import (
    Eps,
    check_axes,
    check_channel,
    check_eps,
    check_float,
    check_mask,
    eps_value,
)
from normkit.functional.ragged import is_jagged, opened, over_samples, refuse_mask
from normkit.kernels.contract import Found
from normkit.kernels.registry import refuse_invariant
from normkit.kernels.statistics import Moments
from normkit.ops import positions as ops

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def moments(x: Tensor, *, axes: int | Sequence[int], mask: Tensor | None = None) -> Moments:
    r"""Count, mean and Σ(x − mean)² along ``axes``, in float32 (float64 for float64), mergeable without loss.

    Args:
        x: any shape; float16, bfloat16, float32 or float64.
        axes: what the statistics run over.
        mask: bool, broadcastable to x, True = counted. Masked-out values, NaN included, never reach the result.

    Returns:
        `Moments` with the reduced axes removed. Where nothing is counted: count, mean and m2 are 0. Gradients flow
        through ``remainder`` (d(mean + remainder)/dx = 1/n) and ``m2``; ``mean`` itself is the rounded constant they
        refer to, so differentiate ``mean + remainder``, never ``mean`` alone.

    Raises:
        TypeError: x is no floating tensor; mask is no bool tensor.
        ValueError: axes out of range; a mask that does not broadcast to x.

    Source: Chan, Golub and LeVeque 1983 for the merge.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.tensor([1.0, 2.0, 3.0, float("nan")])
        >>> m = nk.moments(x, axes=0, mask=torch.tensor([True, True, True, False]))
        >>> int(m.count), float(m.mean), float(m.m2)
        (3, 2.0, 2.0)
    """
    name = "moments"
    check_float(x, name)
    if is_jagged(x):
        return _moments_of_jagged(x, axes, mask, name)
    dims = check_axes(axes, x, name)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"{name}: mask must be a bool tensor (True = counted), got {mask.dtype}")
        try:
            fits = torch.broadcast_shapes(mask.shape, x.shape) == x.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"{name}: mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}")
        mask = mask.reshape((1,) * (x.dim() - mask.dim()) + tuple(mask.shape))
    return ops.moments(x, dims, mask)


def _moments_of_jagged(x: Tensor, axes: int | Sequence[int], mask: Tensor | None, name: str) -> Moments:
    refuse_mask(x, mask, name)
    whole = opened(x, name, crossing=True)
    given = check_axes(axes, x, name)
    if whole.axis not in given:
        raise ValueError(
            f"{name}: axes {given} of the jagged x {whole.shape} leave its ragged axis {whole.axis}; take it in, or "
            "take the moments of x.values()"
        )
    if torch.compiler.is_compiling() and 0 not in given:
        raise RuntimeError(f"{name}: moments of each sample of a jagged x cannot be compiled; pad x and give a mask")
    wide, real = whole.together() if 0 in given else whole.padded()
    return ops.moments(wide, given, real)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: Eps = 1e-5,
    channel_axis: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Group normalization: statistics over positions and over the C/G channels of one group, per sample.

    ``y = (x − μ_{n,g}) / √(σ²_{n,g} + ε) · w_c + b_c``. It reads other positions, so it is not causal; with one group
    it is still not LayerNorm, whose statistics stay inside a position.

    Args:
        x: (N, …, C), or (N, C, …) with ``channel_axis=1``.
        groups: G, which must divide C.
        weight, bias: (C,).
        eps: 1e-5 unless given.
        channel_axis: where C is; keyword only, since F.group_norm has it at 1.
        mask: bool, x's shape without the channel axis, True = real position. Masked-out positions enter no statistic
            and come out as 0: results and gradients have the same bits however much padding there is.

    Raises:
        TypeError: no floating tensor; no bool mask; groups that is no int.
        ValueError: groups that do not divide C, shapes that do not fit, eps=None.

    Source: Wu and He 2018, arXiv 1803.08494.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.randn(2, 5, 6)
        >>> ours = nk.group_norm(x, 3)
        >>> theirs = torch.nn.functional.group_norm(x.transpose(1, 2), 3).transpose(1, 2)
        >>> bool(torch.allclose(ours, theirs, atol=1e-6))
        True
    """
    return _group_norm(x, groups, weight, bias, eps, channel_axis, mask, "group_norm")


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: Eps = 1e-5,
    channel_axis: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Instance normalization: statistics over positions alone, per sample and channel.

    ``y = (x − μ_{n,c}) / √(σ²_{n,c} + ε) · w_c + b_c``; group norm with one channel a group. Not causal.

    Args:
        x: (N, …, C), or (N, C, …) with ``channel_axis=1``.
        weight, bias: (C,).
        eps: 1e-5 unless given.
        channel_axis: where C is.
        mask: as in `group_norm`.

    Raises:
        TypeError, ValueError: as `group_norm`.

    Source: Ulyanov, Vedaldi and Lempitsky 2016, arXiv 1607.08022.

    Example:
        >>> import torch, normkit as nk
        >>> nk.instance_norm(torch.tensor([[[1.0], [3.0]]]), eps=0.0)
        tensor([[[-1.],
                 [ 1.]]])
    """
    check_float(x, "instance_norm")
    if is_jagged(x):
        channel_axis = opened(x, "instance_norm").channel(channel_axis)
    channels = x.shape[check_channel(channel_axis, x, "instance_norm")]
    return _group_norm(x, channels, weight, bias, eps, channel_axis, mask, "instance_norm")


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: Eps = 1e-5,
    channel_axis: int = -1,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    r"""Batch normalization: statistics over samples and positions, per channel.

    Training: ``y = (x − μ_c) / √(σ²_c + ε) · w_c + b_c`` with the batch's mean and biased variance, and the running
    buffers move: ``running ← (1 − momentum) · running + momentum · batch``, the variance unbiased
    (n / (n − 1)). Otherwise the running statistics normalise; without them, the batch's own.

    The one function here that writes to its arguments: the running buffers, in training, after everything has
        succeeded. They move by the statistics that the output was made of, which are taken once.

    Args:
        x: (N, …, C), or (N, C, …) with ``channel_axis=1``, at least two axes.
        running_mean, running_var: (C,) buffers, or None for both.
        weight, bias: (C,).
        mask: bool, x's shape without the channel axis, True = real position. Statistics count real positions only;
            masked-out positions come out as 0.
        training: use and remember the batch's statistics.
        momentum: weight of the new statistic, from 0 to 1.
        eps: 1e-5 unless given.
        channel_axis: where C is.
        process_group: take a training batch's statistics over the batches of all ranks of this group, which may differ
            in size or be empty. All must call: one all-gather of 2C + 1 numbers a rank (n, μ, M2; float64) and in the
            backward one of 2C; results and buffers have the same bits on every rank. Gradients of x are those of
            one process with all batches; gradients of weight and bias are this rank's share, as for every other layer.

    Returns:
        A tensor of x's shape and dtype. An empty batch, or one with every position masked out, gives an empty or
        zero result and leaves the buffers as they were.

    Raises:
        TypeError: no floating tensor; no bool mask; a momentum that is no number.
        ValueError: shapes that do not fit; one running buffer without the other; a momentum outside [0, 1]; batch
            statistics of a single value per channel, whose variance says nothing (the buffers stay untouched).

    Source: Ioffe and Szegedy 2015, arXiv 1502.03167; the buffers as torch.nn.BatchNorm1d.

    Example:
        >>> import torch, normkit as nk
        >>> mean, var = torch.zeros(1), torch.ones(1)
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> y = nk.batch_norm(x, mean, var, training=True, momentum=1.0)
        >>> mean, var  # the unbiased variance: 2/3 · 3/2
        (tensor([2.]), tensor([1.]))
    """
    if training:
        momentum = check_momentum(momentum, "batch_norm")
    y, found = normalize_batch(
        x, running_mean, running_var, weight, bias, mask=mask, training=training, eps=eps, channel_axis=channel_axis,
        process_group=process_group,
    )  # fmt: skip
    if found is not None and running_mean is not None and running_var is not None:
        remember(running_mean, running_var, found, momentum)
    return y


def normalize_batch(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mask: Tensor | None,
    training: bool,
    eps: Eps,
    channel_axis: int,
    process_group: ProcessGroup | None,
) -> tuple[Tensor, Found | None]:
    """Return what `batch_norm` does, and the moments to remember: None where there are none."""
    name = "batch_norm"
    check_float(x, name)
    if is_jagged(x):
        refuse_mask(x, mask, name)
        whole = opened(x, name, crossing=True)
        channel = whole.channel(channel_axis)
        wide, real = whole.together()
        y, found = normalize_batch(
            wide, running_mean, running_var, weight, bias, mask=None if real is None else real.squeeze(channel),
            training=training, eps=eps, channel_axis=channel, process_group=process_group,
        )  # fmt: skip
        return whole.joined(y.squeeze(0)), found
    channel = check_channel(channel_axis, x, name)
    number = eps_value(check_eps(eps, name), x.dtype)
    wide_mask = check_mask(mask, x, channel, name)
    w = _per_channel(weight, x, channel, name, "weight")
    b = _per_channel(bias, x, channel, name, "bias")
    mean = _per_channel(running_mean, x, channel, name, "running_mean")
    var = _per_channel(running_var, x, channel, name, "running_var")
    if (mean is None) != (var is None):
        raise ValueError(f"{name}: running_mean and running_var go together; got only one of them")
    if mean is not None and var is not None and not training:
        return ops.apply_statistics(x, mean, var, w, b, channel=channel, eps=number, mask=wide_mask), None
    refuse_invariant("the statistics are those of the batch")
    statistic = ops.Statistic(channel, x.shape[channel], False, number, wide_mask)
    if training and process_group is not None and process_group.size() > 1:
        return _over_ranks(x, w, b, statistic, process_group)
    y, found = ops.normalize(x, w, b, statistic)
    counted = _counted(x, channel, wide_mask) if found.counted is None else found.counted
    if counted == 1:
        raise _single_value(x, wide_mask, training, name)
    return y, found if training and counted else None


def _over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: ops.Statistic, group: ProcessGroup
) -> tuple[Tensor, Found | None]:
    from normkit.ops import ranks  # torch.distributed, which not every build of PyTorch has

    y, found = ranks.normalize(x, weight, bias, statistic, group)
    counted = int(found.count.max()) if found.count.numel() else 0
    if counted == 1:
        raise ValueError(
            "batch_norm: training needs more than one real (unmasked) value per channel, got one over all ranks of the "
            "process group: the variance of a single value is 0 and every output would be the bias"
        )
    return y, Found(lambda: found) if counted else None


def remember(running_mean: Tensor, running_var: Tensor, found: Found, momentum: float) -> None:
    """Blend the moments of a batch into the buffers, in place."""
    if not found.move(running_mean, running_var, momentum):
        move_running(running_mean, running_var, found.moments(), momentum)


def move_running(running_mean: Tensor, running_var: Tensor, batch: Moments, momentum: float) -> None:
    """Blend a batch's moments into the buffers, in place, rounded once to the buffers' own dtype."""
    with torch.no_grad():
        # Both are computed before either is written: what can fail fails with the buffers as they were.
        mean = _blend(running_mean, batch.mean + batch.remainder, momentum)
        var = _blend(running_var, batch.variance(unbiased=True), momentum)
        running_mean.copy_(mean)
        running_var.copy_(var)


def _blend(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    wide = torch.promote_types(old.dtype, new.dtype)
    return old.to(wide) * (1 - momentum) + new.to(wide) * momentum


def check_momentum(momentum: object, name: str) -> float:
    """Return the weight of the new statistic as a number from 0 to 1, or raise."""
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
        raise TypeError(f"{name}: momentum must be a number from 0 to 1, got {type(momentum).__name__}")
    if not 0 <= momentum <= 1:
        raise ValueError(f"{name}: momentum is the weight of the new statistic, from 0 to 1; got {momentum}")
    return float(momentum)


def _counted(x: Tensor, channel: int, mask: Tensor | None) -> int:
    """Return how many values of a channel are counted; without a mask no device is asked."""
    positions = math.prod(x.shape[:channel]) * math.prod(x.shape[channel + 1 :])
    if mask is None:
        return positions
    return int(mask.sum()) * (positions // mask.numel() if mask.numel() else 0)


def _single_value(x: Tensor, mask: Tensor | None, training: bool, name: str) -> ValueError:
    real = "" if mask is None else " real (unmasked)"
    mode = "training" if training else "without running statistics, inference"
    remedy = "running statistics with training=False (module.eval())" if training else "running statistics"
    return ValueError(
        f"{name}: {mode} needs more than one{real} value per channel, got x of shape {tuple(x.shape)}: the variance "
        f"of a single value is 0 and every output would be the bias. Use a larger batch, or {remedy}"
    )


def _per_channel(p: Tensor | None, x: Tensor, channel: int, name: str, what: str) -> Tensor | None:
    if p is not None and tuple(check_float(p, name, what).shape) != (x.shape[channel],):
        raise ValueError(
            f"{name}: {what} must have shape ({x.shape[channel]},), one number per channel of x "
            f"{tuple(x.shape)} (channel axis {channel}), got {tuple(p.shape)}"
        )
    return p


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Eps,
    channel_axis: int,
    mask: Tensor | None,
    name: str,
) -> Tensor:
    check_float(x, name)
    if is_jagged(x):
        refuse_mask(x, mask, name)
        run = partial(_group_norm, groups=groups, weight=weight, bias=bias, eps=eps, name=name)
        return over_samples(
            x, name, channel_axis, lambda padded, real, channel: run(padded, channel_axis=channel, mask=real)
        )
    channel = check_channel(channel_axis, x, name)
    channels = x.shape[channel]
    if isinstance(groups, bool) or not isinstance(groups, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: groups must be an int, got {type(groups).__name__}")
    if groups < 1 or channels % groups:
        raise ValueError(f"{name}: groups must divide the {channels} channels of x {tuple(x.shape)}, got {groups}")
    number = eps_value(check_eps(eps, name), x.dtype)
    wide_mask = check_mask(mask, x, channel, name)
    w = _per_channel(weight, x, channel, name, "weight")
    b = _per_channel(bias, x, channel, name, "bias")
    return ops.normalize(x, w, b, ops.Statistic(channel, groups, True, number, wide_mask))[0]
