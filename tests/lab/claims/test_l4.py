"""L4: the theory of storage against rounding itself, the limits of decay, and verdicts that move with them."""

from __future__ import annotations

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import l4_one_plus_weight as module
from normkit.lab.claims.l4_one_plus_weight import CLAIMS, SPREAD, STUDY, TARGETS, storage_error
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(L4,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(L4, L4.plays, measured).verdict is Verdict.CORRECTED
    assert judge_claim(L4, L4.control.plays, measured).verdict is Verdict.FAILS
    assert told(L4, Evidence(measured, L4.plays, SETTINGS))
    check_pictures(L4, measured, SETTINGS)


@pytest.mark.parametrize("spread", [SPREAD, 0.07, 0.12])
def test_storage_error_against_rounding_itself(spread):
    w = spread * torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = [float((v.bfloat16().double() - v).square().mean().sqrt()) for v in (1 + w, w)]
    assert found == pytest.approx(storage_error(spread), rel=0.02)


def test_pilot_numbers(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    assert by_arm["plain"]["storage"] == pytest.approx(1.8e-3, rel=0.02)
    assert by_arm["one-plus"]["storage"] == pytest.approx(3.3e-5, rel=0.02)
    assert by_arm["one-plus"]["sum of 1 and 15.8125"] == 16.8125
    assert by_arm["plain"]["decayed"] == pytest.approx([g / 2 for g in TARGETS])
    assert by_arm["one-plus"]["decayed"] == pytest.approx([(g + 1) / 2 for g in TARGETS])


def test_without_decay_the_sentence_would_hold(measure_study, judge_claim, altered):
    same = altered(measure_study(STUDY, SETTINGS), "decayed", lambda _: list(TARGETS))
    assert judge_claim(L4, L4.plays, same).verdict is Verdict.HOLDS


@pytest.mark.parametrize("key", ["storage", "function", "undecayed"])
def test_other_numbers_fail(key, measure_study, judge_claim):
    """One form alone is off: its storage error half again as large, its function or its gain away from the formula."""
    measured = [
        type(m)(m.study, m.arm, m.seed, {**m.values, key: _worse(m.values[key])}) if m.arm == "plain" else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(L4, L4.plays, measured).verdict is Verdict.FAILS


def _worse(value):
    return [v + 0.01 for v in value] if isinstance(value, list) else 1.5 * value + 1e-11


def test_a_gain_that_is_not_one_plus_w_is_seen(monkeypatch, measure_study, judge_claim):
    monkeypatch.setitem(module.SPECS, "one-plus", module.TORCH_RMS_NORM)
    broken = [
        measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) if m.arm == "one-plus" else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(L4, L4.plays, broken).verdict is Verdict.FAILS
