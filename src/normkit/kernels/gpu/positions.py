"""Norms across positions on a GPU: tensors in, tensors out.

Forward: moments of chunks, statistics, y. Backward: sums of chunks, means, dx, and one more for γ and β where samples
have statistics of their own. A mask adds two: it is counted and listed on the device, and nobody waits for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from normkit.kernels.column_layout import Shape, flags_of, fresh_like, laid_like, movable, shape_of, strides_of
from normkit.kernels.contract import Found
from normkit.kernels.gpu import column_launches as launches
from normkit.kernels.gpu.column_launches import Layout
from normkit.kernels.statistics import Moments


@dataclass(frozen=True)
class Valid:
    """Which positions count. On the device: a byte a position, how many count up to each, and their numbers."""

    flags: Tensor
    ranks: Tensor
    listed: Tensor


@dataclass(frozen=True)
class Plan:
    """How a call is computed, forward and backward.

    Args:
        channel: the channel axis.
        layout: how x lies and what shares statistics.
        valid: which positions count; None for all.
    """

    channel: int
    layout: Layout
    valid: Valid | None

    def sizes(self, device: torch.device) -> Tensor:
        """Return the number of elements behind each segment's statistics, int64."""
        layout, shape = self.layout, self.layout.shape
        if self.valid is None:
            each = shape.length if layout.per_sample else shape.positions
            return torch.full((layout.segments,), each * layout.depth, dtype=torch.int64, device=device)
        return self.valid.flags.view(layout.segments, -1).sum(1) * layout.depth


def _valid(x: Tensor, channel: int, shape: Shape, mask: Tensor) -> Valid:
    flags = flags_of(x, channel, shape, mask).view(torch.uint8)
    ranks = flags.view(-1).cumsum(0, dtype=torch.int32)
    listed = torch.empty_like(ranks)
    launches.list_valid(shape.positions)((flags, ranks, listed))
    return Valid(flags, ranks, listed)


