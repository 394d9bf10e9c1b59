"""Batch norm whose statistics cover the batches of all ranks of a process group.

Each rank sends (n, μ, M2) of its own values, 2C + 1 numbers, in one all-gather, and every rank folds what it received
in the order of ranks: the same bits everywhere, and right for ranks of different, or no, values. Summing M2 and n·μ²
instead would lose the variance of values far from 0. The backward gathers Σdy and Σdy·x̂, 2C numbers a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.registry import REFERENCE
from normkit.kernels.statistics import Moments, accumulation_dtype, moments_of
from normkit.ops.positions import Statistic, request_of, shaped, spread_affine
from normkit.ops.watch import choose, watched


@contextmanager
def together(group: dist.ProcessGroup, name: str) -> Generator[None]:
    """Say which norm waited for whom when a collective fails, as it does once a rank is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: rank {dist.get_rank(group)} of {dist.get_world_size(group)} waits for the others' part of a "
            "statistic, and did not get it: another rank has ended, hangs, or left this norm out. All ranks of the "
            f"process group must call it, as often and in the same order. The group says: {error}"
        ) from error


def gathered(numbers: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return every rank's ``numbers``, in the order of ranks; each rank sends as many."""
    received = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    with together(group, "batch_norm"):
        dist.all_gather(received, numbers.contiguous(), group=group)  # pyright: ignore[reportUnknownMemberType]
    return received


def moments_of_ranks(local: Moments, group: dist.ProcessGroup) -> Moments:
    """Merge the moments of all ranks, (C,) each with one count for all channels, in float64.

    float64 holds mean + remainder and counts up to 2⁵³ as they are; on the wire it is 8·(2C + 1) bytes a rank.
    """
    mean = local.mean.double() + local.remainder.double()
    count = local.count.reshape(-1)[:1].double() if local.count.numel() else mean.new_zeros(1)
    ranks = [
        Moments(n[:1].expand_as(m), m, square, torch.zeros_like(m))
        for received in gathered(torch.cat((count, mean, local.m2.double())), group)
        for n, m, square in [(received[:1], *received[1:].chunk(2))]
    ]
    return reduce(Moments.merge, ranks)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistic: Statistic, group: dist.ProcessGroup
) -> tuple[Tensor, Moments]:
    """Return (x − μ)/√(σ² + ε)·γ + β and the moments of all ranks behind it; γ, β have one value a channel.

    Raises:
        RuntimeError: something looks inside operators (a compiler, `torch.func`): a collective has no place there.
    """
    if watched():
        raise RuntimeError(
            "batch_norm: statistics over a process group cannot be compiled, exported or transformed; leave this norm "
            "out of the graph (torch.compiler.disable) or use process_group=None"
        )
    kernel: Any = choose(request_of(x, weight, bias, statistic), x, weight, bias, statistic.mask)
    columns = None if kernel is REFERENCE else kernel.columns
    with torch.no_grad():
        local = _local(x.detach(), statistic, columns)
        merged = moments_of_ranks(local, group)
    y: Any = _Synced.apply(x, weight, bias, statistic, columns, merged, group)
    return y, merged


def _local(x: Tensor, statistic: Statistic, columns: Any) -> Moments:
    if columns is None:
        mask = statistic.mask
        found = moments_of(x, statistic.axes(x), mask)
        return Moments(*(t.reshape(-1) for t in (found.count, found.mean, found.m2, found.remainder)))
    return columns.moments(x, channel=statistic.channel, per_sample=False, mask=statistic.mask)  # type: ignore[no-any-return]


class _Synced(torch.autograd.Function):
    """Normalising with the statistics of all ranks, and their share of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistic: Statistic,
        columns: Any,
        merged: Moments,
        group: dist.ProcessGroup,
    ) -> Tensor:
        inverse = (merged.variance() + statistic.eps).rsqrt()
        inverse = torch.where(merged.count > 0, inverse, torch.zeros_like(inverse))
        table = torch.zeros(1, 4, x.shape[statistic.channel], dtype=torch.float64, device=x.device)
        table[0, 0], table[0, 2], table[0, 3] = merged.mean, inverse, 1.0
        ctx.plan = None
        if columns is not None:
            rounded = table.float()
            rounded[0, 1] = (table[0, 0] - rounded[0, 0].double()).float()
            table = rounded
            y, ctx.plan = columns.apply(x, table, weight, bias, channel=statistic.channel, mask=statistic.mask)
        else:
            shape = _shape(x, statistic)
            work = accumulation_dtype(x.dtype)
            mean, factor = (table[0, i].to(work).view(shape) for i in (0, 2))
            gains = spread_affine(weight, bias, x, statistic.channel)
            y = reference.apply_inverse(x, mean, factor, *gains, mask=statistic.mask)
        ctx.save_for_backward(x, weight, bias, statistic.mask, table, merged.count)
        ctx.statistic, ctx.columns, ctx.group = statistic, columns, group
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("batch_norm: second derivatives over a process group are not computed")
        (dy,) = gradients
        x, weight, bias, mask, table, count = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]

        def total(sums: Tensor) -> Tensor:
            """Return the mean over all ranks' values of what is summed here over this rank's, (…, C)."""
            whole = reduce(torch.add, gathered(sums.double(), ctx.group))
            return (whole / count.clamp(min=1)).to(sums.dtype)

        if ctx.columns is not None:
            dx, dw, db = ctx.columns.backward(x, weight, dy, table, ctx.plan, wanted=wanted, total=total)
        else:
            dx, dw, db = _plain_backward(x, weight, dy, table, mask, ctx.statistic, wanted, total)
        return dx, shaped(dw, weight), shaped(db, bias), None, None, None, None


def _plain_backward(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    table: Tensor,
    mask: Tensor | None,
    statistic: Statistic,
    wanted: tuple[bool, bool, bool],
    total: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As the kernels' backward, of what has no kernel: float64, an empty x."""
    shape, axes, work = _shape(x, statistic), statistic.axes(x), accumulation_dtype(x.dtype)
    mean, inverse = (table[0, i].to(work).view(shape) for i in (0, 2))
    xhat, g = (x.to(work) - mean) * inverse, dy.to(work)
    if mask is not None:
        zero = torch.zeros((), dtype=work, device=x.device)
        xhat, g = torch.where(mask, xhat, zero), torch.where(mask, g, zero)
    db, dw = g.sum(axes), (g * xhat).sum(axes)
    if not wanted[0]:
        return None, dw, db
    plain, weighted = total(torch.stack((db, dw))).view(2, *shape).unbind(0)
    dx = inverse * (g - plain - xhat * weighted)
    dx = dx if weight is None else dx * weight.to(work).view(shape)
    if mask is not None:
        dx = torch.where(mask, dx, torch.zeros((), dtype=work, device=x.device))
    return dx.to(x.dtype), dw, db


def _shape(x: Tensor, statistic: Statistic) -> list[int]:
    return [x.shape[a] if a == statistic.channel else 1 for a in range(x.dim())]
