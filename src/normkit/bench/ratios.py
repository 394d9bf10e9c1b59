"""Ratios of times, their intervals, and how noisy the machine was while they were taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of ratios and an interval that covers it with at least 95 % (all there are, where fewer than 6)."""

    median: float
    low: float
    high: float

    def differs(self, floor: float = 0.0) -> bool:
        """Say whether it is told from 1: the interval leaves 1 out, and the median is further from 1 than ``floor``."""
        return not (self.low <= 1 <= self.high) and abs(math.log(self.median)) > floor


def median_interval(values: Sequence[float]) -> Ratio:
    """Return the median of ``values`` with its sign-test interval, which assumes no distribution.

    The k-th smallest and k-th largest of n bracket the median with probability 1 − 2·P(Binomial(n, ½) < k). That is
    exact for independent rounds, needs no resampling, and one wild round cannot move it.
    """
    ordered, n = sorted(values), len(values)
    tail, k = 0.5**n, 1
    while k < n // 2 and 2 * (tail + math.comb(n, k) * 0.5**n) <= 0.05:
        tail += math.comb(n, k) * 0.5**n
        k += 1
    return Ratio(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return the ratio of two contenders' times, round by round."""
    return median_interval([a / b for a, b in zip(numerator, denominator, strict=True)])


def geometric_mean(columns: Sequence[Sequence[float]]) -> Ratio:
    """Return the geometric mean over cases of ratios given round by round, cut to the shortest case."""
    rounds = min(map(len, columns))
    return median_interval(
        [math.exp(statistics.fmean([math.log(column[i]) for column in columns])) for i in range(rounds)]
    )


@dataclass(frozen=True)
class Noise:
    """What the copy, which does the same every time, says of the machine.

    Args:
        spread: the distance of its quartiles over its median.
        drift: how far the medians of the first and the second half of the rounds lie apart, as a factor minus 1.
        again: how far two copies of one run lie apart, as |ln| of their median ratio; less is no difference.
    """

    spread: float
    drift: float
    again: float

    @property
    def noisy(self) -> bool:
        """Say whether times of this run deserve a warning."""
        return self.spread > SPREAD or self.drift > DRIFT or self.again > AGAIN


# A quiet machine stays within a third of these; beyond them a difference of 10 % between contenders cannot be read.
SPREAD, DRIFT, AGAIN = 0.10, 0.10, 0.05


def noise_of(copy: Sequence[float], again: Sequence[float]) -> Noise:
    """Judge the machine by the samples of two copies that ran among the contenders."""
    if len(copy) < 4:
        return Noise(0.0, 0.0, abs(math.log(paired(again, copy).median)))
    lower, median, upper = statistics.quantiles(copy, n=4)
    half = len(copy) // 2
    first, second = statistics.median(copy[:half]), statistics.median(copy[-half:])
    return Noise(
        (upper - lower) / median, max(first, second) / min(first, second) - 1, abs(math.log(paired(again, copy).median))
    )
