"""Whether time is linear in rows × width: RMSNorm into a given output, over four decades of elements.

Prints the slope of log time over log elements (1 is linear) for each width, fitted over all sizes and over those of
which no more than a tenth is the launch. One thread, so that no threshold lies inside the range; the copy beside it
shows what the caches do.

    python benchmarks/linear.py
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch

import normkit as nk
from normkit.bench.table import microseconds
from normkit.bench.timing import Contender, Samples, interleave

ROUNDS, WIDTHS = 7, (128, 768, 4096)
SIZES = [4096 * 10**i for i in range(5)]


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope in logarithms."""
    x, y = [math.log(a) for a, _ in points], [math.log(b) for _, b in points]
    return statistics.linear_regression(x, y).slope


def median(samples: Samples) -> float:
    return statistics.median(samples.seconds)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'width':>6} {'rows':>8} {'elements':>9} {'µs':>9} {'ns/element':>11} {'copy µs':>9}")
    with torch.no_grad():
        for width in WIDTHS:
            points: list[tuple[float, float]] = []
            for size in SIZES:
                rows = max(1, size // width)
                x, weight = torch.randn(rows, width), torch.ones(width)
                y = torch.zeros_like(x)
                pair = [
                    Contender("norm", partial(nk.rms_norm, x, weight, eps=1e-6, out=y)),
                    Contender("copy", partial(y.copy_, x)),
                ]
                found = interleave(pair, ROUNDS, seed=0)
                time, n = median(found["norm"]), rows * width
                points.append((n, time))
                print(
                    f"{width:6} {rows:8} {n:9} {microseconds(time):>9} {1e9 * time / n:11.3f} "
                    f"{microseconds(median(found['copy'])):>9}"
                )
            launch = points[0][1]
            large = [p for p in points if p[1] >= 10 * launch]
            beyond = f"{slope(large):.3f}" if len(large) > 1 else "–"
            print(f"width {width}: slope {slope(points):.3f} over all, {beyond} where the launch is below a tenth")


if __name__ == "__main__":
    main()
