"""Launching the column kernels: how a call's positions lie, what its kernels are given, where their parts lie.

Two layouts, each with kernels of its own: channels side by side (columns.py) and positions side by side (runs.py).
Which of them a tensor has decides the order of sums; its other strides do not.

A norm streams its tensor through the caches, and everything Python does afterwards starts cold: three times as slow as
around a tiny tensor (`python benchmarks/batch_norm_parts.py`). So what follows from shape and strides alone is kept,
and kernels are given addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.column_layout import Shape, flags_of, shape_of, strides_of
from normkit.kernels.cpu import pool
from normkit.kernels.cpu.chunks import RUN, Valid, valid_positions
from normkit.kernels.cpu.rows import NAMES, Code, at, code_of

_COLUMN = struct.Struct("29q")
_MERGE = struct.Struct("13qdq")
_REMEMBER = struct.Struct("5qd")
BLOCK = 512  # channels a task, as columns.py has it, which only compiling imports


@dataclass(frozen=True)
class Plan:
    """How a call is computed, forward and backward.

    Args:
        channel: the channel axis.
        shape: how x lies.
        valid: which positions count.
        per_sample: whether a sample's statistics are its own.
        depth: channels that share a statistic.
        rows: how many sets of sums there are on each level: chunks first, segments last.
    """

    channel: int
    shape: Shape
    valid: Valid
    per_sample: bool
    depth: int
    rows: tuple[int, ...]

    @property
    def segments(self) -> int:
        """Return how many sets of positions have statistics."""
        return self.rows[-1]


def plan_of(x: Tensor, channel: int, groups: int, per_sample: bool, mask: Tensor | None) -> Plan:
    """Return how to compute a call."""
    shape = shape_of(x, channel, per_sample)
    assert shape is not None, "refuses() let through what has no layout"
    if mask is None:
        return _whole(channel, shape, groups, per_sample)
    return _plan(
        channel, shape, groups, per_sample, valid_positions(flags_of(x, channel, shape, mask), shape, per_sample)
    )


@lru_cache(maxsize=64)  # a model has a few shapes, ragged batches have any number
def _whole(channel: int, shape: Shape, groups: int, per_sample: bool) -> Plan:
    return _plan(channel, shape, groups, per_sample, valid_positions(None, shape, per_sample))


def _plan(channel: int, shape: Shape, groups: int, per_sample: bool, valid: Valid) -> Plan:
    rows = (len(valid.chunks.begins), *(len(bounds) - 1 for bounds in valid.chunks.levels))
    return Plan(channel, shape, valid, per_sample, shape.channels // groups, rows)


def _steps(t: Tensor, channel: int, shape: Shape) -> tuple[int, int, int]:
    """Return the bytes from one sample, position and channel to the next."""
    steps, size = strides_of(t, channel, shape), t.element_size()
    assert steps is not None, "what comes from outside was checked, the rest is laid out like x"
    return steps[0] * size, steps[1] * size, steps[2] * size


_codes: dict[tuple[str, torch.dtype | None], Code] = {}


def _code(kind: str, dtype: torch.dtype | None = None) -> Code:
    """Return a compiled kernel, e.g. "columns apply" for a dtype, or one of merges.py."""
    code = _codes.get((kind, dtype))
    if code is None:
        name = "" if dtype is None else NAMES[dtype]

        def make() -> Callable[[Any], None]:
            from importlib import import_module

            from normkit.kernels.cpu.tags import Tag

            module, function = kind.split()
            made: Any = getattr(import_module(f"normkit.kernels.cpu.{module}"), f"{function}_kernel")
            return made(Tag(name)) if name else made()  # type: ignore[no-any-return]

        code = _codes[kind, dtype] = code_of(f"{kind} {name}", make)
    return code


_KINDS = {
    (False, "moments"): "columns moments",
    (False, "apply"): "columns apply",
    (False, "sums"): "column_backward sums",
    (False, "gradient"): "column_backward gradient",
    **{(True, kernel): f"runs {kernel}" for kernel in ("moments", "apply", "sums", "gradient")},
}


def run(
    plan: Plan,
    kernel: str,
    x: Tensor,
    *,
    out: Tensor | None = None,
    dy: Tensor | None = None,
    parts: int = 0,
    scales: int = 0,
    table: int = 0,
    weight: int = 0,
    bias: int = 0,
    sums: int = 0,
) -> None:
    """Run a kernel over all its tasks."""
    shape, chunks = plan.shape, plan.valid.chunks
    if kernel in ("moments", "sums"):
        tasks = plan.rows[0] * (shape.channels if shape.runs else -(-shape.channels // BLOCK))
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
        if t is None:
            tail += (0, 0, 0, 0)
        else:
            tail += (t.data_ptr(), *_steps(t, plan.channel, shape))

    def block(counter: int, piece: int) -> bytes:
        return _COLUMN.pack(
            counter, tasks, piece, shape.channels, shape.length, at(plan.valid.listed), chunks.begins.data_ptr(),
            chunks.counts.data_ptr(), parts, scales, table, weight, bias, sums, at(plan.valid.flags),
            plan.per_sample, at(room), *tail,
        )  # fmt: skip

    _code(_KINDS[shape.runs, kernel], x.dtype).run(block, threads, tasks)


def merged(
    kernel: str,
    tasks: int,
    width: int,
    parts: int,
    counts: int,
    out: int,
    *,
    work: int,
    bounds: int = 0,
    out_counts: int = 0,
    depth: int = 1,
    scales: int = 0,
    epsilons: int = 0,
    flag: int = 0,
    eps: float = 0.0,
    weight: int = 0,
) -> None:
    """Run a kernel of merges.py over ``work`` elements."""
    threads = min(pool.threads_for(work), tasks)

    def block(counter: int, piece: int) -> bytes:
        return _MERGE.pack(
            counter, tasks, piece, width, parts, counts, bounds, out, out_counts, depth, scales, epsilons, flag, eps,
            weight,
        )  # fmt: skip

    _code(f"merges {kernel}").run(block, threads, tasks)


def remembered(moments: int, count: int, mean: Tensor, var: Tensor, momentum: float) -> None:
    """Blend moments (3, C) of ``count`` values into running statistics, on the calling thread."""
    block = _REMEMBER.pack(mean.numel(), moments, count, mean.data_ptr(), var.data_ptr(), momentum)
    _code("remember remember").call(block)


def joined_moments(plan: Plan, x: Tensor, scales: int) -> tuple[Tensor, int]:
    """Return memory whose end is (segments, 3, C): mean, remainder, Σ(x − mean)² of every channel; and their address.

    The counts of what is joined lie in front of all parts, on cache lines of their own.
    """
    chunks, width, rows = plan.valid.chunks, plan.shape.channels, plan.rows
    head = -(-sum(rows[1:]) // 8) * 16
    room = torch.empty(head + sum(rows) * 3 * width, dtype=torch.float32)
    out_counts = room.data_ptr()
    parts = out_counts + 4 * head
    run(plan, "moments", x, parts=parts, scales=scales)
    counts, vectors = chunks.counts.data_ptr(), -(-width // 16)
    for i, bounds in enumerate(chunks.levels):
        joined, work = parts + rows[i] * 12 * width, rows[i] * 3 * width
        merged(
            "merge", rows[i + 1] * vectors, width, parts, counts, joined,
            work=work, bounds=bounds.data_ptr(), out_counts=out_counts,
        )  # fmt: skip
        parts, counts, out_counts = joined, out_counts, out_counts + 8 * rows[i + 1]
    return room, parts


def joined_sums(plan: Plan, x: Tensor, dy: Tensor, table: int) -> Tensor:
    """Return (segments, 2, C): Σ dy and Σ dy·x̂ of every channel."""
    width, rows = 2 * plan.shape.channels, plan.rows
    sums = torch.empty(plan.segments, 2, plan.shape.channels, dtype=torch.float32)
    room = torch.empty(sum(rows[:-1]) * width, dtype=torch.float32)  # apart: callers keep the sums as gradients
    parts = sums.data_ptr() if len(rows) == 1 else room.data_ptr()
    run(plan, "sums", x, dy=dy, parts=parts, table=table)
    for i, bounds in enumerate(plan.valid.chunks.levels):
        out = sums.data_ptr() if i == len(rows) - 2 else parts + rows[i] * 4 * width
        folded(parts, out, bounds, rows[i], rows[i + 1], width)
        parts = out
    return sums


def folded(parts: int, out: int, bounds: Tensor, rows: int, results: int, width: int) -> None:
    """Add up the rows between each two bounds."""
    merged("fold", results * -(-width // 16), width, parts, 0, out, work=rows * width, bounds=bounds.data_ptr())
