"""Where a batch norm's time goes on the CPU: its compiled kernels, and the Python around them.

Python is timed twice, in the same calls and in calls on a tensor of almost nothing: what a large tensor leaves in the
caches is not Python's, and that is the difference.

    python benchmarks/batch_norm_parts.py [threads [rounds]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import normkit as nk
from normkit.kernels.cpu.rows import Code

SAMPLES, LENGTH, CHANNELS = 16, 256, 768


def split(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median µs of a call in kernels and around them."""
    inside = 0.0
    run = Code.run

    def timed(self: Code, *given: Any) -> None:
        nonlocal inside
        began = time.perf_counter()
        run(self, *given)
        inside += time.perf_counter() - began

    kernels, around = [], []
    with patch.object(Code, "run", timed):
        for i in range(rounds + 5):
            inside, began = 0.0, time.perf_counter()
            call()
            whole = time.perf_counter() - began
            if i >= 5:
                kernels.append(inside * 1e6)
                around.append((whole - inside) * 1e6)
    return median(kernels), median(around)


def main() -> None:
    threads, rounds = (int(a) for a in [*sys.argv[1:], *("1", "101")[len(sys.argv) - 1 :]])
    torch.set_num_threads(threads)
    print(f"{threads} threads, {SAMPLES} samples of {LENGTH} positions, {CHANNELS} channels, {rounds} rounds; µs")
    print(f"{'layout':10} {'dtype':9} {'mask':5} {'pass':8} {'kernels':>8} {'Python':>8} {'Python, tiny tensor':>20}")
    for layout, channel_axis in (("(N, L, C)", -1), ("(N, C, L)", 1)):
        for dtype in (torch.float32, torch.bfloat16):
            for masked in (False, True):
                for step in (False, True):
                    found = [
                        split(call_of(dtype, channel_axis, length, masked, step), rounds) for length in (LENGTH, 2)
                    ]
                    kind, what = str(dtype).removeprefix("torch."), "step" if step else "forward"
                    mask = "yes" if masked else "no"
                    (kernels, around), (_, tiny) = found
                    print(f"{layout:10} {kind:9} {mask:5} {what:8} {kernels:8.0f} {around:8.0f} {tiny:20.0f}")


def call_of(dtype: torch.dtype, channel_axis: int, length: int, masked: bool, step: bool) -> Callable[[], object]:
    samples, channels = (SAMPLES, CHANNELS) if length > 2 else (2, 16)
    shape = (samples, length, channels) if channel_axis == -1 else (samples, channels, length)
    norm = nk.BatchNorm(channels, channel_axis=channel_axis)
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    mask = torch.arange(length) < torch.tensor([[length - i % 2] for i in range(samples)]) if masked else None

    def forward() -> Tensor:
        with torch.no_grad():
            return norm(x, mask)

    def whole() -> None:
        x.grad = None
        norm(x, mask).backward(dy)

    x.requires_grad_(step)
    return whole if step else forward


if __name__ == "__main__":
    main()
