"""Straight lines through measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of y over x.

    Example:
        >>> slope([0, 1, 2], [1, 3, 5])
        2.0
    """
    n = len(x)
    x_mean, y_mean = math.fsum(x) / n, math.fsum(y) / n
    covariance = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / math.fsum((a - x_mean) ** 2 for a in x)


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of the power law y ∝ x^p that fits best in logarithms; all values positive."""
    return slope([math.log(a) for a in x], [math.log(b) for b in y])
