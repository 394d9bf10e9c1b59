"""Norms across positions on a GPU: tensors in, tensors out.

Forward: moments of chunks, statistics, y. Backward: sums of chunks, means, dx, and one more for γ and β where samples
have statistics of their own. A mask adds two: it is counted and listed on the device, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.column_layout import Shape, flags_of, fresh_like, laid_like, shape_of, strides_of
from normkit.kernels.contract import Found
from normkit.kernels.gpu import chunks, column_settings, column_sums, columns
from normkit.kernels.gpu import moments as statistics
from normkit.kernels.gpu.column_settings import Setting
from normkit.kernels.gpu.launch import Launcher
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
        shape: how x lies.
        valid: which positions count; None for all.
        per_sample: whether a sample's statistics are its own.
        depth: channels that share a statistic.
    """

    channel: int
    shape: Shape
    valid: Valid | None
    per_sample: bool
    depth: int

    @property
    def segments(self) -> int:
        """Return how many sets of positions have statistics."""
        return self.shape.samples if self.per_sample else 1

    @property
    def groups(self) -> int:
        """Return how many statistics a segment has."""
        return self.shape.channels // self.depth

    def sizes(self, device: torch.device) -> Tensor:
        """Return the number of elements behind each segment's statistics, int64."""
        if self.valid is None:
            each = self.shape.length if self.per_sample else self.shape.positions
            return torch.full((self.segments,), each * self.depth, dtype=torch.int64, device=device)
        return self.valid.flags.view(self.segments, -1).sum(1) * self.depth


_launchers: dict[Any, Launcher] = {}


def _launcher(kernel: Any, warps: int, **constants: Any) -> Launcher:
    key = (kernel, warps, *constants.values())
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = Launcher(kernel, constants, warps)
    return found


