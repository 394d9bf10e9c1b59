"""M1: the two laws against plain arithmetic, and worlds in which they would not hold."""

from __future__ import annotations

import math

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import m1_sink_geometry as module
from normkit.lab.claims.m1_sink_geometry import CLAIMS, RATIOS, STUDY, cosine_at, kept
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(M1,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(M1, M1.plays, measured).verdict is Verdict.CORRECTED
    assert judge_claim(M1, M1.control.plays, measured).verdict is Verdict.FAILS
    assert told(M1, Evidence(measured, M1.plays, SETTINGS))
    check_pictures(M1, measured, SETTINGS)


def test_laws_by_hand():
    """Two orthogonal rests of length 1 and the same M = 3: cosine 9/10, sizes 1/√10."""
    r = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.6, 0.8]], dtype=torch.float64)
    assert float(cosine_at(r, 3.0)) == pytest.approx(0.9)
    assert kept(3.0) == pytest.approx(1 / math.sqrt(10))


def test_measured_sizes(measure_study):
    for m in measure_study(STUDY, SETTINGS):
        if m.arm == "massive":
            assert m.values["size"] == pytest.approx([kept(v) for v in RATIOS])
        if m.arm == "spread":
            assert m.values["size"] == pytest.approx([1.0] * len(RATIOS), abs=0.02)


def test_a_scale_that_stays_would_make_the_sentence_hold(measure_study, judge_claim, altered):
    flat = altered(measure_study(STUDY, SETTINGS), "size", lambda v: [1.0] * len(RATIOS) if isinstance(v, list) else v)
    assert judge_claim(M1, M1.plays, flat).verdict is Verdict.HOLDS


@pytest.mark.parametrize("mutation", ["eps", "layer"])
def test_another_norm_is_seen(mutation, monkeypatch, measure_study, judge_claim):
    """An ε of the size of a small token, or a mean that is subtracted, is off the law."""
    original = module.rms_norm

    def other(x, eps):
        return original(x, eps=1e-6) if mutation == "eps" else original(x - x.mean(-1, keepdim=True), eps=eps)

    monkeypatch.setattr(module, "rms_norm", other)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(M1, M1.plays, broken).verdict is Verdict.FAILS
