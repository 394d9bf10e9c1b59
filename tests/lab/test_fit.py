import pytest

from normkit.lab.fit import log_log_slope, slope


def test_a_line_is_recovered_and_noise_orthogonal_to_it_ignored():
    assert slope([0, 1, 2, 3], [5, 3, 1, -1]) == pytest.approx(-2)
    assert slope([-1, 0, 1], [1, -2, 1]) == pytest.approx(0)


def test_a_power_law_gives_its_exponent():
    assert log_log_slope([2, 4, 8], [3 * x**-0.5 for x in (2, 4, 8)]) == pytest.approx(-0.5)
