r"""A batch's gradient from equal parts of it, computed apart: by one process in turn, or by one process for each.

The loss of a batch is the mean of its parts' losses, so its gradient is the mean of theirs, g = (g₁ + … + g_S) / S.
Both ways here add in that order, elementwise, in the parameters' dtype, and divide once: on the CPU, with one thread, a
run under ``torchrun`` with S processes has the bits of a run of one process with ``--shards S``. That is the stated
bound: zero. Averaging by all-reduce would not give it beyond two processes, since its order of sums depends on their
number and on where an element lies in its bucket; gathering and adding moves S/2 times as many bytes.

Against a run that is not sharded, sums over the batch have another order. Where a row's own numbers do not depend on
how many rows are computed at once, a gradient g = Σᵢ tᵢ/n over n positions then differs, element by element, by no more
than 2γ·Σᵢ|tᵢ|/n with γ = mu/(1 − mu), m = n + 2 and u the dtype's unit roundoff: each order of summing, with its two
divisions, is within γ·Σ|tᵢ|/n of the exact value. No such bound holds for a whole run: training amplifies it.

Not the same: models that draw random numbers while they train (each process draws its own), and norms with running
statistics, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normkit.lab.grid.own_models import BytesToLogits
from normkit.lab.model.training import next_byte_loss, whole_batch
from normkit.modules import BatchNorm

Backward = Callable[[nn.Module, Tensor], Tensor]


def backward_of(model: nn.Module, shards: int) -> Backward:
    """Return what puts a batch's gradient into ``model``'s parameters from ``shards`` parts of the batch.

    Where torch.distributed is running, each of its processes takes the part of its rank.

    Args:
        model: on the device where it is trained.
        shards: number of parts; the number of processes, where there are several.

    Raises:
        ValueError: the model keeps running statistics, which parts would not share.
    """
    if shards == 1:
        return whole_batch
    running = [n for n, m in model.named_modules() if isinstance(m, BatchNorm | nn.modules.batchnorm._BatchNorm)]  # pyright: ignore[reportPrivateUsage]
    if running:
        raise ValueError(
            f"{running[0]} keeps running statistics, and the parts of a batch would each have their own: train it "
            "unsharded, in one process"
        )
    if dist.is_initialized():
        assert dist.get_world_size() == shards, "one part for each process"
        return _each_its_own(model)
    return lambda net, window: _in_turn(net, window, shards)


def _in_turn(model: nn.Module, window: Tensor, shards: int) -> Tensor:
    losses = [whole_batch(model, part) for part in window.chunk(shards)]
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(shards)
    return _mean_in_order(losses)


def _each_its_own(model: nn.Module) -> Backward:
    # A model of one's own may leave parameters unused, which DDP must be told to expect.
    own = any(isinstance(m, BytesToLogits) for m in model.modules())
    parallel = DistributedDataParallel(model, find_unused_parameters=own)
    # A lambda, since DDP reads a hook's annotations and takes none that are written as text.
    parallel.register_comm_hook(None, lambda _, bucket: _gathered_in_order(bucket))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def backward(_: nn.Module, window: Tensor) -> Tensor:
        loss = next_byte_loss(parallel, window.chunk(ranks)[rank])
        loss.backward()
        losses = [torch.empty_like(loss.detach()) for _ in range(ranks)]
        dist.all_gather(losses, loss.detach())
        return _mean_in_order(losses)

    return backward


def _gathered_in_order(bucket: Any) -> Any:
    mine: Tensor = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    gathered: Any = dist.all_gather(parts, mine, async_op=True)
    return gathered.get_future().then(lambda _: _mean_in_order(parts))


def _mean_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))
