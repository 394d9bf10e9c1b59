"""L5: the chain value by value, and each cure alone."""

from __future__ import annotations

import math

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import l5_half_overflow as module
from normkit.lab.claims.l5_half_overflow import CLAIMS, LIMIT, STUDY, VALUE, WIDTH, half_norm
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(L5,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(L5, L5.plays, measured).verdict is Verdict.CORRECTED
    assert judge_claim(L5, L5.control.plays, measured).verdict is Verdict.FAILS
    assert told(L5, Evidence(measured, L5.plays, SETTINGS))
    check_pictures(L5, measured, SETTINGS)


def test_the_chain_value_by_value():
    row = torch.ones(1, 8)
    row[0, 3] = VALUE
    steps = half_norm(row.half())
    assert math.isinf(row.half()[0, 3])
    assert LIMIT == 64504
    assert math.isinf(steps["mean"])
    assert float(steps["root"]) == 0.0
    assert steps["y"].isnan().tolist() == [[i == 3 for i in range(8)]]


def test_without_overflow_the_half_norm_is_a_norm():
    row = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(4)).half()
    exact = row.double() / row.double().square().mean(-1, keepdim=True).sqrt()
    assert float((half_norm(row)["y"].double() - exact).abs().max()) < 4 * 4 * 2.0**-11


def test_what_each_arm_measures(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    assert by_arm["half"]["square/zero"] == WIDTH
    assert by_arm["half"]["square/length"] == 0.0
    assert by_arm["half"]["value/length"] is None
    assert by_arm["wide"]["value/nan"] == 1
    assert by_arm["wide-clamped"]["value/length"] == pytest.approx(1, abs=1e-3)
    assert by_arm["half"]["chain"] == "x ∞, square ∞, mean ∞, root 0, y NaN"


def test_statistics_that_overflow_again_are_seen(monkeypatch, measure_study, judge_claim):
    """A normkit that took its statistics in float16 would lose the verdict."""
    monkeypatch.setattr(module, "rms_norm", lambda x, eps: half_norm(x.half())["y"])
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(L5, L5.plays, broken).verdict is Verdict.FAILS


def test_a_clamp_that_comes_too_late_is_seen(monkeypatch, measure_study, judge_claim):
    monkeypatch.setattr(module, "LIMIT", 66000.0)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(L5, L5.plays, broken).verdict is Verdict.FAILS
