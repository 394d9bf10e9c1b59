"""D2: ε inside the root, its price at small scales, and what it is for."""

from __future__ import annotations

import math

import pytest

from normkit.lab.claims.d2_epsilon_scale import ALPHAS, CLAIMS, STUDY, law
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
SCALE, ZERO = CLAIMS


def test_law():
    assert law(1e-5, 1e-3) == pytest.approx(0.30151, abs=1e-5)
    assert law(1e-6, 1e-3) == pytest.approx(math.sqrt(0.5))
    assert law(0.0, 1e-9) == 1.0


def test_measured_lengths(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    at = ALPHAS.index(1e-3)
    assert by_arm["inside/1e-05"]["lengths"][at] == pytest.approx(0.30, abs=0.01)
    assert by_arm["inside/1e-06"]["lengths"][at] == pytest.approx(0.71, abs=0.01)
    assert by_arm["none"]["lengths"] == pytest.approx([1.0] * len(ALPHAS), abs=1e-13)
    assert by_arm["none"]["flat_finite"] == 0.0
    assert by_arm["none"]["flat_size"] is None
    assert by_arm["inside/1e-05"]["flat_size"] == 0.0


def test_invariance_would_hold_without_epsilon(measure_study, judge_claim, altered):
    unchanged = altered(measure_study(STUDY, SETTINGS), "change", lambda _: 1e-15)
    assert judge_claim(SCALE, SCALE.plays, unchanged).verdict is Verdict.HOLDS


def test_off_the_law_is_seen(measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), "off_law", lambda _: 1e-11)
    assert judge_claim(SCALE, SCALE.plays, wrong).verdict is Verdict.FAILS


def test_one_nan_is_seen(measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), "flat_finite", lambda _: 1 - 1 / 8192)
    assert judge_claim(ZERO, ZERO.plays, wrong).verdict is Verdict.FAILS
