"""Masked batch norm on the CPU, beside the formula in eager PyTorch, the norm without a mask, and nn.BatchNorm1d.

Goals: at least 3 times as fast as the eager masked formula; at most 1.2 times the time without a mask; nn.BatchNorm1d
on the same data without a mask not faster than ours by more than a tenth. Training mode, forward alone and a whole step
(forward and gradients of x, weight and bias); a seventh of the positions is padding at the ends of samples.

    python benchmarks/batch_norm.py [threads [rounds [samples]]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.bench.ratios import paired
from normkit.bench.table import microseconds, plus_minus
from normkit.bench.timing import Contender, interleave

LENGTH, CHANNELS = 256, 768
# (of, over): the ratio of their times, and what it should be.
GOALS = {("eager", "masked"): "≥ 3", ("masked", "dense"): "≤ 1.2", ("torch", "dense"): "≥ 0.9"}


def eager(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, channel_axis: int) -> Tensor:
    """Write masked batch norm as one does without a kernel: float32 statistics, two passes."""
    shape = [-1 if a == channel_axis % 3 else 1 for a in range(3)]
    axes = [a for a in range(3) if a != channel_axis % 3]
    real, wide = mask.unsqueeze(channel_axis).float(), x.float()
    count = real.sum()
    mean = (wide * real).sum(axes) / count
    centred = (wide - mean.view(shape)) * real
    variance = centred.square().sum(axes) / count
    y = centred * (variance + 1e-5).rsqrt().view(shape) * weight.view(shape) + bias.view(shape)
    return (y * real).to(x.dtype)


def calls(dtype: torch.dtype, samples: int, channel_axis: int) -> dict[str, Callable[[Tensor], Tensor]]:
    lengths = torch.randint(LENGTH * 5 // 7, LENGTH + 1, (samples,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(LENGTH) < lengths[:, None]
    ours = nk.BatchNorm(CHANNELS, channel_axis=channel_axis)
    theirs = nn.BatchNorm1d(CHANNELS)
    by_hand = nk.BatchNorm(CHANNELS, channel_axis=channel_axis)
    weight, bias = by_hand.weight, by_hand.bias
    assert weight is not None
    assert bias is not None

    def of_torch(x: Tensor) -> Tensor:  # (N, L, C) as the (N·L, C) that it is in memory
        return theirs(x) if channel_axis == 1 else theirs(x.flatten(0, 1)).view(x.shape)

    return {
        "masked": lambda x: ours(x, mask),
        "dense": ours,
        "eager": lambda x: eager(x, mask, weight, bias, channel_axis),
        "torch": of_torch,
    }


def timed(norm: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, step: bool) -> Callable[[], object]:
    if not step:

        def forward() -> object:
            with torch.no_grad():
                return norm(x)

        return forward
    leaf = x.clone().requires_grad_()

    def whole() -> object:
        leaf.grad = None
        norm(leaf).backward(dy)
        return leaf.grad

    return whole


def main() -> None:
    threads, rounds, samples = (int(a) for a in [*sys.argv[1:], *("1", "21", "16")[len(sys.argv) - 1 :]])
    torch.set_num_threads(threads)
    # Of one thread its own time is taken, which does not run while others have the processor.
    clock = time.thread_time if threads == 1 else time.perf_counter
    print(f"{threads} threads, {samples} samples of {LENGTH} positions, {CHANNELS} channels, {rounds} rounds")
    names = [f"{of}/{over} {goal}" for (of, over), goal in GOALS.items()]
    print(
        f"{'layout':10} {'dtype':9} {'pass':8} {'masked µs':>10} {'dense µs':>10}  " + "".join(f"{n:22}" for n in names)
    )
    for layout, channel_axis in (("(N, L, C)", -1), ("(N, C, L)", 1)):
        shape = (samples, LENGTH, CHANNELS) if channel_axis == -1 else (samples, CHANNELS, LENGTH)
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
            for step in (False, True):
                contenders = [
                    Contender(n, timed(f, x, dy, step)) for n, f in calls(dtype, samples, channel_axis).items()
                ]
                found = {n: s.seconds for n, s in interleave(contenders, rounds, seed=0, clock=clock).items()}
                ratios = [plus_minus(paired(found[of], found[over])) for of, over in GOALS]
                masked, dense = (microseconds(min(found[n])) for n in ("masked", "dense"))
                kind, what = str(dtype).removeprefix("torch."), "step" if step else "forward"
                print(f"{layout:10} {kind:9} {what:8} {masked:>10} {dense:>10}  " + "".join(f"{r:22}" for r in ratios))


if __name__ == "__main__":
    main()
