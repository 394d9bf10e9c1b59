"""J2: the rotation against 2 × 2 matrices, and a norm that forgets its γ or its place."""

from __future__ import annotations

import math

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import j2_rope_order as module
from normkit.lab.claims.j2_rope_order import BASE, CLAIMS, STUDY, turns
from normkit.lab.model.attention import rotate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(J2,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(J2, J2.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(J2, J2.control.plays, measured).verdict is Verdict.FAILS
    assert told(J2, Evidence(measured, J2.plays, SETTINGS))
    check_pictures(J2, measured, SETTINGS)


def test_rotation_is_two_by_two_matrices():
    x = torch.randn(9, 1, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = rotate(x, turns(9, 6))
    for t in range(9):
        for j in range(3):
            angle = t * BASE ** (-2 * j / 6)
            a, b = float(x[t, 0, 2 * j]), float(x[t, 0, 2 * j + 1])
            expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            assert y[t, 0, 2 * j : 2 * j + 2].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_size_of_the_swing_from_the_algebra(measure_study):
    """For one pair with gains (a, b) the logit swings by |a² − b²|·|q|·|k| at most; γ in [.5, 2], 32 pairs of it."""
    bound = 32 * (2.0**2 - 0.5**2) * 64 / math.sqrt(64)
    for m in measure_study(STUDY, SETTINGS):
        if m.arm == "after/per-channel":
            assert 0.5 < m.values["spread"] < bound


@pytest.mark.parametrize("path", ["before/per-channel", "after/none", "after/per-pair"])
def test_a_logit_that_moves_is_seen(path, measure_study, judge_claim):
    moved = [
        type(m)(m.study, m.arm, m.seed, {**m.values, "spread": 1e-6} if m.arm == path else m.values)
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(J2, J2.plays, moved).verdict is Verdict.FAILS


def test_a_rotation_that_is_none_is_seen(monkeypatch, measure_study, judge_claim):
    """Without the rotation no order can matter: the claim must fail."""
    monkeypatch.setattr(module, "rotate", lambda x, table: x)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(J2, J2.plays, broken).verdict is Verdict.FAILS
