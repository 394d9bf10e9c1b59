"""K2: every identity and every condition counts, one at a time."""

from __future__ import annotations

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Bench, Evidence
from normkit.lab.claims import k2_folding as module
from normkit.lab.claims.k2_folding import CLAIMS, IDENTITIES, STUDY, WIDTH
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(K2,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(K2, K2.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(K2, K2.control.plays, measured).verdict is Verdict.FAILS
    assert told(K2, Evidence(measured, K2.plays, SETTINGS))
    check_pictures(K2, measured, SETTINGS)


def test_the_rotation_is_one():
    q = module._parts(Bench(SETTINGS, Draws(STUDY.id, "x", 0))).rotation
    torch.testing.assert_close(q @ q.T, torch.eye(WIDTH, dtype=torch.float64), rtol=0, atol=1e-13)
    assert float((q - torch.eye(WIDTH, dtype=torch.float64)).abs().max()) > 0.5


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("side", ["sound", "broken"])
def test_each_side_counts(name, side, measure_study, judge_claim):
    wrong = {"sound": 1e-9, "broken": 1e-3}[side]
    world = [
        type(m)(m.study, m.arm, m.seed, {"apart": wrong}) if m.arm == f"{side}/{name}" else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(K2, K2.plays, world).verdict is Verdict.FAILS


def test_an_epsilon_would_break_the_cancellation(monkeypatch, measure_study, judge_claim):
    """ε = 10⁻⁵ leaves a trace of the scale that the second norm sees: the rule is strict enough to find it."""
    original = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda x, gain, eps: original(x, gain, eps=1e-5))
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(K2, K2.plays, broken).verdict is Verdict.FAILS
