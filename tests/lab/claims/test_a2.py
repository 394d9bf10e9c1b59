"""A2: the toy stream follows √(1 + 0.01·L), not √L."""

from __future__ import annotations

import math

import pytest

from normkit.lab.claims.a2_toy_residual import CLAIMS, STUDY, law, log_log_slope
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))


def test_law():
    assert law(0) == 1
    assert law(64) == pytest.approx(1.280625, abs=1e-6)


def test_exponent_of_a_power_law():
    depths = list(range(1, 65))
    assert log_log_slope(depths, [3 * i**0.5 for i in depths]) == pytest.approx(0.5, abs=1e-12)
    assert log_log_slope(depths, [law(i) for i in depths]) == pytest.approx(0.073, abs=0.001)


def test_a_square_root_would_hold(measure_study, judge_claim, altered):
    (claim,) = CLAIMS
    measurements = measure_study(STUDY, SETTINGS)
    assert judge_claim(claim, claim.plays, altered(measurements, "exponent", lambda _: 0.5)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_two_per_cent_off_the_law_is_seen(factor, measure_study, judge_claim, altered):
    (claim,) = CLAIMS
    wrong = altered(measure_study(STUDY, SETTINGS), "end", lambda v: v * factor)
    assert judge_claim(claim, claim.plays, wrong).given is Verdict.FAILS


def test_curve_is_what_was_added(measure_study):
    plain = next(m for m in measure_study(STUDY, SETTINGS) if m.arm == "plain")
    assert plain.values["curve"][0] == plain.values["start"]
    assert plain.values["curve"][-1] == plain.values["end"]
    for layer, std in zip(plain.values["grid"], plain.values["curve"], strict=True):
        assert std == pytest.approx(math.sqrt(1 + 0.01 * layer), rel=0.01)
