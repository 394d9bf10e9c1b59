"""Norms across positions on the CPU: tensors in, tensors out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from normkit.kernels.column_layout import fresh_like, laid_like, movable
from normkit.kernels.contract import Columns, Found
from normkit.kernels.cpu.chunks import even_chunks
from normkit.kernels.cpu.column_launch import (
    Plan,
    folded,
    joined_moments,
    joined_sums,
    merged,
    plan_of,
    remembered,
    run,
)
from normkit.kernels.cpu.rows import at
from normkit.kernels.statistics import Moments, rescaled_epsilon, rescaling

_STEEPEST, _FLATTEST = 2.0**40, 2.0**-60  # 1/√ of what merges.py flags


class _Statistics(NamedTuple):
    """What a forward found out.

    Args:
        room, moments: memory, and where in it (segments, 3, C) lies: mean, remainder, Σ(x − mean)² of every channel.
        table: (segments, 4, C): mean, remainder, rstd, and what x was multiplied by.
        scales: that last row, or None where all of it is 1.
    """

    room: Tensor
    moments: int
    table: Tensor
    scales: Tensor | None


def _statistics(plan: Plan, x: Tensor, eps: float) -> _Statistics:
    room, moments = joined_moments(plan, x, 0)
    table, extreme = _table(plan, moments, eps, None, None)
    if extreme:
        scales = _scales(plan, x, table, eps)
        if bool((scales != 1).any()):
            room, moments = joined_moments(plan, x, scales.data_ptr())
            table, _ = _table(plan, moments, eps, scales, rescaled_epsilon(eps, scales))
            return _Statistics(room, moments, table, scales)
    return _Statistics(room, moments, table, None)


def _table(plan: Plan, moments: int, eps: float, scales: Tensor | None, epsilons: Tensor | None) -> tuple[Tensor, bool]:
    """Return the table of statistics, and whether something in it left its range."""
    segments, width, flag = plan.segments, plan.shape.channels, ctypes.c_float()
    table = torch.empty(segments, 4, width, dtype=torch.float32)
    merged(
        "statistics", segments, width, moments, plan.valid.chunks.sizes.data_ptr(), table.data_ptr(),
        work=segments * 3 * width, depth=plan.depth, scales=at(scales), epsilons=at(epsilons),
        flag=ctypes.addressof(flag), eps=eps,
    )  # fmt: skip
    return table, flag.value != 0


def _scales(plan: Plan, x: Tensor, table: Tensor, eps: float) -> Tensor:
    """Return the powers of two, (segments, C), that bring extreme statistics into range; 1 for all others."""
    channel = plan.channel
    if plan.valid.flags is not None:
        shape = [1 if a == channel else n for a, n in enumerate(x.shape)]
        x = torch.where(plan.valid.flags.view(shape), x, torch.zeros((), dtype=x.dtype))
    axes = [a for a in range(x.dim()) if a != channel and not (plan.per_sample and a == 0)]
    peak = torch.linalg.vector_norm(x.detach(), torch.inf, axes, dtype=torch.float32)
    groups = peak.view(-1, plan.shape.channels // plan.depth, plan.depth)
    scale = rescaling(groups, (2,), eps**0.5)
    # Only what left the range is scaled, so that no statistic's bits depend on another's.
    rstd = table[:, 2].reshape(groups.shape)
    inside = (rstd < _STEEPEST) & (rstd > _FLATTEST)
    return torch.where(inside, torch.ones_like(groups), scale.expand_as(groups)).reshape(len(table), -1)


@lru_cache(maxsize=16)
def _resting(value: float, channels: int) -> Tensor:
    return torch.full((channels,), value, dtype=torch.float32, device="cpu")


def _row(p: Tensor | None, resting: float, channels: int) -> Tensor:
    """Return a parameter of one value a channel in float32, in place where it can be."""
    if p is None:
        return _resting(resting, channels)
    if p.dtype == torch.float32 and p.is_contiguous():
        return p
    return p.detach().reshape(-1).float().contiguous()


def _applied(plan: Plan, x: Tensor, table: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x̂·γ + β, laid out as the plan says."""
    channels, y = plan.shape.channels, fresh_like(x, plan.channel, plan.shape)
    w, b = _row(weight, 1.0, channels), _row(bias, 0.0, channels)
    run(plan, "apply", x, out=y, table=table.data_ptr(), weight=w.data_ptr(), bias=b.data_ptr())
    return y


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
    """Return y, the table of statistics, the plan, and the moments of every segment and channel."""
    plan = plan_of(x, channel, groups, per_sample, mask)
    found = _statistics(plan, x, eps)
    y = _applied(plan, x, found.table, weight, bias)
    moments = partial(_as_moments, found.room, found.scales, plan)
    counted = None if per_sample else plan.valid.count
    return y, found.table, plan, Found(moments, partial(_move, found, plan), counted)