def _valid(x: Tensor, channel: int, shape: Shape, mask: Tensor) -> Valid:
    flags = flags_of(x, channel, shape, mask).view(torch.uint8)
    ranks = flags.view(-1).cumsum(0, dtype=torch.int32)
    listed = torch.empty_like(ranks)
    grid = (-(-shape.positions // column_settings.LISTED), 1, 1)
    run = _launcher(chunks.list_valid, 4, B=column_settings.LISTED)
    run(grid, (flags, ranks, listed, shape.positions), x.device)
    return Valid(flags, ranks, listed)


def plan_of(x: Tensor, channel: int, groups: int, per_sample: bool, mask: Tensor | None) -> Plan:
    """Return how to compute a call."""
    shape = shape_of(x, channel, per_sample)
    assert shape is not None, "refuses() let through what has no layout"
    valid = None if mask is None else _valid(x, channel, shape, mask)
    return Plan(channel, shape, valid, per_sample, shape.channels // groups)


def _steps(plan: Plan, *tensors: Tensor) -> list[int]:
    found = [strides_of(t, plan.channel, plan.shape) for t in tensors]
    assert None not in found, "what comes from outside was checked, the rest is laid out like x"
    return [s for steps in found if steps is not None for s in steps]


def _row(p: Tensor | None) -> Tensor | None:
    """Return a parameter of one value a channel as they lie side by side."""
    return None if p is None else p.detach().reshape(-1).contiguous()


def _lists(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (list, ranks); x stands in where there are none, and is not read."""
    return (x, x) if plan.valid is None else (plan.valid.listed, plan.valid.ranks)


def _tiled(plan: Plan, setting: Setting) -> dict[str, Any]:
    """Return the constants of kernels that sum chunks."""
    constants: dict[str, Any] = {"K": setting.k, "C": setting.c, "D": setting.d, "BLOCKS": setting.blocks}
    return constants | _kinds(plan)


def _kinds(plan: Plan) -> dict[str, Any]:
    return {"LISTED": plan.valid is not None, "PER": plan.per_sample}


def _chunk_grid(plan: Plan, setting: Setting) -> tuple[int, int, int]:
    across = -(-plan.groups // (setting.c // setting.d)) * setting.blocks
    return across * setting.bound * plan.segments, 1, 1


def _statistics(plan: Plan, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the table (segments, 4, groups) of mean, remainder, rstd and scale, and Σ(x − mean)² at that scale."""
    shape, device = plan.shape, x.device
    setting = column_settings.sums_setting(
        shape, plan.depth, plan.per_sample, column_settings.MOMENTS_TILE, column_settings.MOMENTS_WARPS
    )
    segments, groups = plan.segments, plan.groups
    parts = torch.empty(segments, setting.bound, setting.blocks, 4, groups, dtype=torch.float32, device=device)
    listed, ranks = _lists(plan, x)
    sizes = [shape.length, shape.positions, groups, plan.depth, setting.bound, setting.limit, eps, math.sqrt(eps)]
    run = _launcher(statistics.chunk_moments, setting.warps, **_tiled(plan, setting))
    run(_chunk_grid(plan, setting), [x, listed, ranks, parts, *sizes, *_steps(plan, x)], device)
    table = torch.empty(segments, 4, groups, dtype=torch.float32, device=device)
    squares = torch.empty(segments, groups, dtype=torch.float32, device=device)
    p = setting.parts
    g = max(1, min(column_settings.JOINED // p, column_settings.power_of_two(groups)))
    constants: dict[str, Any] = {"K": setting.k, "D": setting.d, "BLOCKS": setting.blocks, "P": p, "G": g}
    run = _launcher(statistics.join_moments, 4, **constants, **_kinds(plan))
    run((-(-groups // g) * segments, 1, 1), [parts, ranks, table, squares, *sizes], device)
    return table, squares


def _apply(plan: Plan, x: Tensor, table: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x̂·γ + β, laid out as the plan says."""
    shape, y = plan.shape, fresh_like(x, plan.channel, plan.shape)
    weight, bias = _row(weight), _row(bias)
    grid, constants = _tiles(plan, column_settings.APPLY_TILE)
    constants |= {"HAS_W": weight is not None, "HAS_B": bias is not None}
    run = _launcher(columns.apply, column_settings.APPLY_WARPS, **constants)
    given = [x if t is None else t for t in (weight, bias)]
    flags = x if plan.valid is None else plan.valid.flags
    sizes = [shape.length, shape.positions, shape.channels, plan.groups, plan.depth]
    run(grid, [x, *given, y, flags, table, *sizes, *_steps(plan, x, y)], x.device)
    return y


def _tiles(plan: Plan, elements: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid and the constants of kernels that write element by element."""
    shape = plan.shape
    k, c = column_settings.apply_tile(shape, plan.per_sample, elements)
    along = -(-shape.length // k) * shape.samples if plan.per_sample else -(-shape.positions // k)
    constants: dict[str, Any] = {"K": k, "C": c, "MASKED": plan.valid is not None, "PER": plan.per_sample}
    return (along * -(-shape.channels // c), 1, 1), constants


def _chunk_sums(
    plan: Plan, setting: Setting, x: Tensor, dy: Tensor, weight: Tensor | None, table: Tensor, each: bool, joint: bool
) -> tuple[Tensor, Tensor]:
    """Return the chunks' sums of each channel and of groups, either of them only where wanted."""
    shape, device = plan.shape, x.device
    rows = plan.segments * setting.bound
    per_channel = torch.empty(rows if each else 0, 2, shape.channels, dtype=torch.float32, device=device)
    per_group = torch.empty(rows * setting.blocks if joint else 0, 2, plan.groups, dtype=torch.float32, device=device)
    constants = _tiled(plan, setting) | {"HAS_W": weight is not None and joint, "CHANNELS": each, "GROUPS": joint}
    run = _launcher(column_sums.chunk_sums, setting.warps, **constants)
    listed, ranks = _lists(plan, x)
    sizes = [shape.length, shape.positions, plan.groups, plan.depth, setting.bound, setting.limit]
    given = [x, dy, x if weight is None else weight, listed, ranks, table, per_channel, per_group]
    run(_chunk_grid(plan, setting), [*given, *sizes, *_steps(plan, x, dy)], device)
    return per_channel, per_group


def _means(plan: Plan, setting: Setting, x: Tensor, parts: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each segment's sums and means (segments, 2, groups); ``weight`` is γ where the parts lack it."""
    width, blocks = 2 * plan.groups, setting.blocks
    sums = torch.empty(plan.segments, 2, plan.groups, dtype=torch.float32, device=x.device)
    means, p = torch.empty_like(sums), setting.parts
    g = max(1, min(column_settings.SUMMED // p, column_settings.power_of_two(width)))
    constants: dict[str, Any] = {"K": setting.k, "BLOCKS": blocks, "P": p, "G": g}
    run = _launcher(column_sums.join_means, 4, **constants, **_kinds(plan), WEIGH=weight is not None)
    sizes = [plan.shape.length, plan.shape.positions, plan.groups, plan.depth, setting.bound, setting.limit]
    given = [parts, _lists(plan, x)[1], x if weight is None else weight, sums, means]
    run((-(-width // g) * plan.segments, 1, 1), [*given, *sizes], x.device)
    return sums, means


def _over_segments(plan: Plan, setting: Setting, x: Tensor, parts: Tensor) -> Tensor:
    """Return the sums (2, channels) over the chunks of all segments."""
    width = 2 * plan.shape.channels
    sums = torch.empty(2, plan.shape.channels, dtype=torch.float32, device=x.device)
    segments, p = column_settings.SEGMENTS, column_settings.power_of_two(setting.bound)
    r = max(1, min(segments, 1024 // p))
    g = max(1, min(column_settings.SUMMED // (p * r), column_settings.power_of_two(width)))
    run = _launcher(column_sums.join_channels, 8, K=setting.k, P=p, R=r, S=segments, G=g, **_kinds(plan))
    sizes = [plan.segments, plan.shape.length, plan.shape.positions, width, setting.bound, setting.limit]
    run((-(-width // g), 1, 1), [parts, _lists(plan, x)[1], sums, *sizes], x.device)
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
    found = Found(lambda: _as_moments(table, squares, plan, torch.float64))
    return _apply(plan, x, table, weight, bias), table, plan, found


def _as_moments(table: Tensor, squares: Tensor, plan: Plan, dtype: torch.dtype) -> Moments:
    """Return them at their own scale, without an axis of segments where all samples share one."""
    mean, remainder, _, scale = table.double().unbind(1)
    count = plan.sizes(table.device).unsqueeze(1).expand_as(mean).clone()
    found = (count, *(t.to(dtype) for t in (mean / scale, squares.double() / scale**2, remainder / scale)))
    return Moments(*found) if plan.per_sample else Moments(*(t[0] for t in found))


def moments(x: Tensor, *, channel: int, per_sample: bool, mask: Tensor | None) -> Moments:
    """Return the moments of every channel, or sample and channel, in float32; a sum beyond its range is inf."""
    plan = plan_of(x, channel, x.shape[channel], per_sample, mask)
    return _as_moments(*_statistics(plan, x, 1.0), plan, torch.float32)


def _backward_setting(plan: Plan) -> Setting:
    return column_settings.sums_setting(
        plan.shape, plan.depth, plan.per_sample, column_settings.GRADIENT_TILE, column_settings.GRADIENT_WARPS
    )


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
    dy, weight = laid_like(dy, x, plan.channel, plan.shape), _row(weight)
    setting, alone = _backward_setting(plan), plan.depth == 1
    each, dx, dw, db = alone or wanted[1] or wanted[2], None, None, None
    joint = wanted[0] and not alone
    per_channel, per_group = _chunk_sums(plan, setting, x, dy, weight, table, each, joint)
    sums = None
    if wanted[0]:
        sums, means = _means(plan, setting, x, per_channel if alone else per_group, weight if alone else None)
        if total is not None:
            means = total(sums) * (1.0 if weight is None else weight)
        dx = _gradient(plan, x, dy, weight, table, means)
    if wanted[1] or wanted[2]:
        single = sums is not None and alone and plan.segments == 1
        db, dw = sums[0] if sums is not None and single else _over_segments(plan, setting, x, per_channel)
    return dx, dw if wanted[1] else None, db if wanted[2] else None


def _gradient(plan: Plan, x: Tensor, dy: Tensor, weight: Tensor | None, table: Tensor, means: Tensor) -> Tensor:
    shape, dx = plan.shape, fresh_like(x, plan.channel, plan.shape)
    grid, constants = _tiles(plan, column_settings.APPLY_TILE)
    run = _launcher(columns.gradient, column_settings.APPLY_WARPS, **constants, HAS_W=weight is not None)
    flags = x if plan.valid is None else plan.valid.flags
    sizes = [shape.length, shape.positions, shape.channels, plan.groups, plan.depth]
    given = [x, dy, x if weight is None else weight, dx, flags, table, means]
    run(grid, [*given, *sizes, *_steps(plan, x, dy, dx)], x.device)
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
    dy, dx, dw, db = laid_like(dy, x, plan.channel, plan.shape), None, None, None
    if wanted[0]:  # dy·rstd·γ: what the forward does to a mean of 0
        plain = table.clone()
        plain[:, :2] = 0.0
        dx = _apply(plan, dy, plain, weight, None)
    if wanted[1] or wanted[2]:
        setting = _backward_setting(plan)
        per_channel, _ = _chunk_sums(plan, setting, x, dy, None, table, True, False)
        db, dw = _over_segments(plan, setting, x, per_channel)
    return dx, dw if wanted[1] else None, db if wanted[2] else None
