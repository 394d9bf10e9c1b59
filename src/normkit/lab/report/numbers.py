"""What a criterion and an axis say, in the lab's way of writing numbers."""

from __future__ import annotations

import math
from itertools import pairwise

from normkit.lab.language import Words
from normkit.lab.numbers import number
from normkit.lab.verdict import Criterion, interval


def ticks(values: list[float]) -> list[str]:
    """Return labels for evenly spaced tick positions, with the decimals that tell neighbours apart."""
    gaps = [b - a for a, b in pairwise(values) if b > a]
    largest = max((abs(v) for v in values), default=0.0)
    if not gaps or not 1e-3 <= largest < 1e6 or min(gaps) < 1e-4:
        return [number(v, 6 if gaps and largest and min(gaps) / largest < 1e-3 else 3) for v in values]
    decimals = max(0, -math.floor(math.log10(min(gaps) * 1.0001)))
    if any(abs(round(v, decimals) - v) > 1e-9 * largest for v in [*gaps, *values]):
        decimals += 1  # steps such as 2.5 need one more, and so do even steps from such a start
    return [f"{v:.{decimals}f}".replace("-", "−") if v else "0" for v in values]


def measured(criterion: Criterion) -> str:
    """Return what a criterion measured: the mean and half its interval, or the range where every value counts."""
    values = list(criterion.values)
    if not values:
        return "nothing"
    if criterion.every and len(values) > 1:
        low, high = min(values), max(values)
        if any(map(math.isnan, values)):
            return "NaN among the values"
        return number(low) if low == high else f"{number(low)} … {number(high)}"
    found = interval(values)
    half = (found.high - found.low) / 2
    if half == 0 or not math.isfinite(half):
        return number(found.mean)
    return f"{number(found.mean)} ± {number(half, 2)}"


def judged_on(criterion: Criterion, words: Words) -> str:
    """Return what of the values is compared with the region."""
    n = len(criterion.values)
    if n == 1:
        return words("one value")
    return words("every one of {n} values" if criterion.every else "mean of {n}, 95 % interval", n=n)


def region(criterion: Criterion) -> str:
    """Return the region of the given tolerance in words."""
    low, high = criterion.region()
    if criterion.kind == "near":
        return number(low) if low == high else f"{number(low)} … {number(high)}"
    signs = {"at_most": "≤", "at_least": "≥", "above": ">", "below": "<"}
    return f"{signs[criterion.kind]} {number(high if math.isinf(low) else low)}"
