"""Where a second thread pays: the threshold PARALLEL_FROM in normkit/kernels/cpu/pool.py.

Times a forward and a training step of RMSNorm on one thread and on all, within the same rounds, over sizes around the
threshold. The smallest size from which all threads are faster, for good, is where the threshold belongs.

    python benchmarks/threads.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import normkit as nk
from normkit.bench.ratios import paired
from normkit.bench.table import microseconds, plus_minus
from normkit.bench.timing import Contender, interleave
from normkit.kernels.cpu import pool

WIDTH, ROUNDS = 1024, 15


def on(threshold: int, call: Callable[[], object]) -> Callable[[], object]:
    """Run a call with another threshold; the setting costs both sides the same."""

    def run() -> object:
        pool.PARALLEL_FROM = threshold
        return call()

    return run


def calls(elements: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x = torch.randn(elements // WIDTH, WIDTH).to(dtype)
    weight, out, dy = torch.ones(WIDTH, dtype=dtype), torch.zeros_like(x), torch.randn(x.shape).to(dtype)
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    forward = partial(nk.rms_norm, x, weight, eps=1e-6, out=out)

    def step() -> object:
        return torch.autograd.grad(nk.rms_norm(leaf, w, eps=1e-6), (leaf, w), dy)

    return {"forward": forward, "step": step}


def main() -> None:
    threads, before = torch.get_num_threads(), pool.PARALLEL_FROM
    if threads == 1:
        raise SystemExit("one thread is all there is: nothing to compare")
    print(f"{threads} threads against 1, RMSNorm of width {WIDTH}; PARALLEL_FROM is {before} elements")
    print(f"{'pass':8} {'dtype':9} {'elements':>9} {'1 thread µs':>12} {'all µs':>9}  speed-up")
    for dtype in (torch.float32, torch.bfloat16):
        crossing: dict[str, int | None] = {}
        for exponent in range(13, 21):
            for name, call in calls(1 << exponent, dtype).items():
                pair = [Contender("one", on(1 << 62, call)), Contender("all", on(0, call))]
                found = interleave(pair, ROUNDS, seed=exponent)
                ratio = paired(found["one"].seconds, found["all"].seconds)
                one, all_ = (sorted(found[n].seconds)[ROUNDS // 2] for n in ("one", "all"))
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"{name:8} {kind:9} {1 << exponent:9} {microseconds(one):>12} {microseconds(all_):>9}  "
                    f"{plus_minus(ratio)}"
                )
                crossing[name] = (crossing.get(name) or 1 << exponent) if ratio.low > 1 else None
        for name, size in crossing.items():
            print(f"{name}, {dtype}: all threads are faster from {size} elements")
    pool.PARALLEL_FROM = before


if __name__ == "__main__":
    main()