def _move(found: _Statistics, plan: Plan, mean: Tensor, var: Tensor, momentum: float) -> bool:
    if found.scales is not None or not movable(mean, var, found.table.device):
        return False
    remembered(found.moments, plan.valid.count, mean, var, momentum)
    increment_version((mean, var))
    return True


def _as_moments(room: Tensor, scales: Tensor | None, plan: Plan) -> Moments:
    """Return what lies at the end of ``room``, without an axis of segments where all samples share one."""
    segments, channels = plan.segments, plan.shape.channels
    # Copied: a view would keep the parts of all chunks alive as long as the moments.
    moments = room[len(room) - segments * 3 * channels :].clone().view(segments, 3, channels)
    sizes = plan.valid.chunks.sizes  # kept for other calls, therefore copied
    if plan.per_sample:
        sizes = sizes.unsqueeze(1)
    else:
        moments, scales = moments[0], None if scales is None else scales[0]
    mean, remainder, square = moments.unbind(-2)
    count = sizes.expand_as(mean).clone()
    if scales is not None:  # in float64, which holds the squares that float32 could not
        mean, remainder, square = mean.double() / scales, remainder.double() / scales, square / scales.double() ** 2
    return Moments(count, mean, square, remainder)


def moments(x: Tensor, *, channel: int, per_sample: bool, mask: Tensor | None) -> Moments:
    """Return the moments of every channel, or sample and channel; what leaves float32's range is inf."""
    plan = plan_of(x, channel, x.shape[channel], per_sample, mask)
    room, _ = joined_moments(plan, x, 0)
    return _as_moments(room, None, plan)


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
    dy, channels = laid_like(dy, x, plan.channel, plan.shape), plan.shape.channels
    sums, dx, dw, db = joined_sums(plan, x, dy, table.data_ptr()), None, None, None
    if wanted[0]:
        w = _row(weight, 1.0, channels)
        if total is None:
            means, segments = torch.empty_like(sums), plan.segments
            merged(
                "weigh", segments, channels, sums.data_ptr(), plan.valid.chunks.sizes.data_ptr(), means.data_ptr(),
                work=segments * 2 * channels, depth=plan.depth, weight=w.data_ptr(),
            )  # fmt: skip
        else:
            means = total(sums) * w.detach().view(-1)
        dx = fresh_like(x, plan.channel, plan.shape)
        run(plan, "gradient", x, out=dx, dy=dy, table=table.data_ptr(), weight=w.data_ptr(), sums=means.data_ptr())
    if wanted[1] or wanted[2]:
        db, dw = _over_segments(sums)
    return dx, dw if wanted[1] else None, db if wanted[2] else None


def _over_segments(sums: Tensor) -> Tensor:
    """Add up (segments, 2, C), level by level."""
    for bounds in even_chunks(len(sums), 1, 1, True).levels:
        out = torch.empty(len(bounds) - 1, *sums.shape[1:], dtype=torch.float32)
        folded(sums.data_ptr(), out.data_ptr(), bounds, len(sums), len(out), 2 * sums.shape[2])
        sums = out
    return sums[0]


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
    return _applied(plan, x, table, weight, bias), plan


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
    dy, dx, dw, db = laid_like(dy, x, plan.channel, plan.shape), None, None, None
    if wanted[0]:  # dy·rstd·γ: what the forward does to a mean of 0
        plain = table.clone()
        plain[:, :2] = 0.0
        dx = _applied(plan, dy, plain, weight, None)
    if wanted[1] or wanted[2]:
        db, dw = joined_sums(plan, x, dy, table.data_ptr())[0]
    return dx, dw if wanted[1] else None, db if wanted[2] else None


COLUMNS = Columns(forward, backward, apply, apply_backward, moments)
