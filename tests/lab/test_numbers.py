import math

import pytest

from normkit.lab.numbers import estimate, number

T = 4.303 / 3**0.5  # half a 95 % interval of three values, in standard deviations


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (-1.5, "−1.5"), (0.0123456, "0.01235"), (123456.0, "123456"),
        (2.2e-16, "2.2×10⁻¹⁶"), (1e-12, "10⁻¹²"), (-1e-12, "−10⁻¹²"), (1e9, "10⁹"), (math.inf, "∞"), (-math.inf, "−∞"),
        (math.nan, "not a number"),
    ],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.9892, 0.0074, "0.989 ± 0.007"),
        (35.52, 1.4, "35.5 ± 1.4"),
        (-0.02891, 0.0053, "−0.0289 ± 0.0053"),
        (1.04, 0.037, "1.04 ± 0.04"),
        (0.00368, 0.032, "0.004 ± 0.032"),
        (1.2803, 0.0003, "1.2803 ± 0.0003"),  # not ± 0.00
        (-1e-5, 0.02, "0.000 ± 0.020"),  # not −0.000
        (123456.0, 3000.0, "123456 ± 3000"),
        (1.2e-7, 3e-8, "(1.20 ± 0.30)×10⁻⁷"),
    ],
)
def test_an_estimate_ends_at_the_same_decimal_as_its_uncertainty(mean, half, text):
    assert estimate([mean - half / T, mean, mean + half / T]) == text


def test_an_estimate_without_uncertainty_is_a_number():
    assert estimate([0.123456]) == "0.123"
    assert estimate([2.0, 2.0]) == "2"
    assert estimate([1.0, math.nan]) == "not a number"


def test_what_only_rounding_spreads_is_no_uncertainty():
    plateau = 3.1208807510792926
    for equal in ([plateau] * 3, [0.26, 0.26, 0.26000000000000006]):
        assert estimate(equal) == number(equal[0], 3)
    assert estimate([3.0, 3.0, 3.0 + 1e-9]) != "3"
