r"""Rows whose sums are exact in any order, so that what is left to see are the roundings a norm declares.

A row holds small integers times a power of two. With magnitudes up to 10, every square, every partial sum of values
or of squares over up to 2^17 elements is an integer below 2^24 (times that power): float32 adds it without
rounding, in whatever order, lanes or blocks. The mean of the squares is made an integer, too, so that dividing by n and
multiplying by 1/n agree after rounding.

To hit a given sum of squares with integers: draw all but four at random and take the four from Lagrange's theorem, by
which every natural number is a sum of four squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt, prod

import torch
from torch import Tensor

LARGEST = 7  # with a mean of up to 3 added, 10


def generator(seed: int) -> torch.Generator:
    """Return a generator of its own, so that the caller's is left alone."""
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=4096)
def four_squares(total: int, largest: int = LARGEST) -> tuple[int, int, int, int] | None:
    """Return four integers from 0 to ``largest`` whose squares add up to ``total``, or None if they are too small.

    Example:
        >>> four_squares(7)
        (2, 1, 1, 1)
    """
    if total < 0:
        return None
    for a in range(min(isqrt(total), largest), -1, -1):
        for b in range(min(isqrt(total - a * a), a), -1, -1):
            for c in range(min(isqrt(total - a * a - b * b), b), -1, -1):
                d = total - a * a - b * b - c * c
                if isqrt(d) ** 2 == d and isqrt(d) <= largest:
                    return a, b, c, isqrt(d)
    return None


@lru_cache(maxsize=512)  # drawing them takes longer than running a module on them
def deviations(width: int, seed: int) -> Tensor:
    """Return ``width`` integers with sum 0 whose squares have an integer mean that is no square; not to be written to.

    Widths below 8 leave no room for that; their sums are exact all the same.
    """
    half = width // 2
    for attempt in range(64):
        source = generator(1000 * seed + attempt)
        magnitudes = torch.randint(1, LARGEST, (half,), generator=source)
        if half >= 4:
            mean = _mean_square(int(2 * magnitudes.square().sum()) // width + attempt % 3, width)
            _approach(magnitudes[4:], width * mean // 2)
            rest = four_squares(width * mean // 2 - int(magnitudes[4:].square().sum()))
            if rest is None:
                continue
            magnitudes[:4] = torch.tensor(rest)
        row = torch.cat([magnitudes, -magnitudes, torch.zeros(width % 2, dtype=torch.int64)])
        return row[torch.randperm(width, generator=source)]
    raise AssertionError(f"no probe row of width {width}")  # four squares exist; only their size is limited


def _mean_square(least: int, width: int) -> int:
    """Return the next mean square that is no perfect square and gives an even sum over ``width``."""
    return next(m for m in range(max(least, 2), least + 9) if isqrt(m) ** 2 != m and width * m % 2 == 0)


def _approach(magnitudes: Tensor, total: int) -> None:
    """Raise or lower magnitudes by one, in place, until four squares can make up what is missing to ``total``."""
    missing = total - 2 * LARGEST**2 - int(magnitudes.square().sum())  # leave the four about half of what they can hold
    step = 1 if missing > 0 else -1
    change = torch.where((magnitudes + step).abs() <= LARGEST, 2 * magnitudes * step + 1, 0)
    reach = change.cumsum(0).abs() <= abs(missing)
    magnitudes += step * (reach & (change != 0))


def rows(count: int, width: int, *, seed: int = 0, means: Sequence[int] = (0, 1, -2, 3)) -> Tensor:
    """Return (count, width) float64 integers with exact sums, their means taken in turn from ``means``."""
    return torch.stack([deviations(width, seed + r) + means[r % len(means)] for r in range(count)]).double()


def scaled(rows: Tensor, powers: Sequence[int]) -> Tensor:
    """Multiply row after row by 2^power, the powers taken in turn."""
    steps = torch.tensor([2.0 ** powers[r % len(powers)] for r in range(rows.shape[0])], dtype=torch.float64)
    return rows * steps.unsqueeze(-1)


def lay_out(rows: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Spread rows (count, width) over ``shape`` so that each lies along ``axes``."""
    outer = [d for d in range(len(shape)) if d not in axes]
    order = [*outer, *axes]
    placed = rows.reshape([shape[d] for d in order])
    return placed.permute([order.index(d) for d in range(len(shape))]).contiguous()


def row_count(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """Return how many rows along ``axes`` a tensor of ``shape`` holds, and how long they are."""
    width = prod(shape[a] for a in axes)
    return prod(shape) // width, width


def offset_rows(count: int, width: int, seed: int, mean: float) -> Tensor:
    """Return normal draws, every fifth row around ``mean``, where a variance as E[x²] − E[x]² loses its digits."""
    means = torch.tensor([mean if r % 5 == 4 else 0.0 for r in range(count)], dtype=torch.float64)
    return normal((count, width), seed) + means.unsqueeze(-1)


def uniform(shape: Sequence[int], seed: int, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Return float64 draws between ``low`` and ``high``."""
    return low + (high - low) * torch.rand(tuple(shape), generator=generator(seed), dtype=torch.float64)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    """Return float64 normal draws."""
    return torch.randn(tuple(shape), generator=generator(seed), dtype=torch.float64)
