"""Where stores past the cache pay: the threshold PAST_FROM in normkit/kernels/cpu/rows.py.

Times float32 RMSNorm with and without such stores, into an output that exists and into new memory, over sizes around
the threshold. They save the read of a line that is overwritten whole; a later read then finds nothing in the cache.

    python benchmarks/past.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import normkit as nk
from normkit.bench.ratios import paired
from normkit.bench.table import amount, microseconds, plus_minus
from normkit.bench.timing import Contender, interleave
from normkit.kernels.cpu import rows

WIDTH, ROUNDS = 4096, 11


def with_threshold(threshold: int, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        rows.PAST_FROM = threshold
        return call()

    return run


def main() -> None:
    before = rows.PAST_FROM
    print(f"{torch.get_num_threads()} threads, float32, width {WIDTH}; PAST_FROM is {amount(before)} read and written")
    print(f"{'x and y':>9} {'output':7} {'cached µs':>10} {'past µs':>9}  time of cached stores over past ones")
    with torch.no_grad():
        for exponent in range(20, 29):
            count = (1 << exponent) // (8 * WIDTH)
            x, weight = torch.randn(count, WIDTH), torch.ones(WIDTH)
            out = torch.zeros(count * WIDTH + 16)
            start = (-out.data_ptr() // 4) % 16  # such stores need lines of 64 bytes
            y = out[start : start + count * WIDTH].view(count, WIDTH)
            for name, call in {
                "given": partial(nk.rms_norm, x, weight, eps=1e-6, out=y),
                "new": partial(nk.rms_norm, x, weight, eps=1e-6),
            }.items():
                pair = [Contender("cached", with_threshold(1 << 62, call)), Contender("past", with_threshold(0, call))]
                found = interleave(pair, ROUNDS, seed=exponent)
                cached, past = (sorted(found[n].seconds)[ROUNDS // 2] for n in ("cached", "past"))
                ratio = plus_minus(paired(found["cached"].seconds, found["past"].seconds))
                print(
                    f"{amount(1 << exponent):>9} {name:7} {microseconds(cached):>10} {microseconds(past):>9}  {ratio}"
                )
    rows.PAST_FROM = before


if __name__ == "__main__":
    main()
