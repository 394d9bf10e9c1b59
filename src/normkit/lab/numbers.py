"""How numbers are written for people: few digits, real minus signs, powers of ten instead of ``e-12``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.lab.verdict import interval

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits.

    Example:
        >>> number(0.0123456), number(-1.5), number(2.2e-16, 2), number(float("inf"))
        ('0.01235', '−1.5', '2.2×10⁻¹⁶', '∞')
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        text = f"{value:.{max(digits, math.floor(math.log10(abs(value))) + 1)}g}"
        return text.replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + superscript(int(exponent))
    if mantissa in {"1", "-1"}:
        return mantissa.replace("-", "−")[:-1] + power
    return f"{mantissa.replace('-', '−')}×{power}"


def superscript(exponent: int) -> str:
    """Return ``exponent`` in raised digits."""
    return str(exponent).translate(_RAISED)


def estimate(values: Sequence[float]) -> str:
    """Return the mean of ``values`` ± half its 95 % interval, both to the same decimal.

    That decimal is the second digit of the uncertainty or the third of the mean, whichever comes first, but never
    one at which the uncertainty would read as zero. Without an uncertainty, the mean alone to three digits; what only
    rounding spreads has none.

    Example:
        >>> estimate([0.98, 1.0, 1.03]), estimate([2.0])
        ('1.00 ± 0.06', '2')
    """
    found = interval(values)
    half = (found.high - found.low) / 2
    # Equal values whose sum was rounded have no spread: their mean is off by an ulp.
    if not half > 1e-12 * abs(found.mean) or not math.isfinite(half):
        return number(found.mean, 3)
    size = max(abs(found.mean), half)
    power = 0 if 1e-4 <= size < 1e6 else math.floor(math.log10(size))
    mean, half = found.mean / 10**power, half / 10**power
    first = [math.floor(math.log10(v)) for v in (half, max(abs(mean), half))]
    decimals = max(0, min(1 - first[0], 2 - first[1]))
    if round(half, decimals) == 0:
        decimals = -first[0]
    mean = round(mean, decimals) + 0.0  # no minus before a zero
    text = f"{mean:.{decimals}f} ± {half:.{decimals}f}".replace("-", "−")
    return f"({text})×10{superscript(power)}" if power else text
