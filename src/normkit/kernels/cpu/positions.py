"""Launching the column kernels: how a call's positions lie, and tensors in, tensors out.

Two layouts, each with kernels of its own: channels side by side (columns.py) and positions side by side (runs.py).
Which of them a tensor has decides the order of sums; its other strides do not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.column_layout import Shape, fresh_like, laid_like, shape_of, strides_of
from normkit.kernels.contract import Columns
from normkit.kernels.cpu import pool
from normkit.kernels.cpu.chunks import RUN, Valid, even_chunks, valid_positions
from normkit.kernels.cpu.rows import NAMES, Code, code_of
from normkit.kernels.statistics import Moments, rescaled_epsilon, rescaling

_COLUMN = struct.Struct("28q")
_MERGE = struct.Struct("13qdq")
_BLOCK = 512  # channels a task, as columns.py has it, which only compiling imports
_STEEPEST, _FLATTEST = 2.0**40, 2.0**-60  # 1/√ of what merges.py flags


@dataclass(frozen=True)
class Plan:
    """How a call is computed, forward and backward.

    Args:
        channel: the channel axis.
        shape: how x lies.
        valid: which positions count.
        per_sample: whether a sample's statistics are its own.
        depth: channels that share a statistic.
    """

    channel: int
    shape: Shape
    valid: Valid
    per_sample: bool
    depth: int


_codes: dict[tuple[str, str], Code] = {}


def _code(kind: str, dtype: torch.dtype | None = None) -> Code:
    """Return a compiled kernel, e.g. "columns apply" for a dtype, or one of merges.py."""
    name = "" if dtype is None else NAMES[dtype]
    code = _codes.get((kind, name))
    if code is None:

        def make() -> Callable[[Any], None]:
            from importlib import import_module

            from normkit.kernels.cpu.tags import Tag

            module, function = kind.split()
            made: Any = getattr(import_module(f"normkit.kernels.cpu.{module}"), f"{function}_kernel")
            return made(Tag(name)) if name else made()  # type: ignore[no-any-return]

        code = _codes[kind, name] = code_of(f"{kind} {name}", make)
    return code


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


_MODULES = {
    (False, "moments"): "columns",
    (False, "apply"): "columns",
    (False, "sums"): "column_backward",
    (False, "gradient"): "column_backward",
    **{(True, kernel): "runs" for kernel in ("moments", "apply", "sums", "gradient")},
}


def _run(
    plan: Plan,
    kernel: str,
    x: Tensor,
    *,
    out: Tensor | None = None,
    dy: Tensor | None = None,
    parts: Tensor | None = None,
    scales: Tensor | None = None,
    table: Tensor | None = None,
    gains: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Run a kernel over all its tasks."""
    shape, chunks = plan.shape, plan.valid.chunks
    if kernel in ("moments", "sums"):
        across = shape.channels if shape.runs else -(-shape.channels // _BLOCK)
        tasks = len(chunks.begins) * across
    else:
        tasks = shape.samples * shape.channels if shape.runs else shape.positions
    if tasks == 0:
        return
    threads = min(pool.threads_for(x.numel()), tasks)
    room = None
    if shape.runs and plan.valid.listed is not None:
        room = torch.empty(threads * 2 * RUN, dtype=torch.float32)
    tail: list[int] = []
    for t in (x, out, dy):
        steps = (0, 0, 0) if t is None else strides_of(t, plan.channel, shape)
        assert steps is not None, "what comes from outside was checked, the rest is laid out like x"
        tail += [_at(t), *(s * x.element_size() for s in steps)]

    def block(counter: int, piece: int) -> bytes:
        return _COLUMN.pack(
            counter, tasks, piece, shape.channels, shape.length, _at(plan.valid.listed), _at(chunks.begins),
            _at(chunks.counts), _at(parts), _at(scales), _at(table), _at(gains), _at(sums), _at(plan.valid.flags),
            int(plan.per_sample), _at(room), *tail,
        )  # fmt: skip

    _code(_MODULES[shape.runs, kernel] + " " + kernel, x.dtype).run(block, threads, tasks)


def _merged(
    kernel: str,
    tasks: int,
    width: int,
    parts: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    bounds: Tensor | None = None,
    out_counts: Tensor | None = None,
    depth: int = 1,
    scales: Tensor | None = None,
    epsilons: Tensor | None = None,
    flag: Tensor | None = None,
    eps: float = 0.0,
    gains: Tensor | None = None,
) -> None:
    """Run a kernel of merges.py."""
    threads = min(pool.threads_for(parts.numel()), tasks)

    def block(counter: int, piece: int) -> bytes:
        return _MERGE.pack(
            counter, tasks, piece, width, _at(parts), _at(counts), _at(bounds), _at(out), _at(out_counts), depth,
            _at(scales), _at(epsilons), _at(flag), eps, _at(gains),
        )  # fmt: skip

    _code(f"merges {kernel}").run(block, threads, tasks)


def _moments(plan: Plan, x: Tensor, scales: Tensor | None) -> Tensor:
    """Return (segments, 3, C): mean, remainder, Σ(x − mean)² of every channel."""
    chunks, width = plan.valid.chunks, plan.shape.channels
    parts = torch.empty(len(chunks.begins), 3, width, dtype=torch.float32)
    _run(plan, "moments", x, parts=parts, scales=scales)
    counts = chunks.counts
    for bounds in chunks.levels:
        results = len(bounds) - 1
        joined = torch.empty(results, 3, width, dtype=torch.float32)
        joined_counts = torch.empty(results, dtype=torch.int64)
        tasks = results * -(-width // 16)
        _merged("merge", tasks, width, parts, counts, joined, bounds=bounds, out_counts=joined_counts)
        parts, counts = joined, joined_counts
    return parts


def _sums(plan: Plan, x: Tensor, dy: Tensor, table: Tensor) -> Tensor:
    """Return (segments, 2, C): Σ dy and Σ dy·x̂ of every channel."""
    chunks = plan.valid.chunks
    parts = torch.empty(len(chunks.begins), 2, plan.shape.channels, dtype=torch.float32)
    _run(plan, "sums", x, dy=dy, parts=parts, table=table)
    return _folded(parts, chunks.levels)


def _folded(parts: Tensor, levels: tuple[Tensor, ...]) -> Tensor:
    """Add up the rows of each segment, level by level."""
    width = parts.shape[1] * parts.shape[2]
    for bounds in levels:
        results = len(bounds) - 1
        out = torch.empty(results, *parts.shape[1:], dtype=torch.float32)
        _merged("fold", results * -(-width // 16), width, parts, parts, out, bounds=bounds)
        parts = out
    return parts


def _statistics(plan: Plan, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the moments (segments, 3, C), and (segments, 4, C): mean, remainder, rstd, and what x is multiplied by."""
    sizes, width = plan.valid.chunks.sizes, plan.shape.channels
    segments = len(sizes)

    def table_of(moments: Tensor, scales: Tensor | None, epsilons: Tensor | None) -> tuple[Tensor, bool]:
        table, flag = torch.empty(segments, 4, width, dtype=torch.float32), torch.zeros(1, dtype=torch.float32)
        _merged(
            "statistics", segments, width, moments, sizes, table,
            depth=plan.depth, scales=scales, epsilons=epsilons, flag=flag, eps=eps,
        )  # fmt: skip
        return table, bool(flag)

    moments = _moments(plan, x, None)
    table, extreme = table_of(moments, None, None)
    if extreme:
        scales = _scales(plan, x, table, eps)
        if bool((scales != 1).any()):
            moments = _moments(plan, x, scales)
            table, _ = table_of(moments, scales, rescaled_epsilon(eps, scales))
    return moments, table


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


def gains_of(weight: Tensor | None, bias: Tensor | None, channels: int) -> Tensor:
    """Return γ and β in float32, (2, C)."""
    gains = torch.empty(2, channels, dtype=torch.float32)
    with torch.no_grad():
        gains[0] = 1.0 if weight is None else weight.reshape(-1)
        gains[1] = 0.0 if bias is None else bias.reshape(-1)
    return gains


def plan_of(x: Tensor, channel: int, groups: int, per_sample: bool, mask: Tensor | None) -> Plan:
    """Return how to compute a call."""
    shape = shape_of(x, channel, per_sample)
    assert shape is not None, "refuses() let through what has no layout"
    valid = valid_positions(x, channel, shape, mask, per_sample)
    return Plan(channel, shape, valid, per_sample, shape.channels // groups)


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
) -> tuple[Tensor, Tensor, Plan, Callable[[], Moments]]:
    """Return y, the table of statistics, the plan, and what returns the moments of every segment and channel."""
    plan = plan_of(x, channel, groups, per_sample, mask)
    moments, table = _statistics(plan, x, eps)
    y = fresh_like(x, plan.channel, plan.shape)
    _run(plan, "apply", x, out=y, table=table, gains=gains_of(weight, bias, plan.shape.channels))
    return y, table, plan, lambda: _as_moments(moments, table[:, 3], plan)


def _as_moments(moments: Tensor, scales: Tensor, plan: Plan) -> Moments:
    """Return them without an axis of segments where all samples share one."""
    mean, remainder, square = moments.unbind(1)
    count = plan.valid.chunks.sizes.unsqueeze(1).expand_as(mean).clone()  # the sizes are kept for other calls
    if bool((scales != 1).any()):  # in float64, which holds the squares that float32 could not
        mean, remainder, square = mean.double() / scales, remainder.double() / scales, square / scales.double() ** 2
    found = (count, mean, square, remainder)
    return Moments(*found) if plan.per_sample else Moments(*(t[0] for t in found))


def moments(x: Tensor, *, channel: int, per_sample: bool, mask: Tensor | None) -> Moments:
    """Return the moments of every channel, or sample and channel; what leaves float32's range is inf."""
    plan = plan_of(x, channel, x.shape[channel], per_sample, mask)
    return _as_moments(_moments(plan, x, None), torch.ones(()), plan)


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
    sums, dx, dw, db = _sums(plan, x, dy, table), None, None, None
    if wanted[0]:
        gains = gains_of(weight, None, channels)
        if total is None:
            means, sizes = torch.empty_like(sums), plan.valid.chunks.sizes
            _merged("weigh", len(sums), channels, sums, sizes, means, depth=plan.depth, gains=gains)
        else:
            means = total(sums) * gains[0]
        dx = fresh_like(x, plan.channel, plan.shape)
        _run(plan, "gradient", x, out=dx, dy=dy, table=table, gains=gains, sums=means)
    if wanted[1] or wanted[2]:
        db, dw = _folded(sums, even_chunks(len(sums), 1, 1, True).levels)[0]
    return dx, dw if wanted[1] else None, db if wanted[2] else None


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
    y = fresh_like(x, plan.channel, plan.shape)
    _run(plan, "apply", x, out=y, table=table, gains=gains_of(weight, bias, plan.shape.channels))
    return y, plan


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
        dx, plain = fresh_like(x, plan.channel, plan.shape), table.clone()
        plain[:, :2] = 0.0
        _run(plan, "apply", dy, out=dx, table=plain, gains=gains_of(weight, None, plan.shape.channels))
    if wanted[1] or wanted[2]:
        db, dw = _sums(plan, x, dy, table)[0]
    return dx, dw if wanted[1] else None, db if wanted[2] else None


COLUMNS = Columns(forward, backward, apply, apply_backward, moments)
