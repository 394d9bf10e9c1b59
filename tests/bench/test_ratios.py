"""Ratios and their intervals, and what counts as a noisy machine."""

from __future__ import annotations

import math
import random

import pytest

from normkit.bench.ratios import Ratio, geometric_mean, median_interval, noise_of, paired


@pytest.mark.parametrize(("n", "k"), [(5, 1), (6, 1), (9, 2), (20, 6), (21, 6), (100, 40)])
def test_the_interval_takes_the_textbook_ranks(n: int, k: int) -> None:
    """Two-sided 5 % sign-test ranks, as tables of order statistics list them."""
    found = median_interval([float(i) for i in range(1, n + 1)])
    assert (found.low, found.high) == (k, n + 1 - k)


@pytest.mark.parametrize("n", [7, 21])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    """Over 2000 skewed samples the misses are binomial: at most 5 % and three standard errors of that."""
    draws = random.Random(0)
    misses = 0
    for _ in range(2000):
        found = median_interval([draws.expovariate(1.0) for _ in range(n)])
        misses += not found.low <= math.log(2) <= found.high
    assert misses / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_ratios_are_taken_within_rounds() -> None:
    moods = [1.0, 5.0, 0.3, 2.0, 9.0, 1.5, 0.7]
    found = paired([3 * m for m in moods], list(moods))
    assert found.median == pytest.approx(3.0)
    assert found.high - found.low < 1e-9


def test_one_wild_round_moves_nothing() -> None:
    base = [1.0] * 9
    assert paired([2.0] * 8 + [500.0], base) == Ratio(2.0, 2.0, 2.0)


def test_a_difference_needs_its_interval_and_the_floor() -> None:
    assert Ratio(1.2, 1.1, 1.3).differs()
    assert not Ratio(1.2, 0.9, 1.3).differs()
    assert not Ratio(1.04, 1.03, 1.05).differs(floor=0.05)
    assert Ratio(0.8, 0.7, 0.9).differs(floor=0.05)


def test_geometric_means_pair_the_rounds_of_cases() -> None:
    found = geometric_mean([[2.0, 2.0, 2.0], [8.0, 8.0, 8.0, 8.0]])
    assert found.median == pytest.approx(4.0)


def test_a_quiet_machine_is_quiet_and_a_noisy_one_is_not() -> None:
    quiet = [1.0, 1.01, 0.99, 1.0, 1.02, 0.99, 1.01, 1.0]
    assert not noise_of(quiet, quiet).noisy
    spread = noise_of([1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5], [1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5])
    assert spread.noisy
    assert spread.spread > 0.3
    assert spread.again == 0
    drift = noise_of([1.0] * 4 + [1.3] * 4, [1.0] * 4 + [1.3] * 4)
    assert drift.noisy
    assert drift.drift == pytest.approx(0.3)
    apart = noise_of(quiet, [1.1 * q for q in quiet])
    assert apart.noisy
    assert apart.again == pytest.approx(math.log(1.1))
