"""L6: the inverse roots against exact rational arithmetic, and verdicts that move with their errors."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims.l6_rsqrt import ARMS, CLAIMS, STUDY, U, _inverse_root, bit_trick, newton
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(L6,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(L6, L6.plays, measured).verdict is Verdict.CORRECTED
    assert judge_claim(L6, L6.control.plays, measured).verdict is Verdict.FAILS
    assert told(L6, Evidence(measured, L6.plays, SETTINGS))
    check_pictures(L6, measured, SETTINGS)
    assert newton(U * measured[2].values["largest"]) == pytest.approx(U * measured[3].values["largest"], rel=0.01)


def test_errors_lie_where_fractions_put_them():
    """v·y² is exactly (1 + e)² for a result off by e: no float64 truth needed."""
    v = torch.rand(200, generator=torch.Generator().manual_seed(6)) * 3 + 1
    for arm, bound in {"rsqrt": 4 * U, "divide": 4 * U, "newton-1": 1.8e-3, "newton-2": 5e-6}.items():
        for x, y in zip(v.tolist(), _inverse_root(v, arm).tolist(), strict=True):
            square = Fraction(x) * Fraction(y) ** 2
            assert (1 - Fraction(bound)) ** 2 <= square <= (1 + Fraction(bound)) ** 2, (arm, x)


def test_a_quarter_of_the_range_stands_for_all():
    v = torch.rand(1000, generator=torch.Generator().manual_seed(7)) * 3 + 1
    for arm in ARMS:
        assert torch.equal(_inverse_root(v * 4.0**20, arm), _inverse_root(v, arm) / 2.0**20), arm


def test_pilot_errors(measure_study):
    by_arm = {m.arm: U * m.values["largest"] for m in measure_study(STUDY, SETTINGS)}
    assert by_arm["newton-0"] == pytest.approx(3.4e-2, rel=0.02)
    assert by_arm["newton-1"] == pytest.approx(1.75e-3, rel=0.02)
    assert by_arm["newton-2"] == pytest.approx(4.7e-6, rel=0.03)
    assert float(bit_trick(torch.tensor([0.25]), 0)) == pytest.approx(2, rel=0.035)


@pytest.mark.parametrize(
    ("arm", "factor", "expected"),
    [("divide", 1.6, Verdict.HOLDS), ("rsqrt", 10, Verdict.FAILS), ("newton-2", 1.3, Verdict.FAILS)],
)
def test_other_errors_other_verdicts(arm, factor, expected, measure_study, judge_claim):
    """A division that bad would make rsqrt better; an inaccurate rsqrt or a Newton step that is none must fail."""
    worlds = [
        type(m)(m.study, m.arm, m.seed, {**m.values, "largest": m.values["largest"] * (factor if m.arm == arm else 1)})
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(L6, L6.plays, worlds).given is expected


def test_newton_is_the_algebra():
    for e in (-0.034, -1e-3):
        exact = (1 + e) * (1.5 - 0.5 * (1 + e) ** 2) - 1
        assert newton(abs(e)) == pytest.approx(-exact, rel=1e-9)
        assert math.copysign(1, exact) == -1