def plan_of(x: Tensor, channel: int, groups: int, per_sample: bool, mask: Tensor | None) -> Plan:
    """Return how to compute a call."""
    shape = shape_of(x, channel, per_sample)
    assert shape is not None, "refuses() let through what has no layout"
    valid = None if mask is None else _valid(x, channel, shape, mask)
    return Plan(channel, Layout(shape, shape.channels // groups, per_sample, valid is not None), valid)


def _steps(plan: Plan, *tensors: Tensor) -> list[int]:
    found = [strides_of(t, plan.channel, plan.layout.shape) for t in tensors]
    assert None not in found, "what comes from outside was checked, the rest is laid out like x"
    return [s for steps in found if steps is not None for s in steps]


def _row(p: Tensor | None) -> Tensor | None:
    """Return a parameter of one value a channel as they lie side by side."""
    return None if p is None else p.contiguous()


def _lists(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (list, ranks); x stands in where there are none, and is not read."""
    return (x, x) if plan.valid is None else (plan.valid.listed, plan.valid.ranks)


def _statistics(plan: Plan, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the table (segments, 4, groups) of mean, remainder, rstd and scale, and Σ(x − mean)² at that scale."""
    layout, device = plan.layout, x.device
    setting, segments, groups = launches.moments_setting(layout), layout.segments, layout.groups
    parts = torch.empty(segments, setting.bound, setting.blocks, 4, groups, dtype=torch.float32, device=device)
    listed, ranks = _lists(plan, x)
    launches.chunk_moments(layout)((x, listed, ranks, parts), eps, math.sqrt(eps), *_steps(plan, x))
    table = torch.empty(segments, 4, groups, dtype=torch.float32, device=device)
    squares = torch.empty(segments, groups, dtype=torch.float32, device=device)
    launches.join_moments(layout)((parts, ranks, table, squares), eps, math.sqrt(eps))
    return table, squares


def _apply(plan: Plan, x: Tensor, table: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x̂·γ + β, laid out as the plan says."""
    y, weight, bias = fresh_like(x, plan.channel, plan.layout.shape), _row(weight), _row(bias)
    given = [x if t is None else t for t in (weight, bias)]
    flags = x if plan.valid is None else plan.valid.flags
    run = launches.apply(plan.layout, weight is not None, bias is not None)
    run((x, *given, y, flags, table), *_steps(plan, x, y))
    return y


def _chunk_sums(
    plan: Plan, x: Tensor, dy: Tensor, weight: Tensor | None, table: Tensor, each: bool, joint: bool
) -> tuple[Tensor, Tensor]:
    """Return the chunks' sums of each channel and of groups, either of them only where wanted."""
    layout, device = plan.layout, x.device
    setting = launches.gradient_setting(layout)
    rows, channels = layout.segments * setting.bound, layout.shape.channels
    per_channel = torch.empty(rows if each else 0, 2, channels, dtype=torch.float32, device=device)
    joined = rows * setting.blocks if joint else 0
    per_group = torch.empty(joined, 2, layout.groups, dtype=torch.float32, device=device)
    given = (x, dy, x if weight is None else weight, *_lists(plan, x), table, per_channel, per_group)
    launches.chunk_sums(layout, weight is not None, each, joint)(given, *_steps(plan, x, dy))
    return per_channel, per_group


def _means(plan: Plan, x: Tensor, parts: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each segment's sums and means (segments, 2, groups); ``weight`` is γ where the parts lack it."""
    layout = plan.layout
    sums = torch.empty(layout.segments, 2, layout.groups, dtype=torch.float32, device=x.device)
    means, ranks = torch.empty_like(sums), _lists(plan, x)[1]
    run = launches.join_means(layout, weight is not None)
    run((parts, ranks, x if weight is None else weight, sums, means))
    return sums, means


def _over_segments(plan: Plan, x: Tensor, parts: Tensor) -> Tensor:
    """Return the sums (2, channels) over the chunks of all segments."""
    sums = torch.empty(2, plan.layout.shape.channels, dtype=torch.float32, device=x.device)
    launches.join_channels(plan.layout)((parts, _lists(plan, x)[1], sums))
    return sums


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    channel: int,
    groups: int,
    per_sample: bool,
    eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Plan, Found]:
    """Return y, the table of statistics, the plan, and the moments behind them, in float64."""
    plan = plan_of(x, channel, groups, per_sample, mask)
    table, squares = _statistics(plan, x, eps)
    moments = partial(_as_moments, table, squares, plan, torch.float64)
    found = Found(moments, partial(_move, table, squares, plan))
    return _apply(plan, x, table, weight, bias), table, plan, found


def _move(table: Tensor, squares: Tensor, plan: Plan, mean: Tensor, var: Tensor, momentum: float) -> bool:
    if not movable(mean, var, table.device):
        return False
    (bits,) = struct.unpack("q", struct.pack("d", momentum))
    launches.remember(plan.layout)((table, squares, _lists(plan, table)[1], mean, var), bits)
    increment_version((mean, var))
    return True


def _as_moments(table: Tensor, squares: Tensor, plan: Plan, dtype: torch.dtype) -> Moments:
    """Return them at their own scale, without an axis of segments where all samples share one."""
    mean, remainder, _, scale = table.double().unbind(1)
    count = plan.sizes(table.device).unsqueeze(1).expand_as(mean).clone()
    found = (count, *(t.to(dtype) for t in (mean / scale, squares.double() / scale**2, remainder / scale)))
    return Moments(*found) if plan.layout.per_sample else Moments(*(t[0] for t in found))


def moments(x: Tensor, *, channel: int, per_sample: bool, mask: Tensor | None) -> Moments:
    """Return the moments of every channel, or sample and channel, in float32; a sum beyond its range is inf."""
    plan = plan_of(x, channel, x.shape[channel], per_sample, mask)
    return _as_moments(*_statistics(plan, x, 1.0), plan, torch.float32)


def backward(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    table: Tensor,
    plan: Plan,
    *,
    wanted: tuple[bool, bool, bool],
    total: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dw, db) with dw and db of shape (C,) in float32, None where not wanted.

    ``total`` turns sums over these values into means over all that share the statistics, where others hold some.
    """
    layout, weight = plan.layout, _row(weight)
    dy, alone = laid_like(dy, x, plan.channel, layout.shape), layout.depth == 1
    each, dx, dw, db = alone or wanted[1] or wanted[2], None, None, None
    joint = wanted[0] and not alone
    per_channel, per_group = _chunk_sums(plan, x, dy, weight, table, each, joint)
    sums = None
    if wanted[0]:
        sums, means = _means(plan, x, per_channel if alone else per_group, weight if alone else None)
        if total is not None:
            means = total(sums) * (1.0 if weight is None else weight.reshape(-1))
        dx = _gradient(plan, x, dy, weight, table, means)
    if wanted[1] or wanted[2]:
        single = sums is not None and alone and layout.segments == 1
        db, dw = sums[0] if sums is not None and single else _over_segments(plan, x, per_channel)
    return dx, dw if wanted[1] else None, db if wanted[2] else None


def _gradient(plan: Plan, x: Tensor, dy: Tensor, weight: Tensor | None, table: Tensor, means: Tensor) -> Tensor:
    dx = fresh_like(x, plan.channel, plan.layout.shape)
    flags = x if plan.valid is None else plan.valid.flags
    given = (x, dy, x if weight is None else weight, dx, flags, table, means)
    launches.gradient(plan.layout, weight is not None)(given, *_steps(plan, x, dy, dx))
    return dx


def apply(
    x: Tensor,
    table: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    channel: int,
    mask: Tensor | None,
) -> tuple[Tensor, Plan]:
    """Normalise with statistics given as a table (1, 4, C)."""
    plan = plan_of(x, channel, x.shape[channel], False, mask)
    return _apply(plan, x, table, weight, bias), plan


def apply_backward(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    table: Tensor,
    plan: Plan,
    *,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `backward`, of statistics that x did not make."""
    dy, dx, dw, db = laid_like(dy, x, plan.channel, plan.layout.shape), None, None, None
    if wanted[0]:  # dy·rstd·γ: what the forward does to a mean of 0
        plain = table.clone()
        plain[:, :2] = 0.0
        dx = _apply(plan, dy, plain, weight, None)
    if wanted[1] or wanted[2]:
        per_channel, _ = _chunk_sums(plan, x, dy, None, table, True, False)
        db, dw = _over_segments(plan, x, per_channel)
    return dx, dw if wanted[1] else None, db if wanted[2] else None
