"""What ``use(batch_invariant=True)`` costs under torch.compile: the formula inlined against the fused kernel, opaque.

Inductor's backend, default options; forward under no_grad, and a training step (forward and backward). Interleaved
rounds, the fastest of each, and the ratio opaque / inlined (below 1: the kernel is faster).

    python benchmarks/compiled.py [THREADS]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.bench.table import microseconds
from normkit.bench.timing import Contender, interleave

ROWS, WIDTH, HIDDEN, ROUNDS = 512, 768, 3072, 41


def mlp() -> nn.Module:
    """Return two pre-norm MLP layers."""
    return nn.Sequential(
        *(
            nk.PreNorm(WIDTH, nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))
            for _ in range(2)
        )
    )


def forward(run: Callable[[Tensor], Tensor], x: Tensor, invariant: bool) -> Callable[[], object]:
    """Return a call without gradients."""

    def call() -> object:
        with torch.no_grad(), nk.use(batch_invariant=invariant):
            return run(x)

    return call


def training(run: Callable[[Tensor], Tensor], x: Tensor, invariant: bool) -> Callable[[], object]:
    """Return a call with its backward."""
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)

    def call() -> object:
        with nk.use(batch_invariant=invariant):
            y = run(leaf)
        y.backward(dy)
        return y

    return call


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    torch.manual_seed(0)
    print(f"{ROWS} × {WIDTH}, {torch.get_num_threads()} threads, fastest of {ROUNDS} rounds")
    print(f"{'':34} {'inlined µs':>10} {'opaque µs':>10} {'ratio':>6}")
    for what, make in {"RMSNorm": lambda: nk.RMSNorm(WIDTH), "two pre-norm MLP layers": mlp}.items():
        for dtype in (torch.float32, torch.bfloat16):
            module, x = make().to(dtype), torch.randn(ROWS, WIDTH, dtype=dtype)
            for name, kind in {"forward": forward, "forward and backward": training}.items():
                torch.compiler.reset()
                calls = [
                    Contender(str(invariant), kind(torch.compile(module, fullgraph=True), x, invariant))
                    for invariant in (False, True)
                ]
                for contender in calls:
                    contender.call()
                found = interleave(calls, ROUNDS, seed=0)
                inlined, opaque = (min(found[str(b)].seconds) for b in (False, True))
                label = f"{what}, {str(dtype).removeprefix('torch.')}"
                print(
                    f"{label:34} {microseconds(inlined):>10} {microseconds(opaque):>10} {opaque / inlined:6.2f}  {name}"
                )


if __name__ == "__main__":
    main()
