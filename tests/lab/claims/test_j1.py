"""J1: the bound against a search for larger logits, the entropy against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import j1_qk_bound as module
from normkit.lab.claims.j1_qk_bound import CLAIMS, SCALES, STUDY, entropy, logits
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict
from normkit.modules import QKNorm

SETTINGS = Settings(seeds=(0, 1, 2))
(J1,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(J1, J1.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(J1, J1.control.plays, measured).verdict is Verdict.FAILS
    assert told(J1, Evidence(measured, J1.plays, SETTINGS))
    check_pictures(J1, measured, SETTINGS)


def test_logits_and_entropy_by_their_definitions():
    q, k = (torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))
    scores = logits(q, k)
    for h in range(2):
        for t in range(5):
            row = [sum(float(a * b) for a, b in zip(q[t, h], k[s, h], strict=True)) / math.sqrt(3) for s in range(5)]
            assert scores[h, t].tolist() == pytest.approx(row)
            weights = [math.exp(v) for v in row]
            p = [w / sum(weights) for w in weights]
            found = float(entropy(scores)[h, t])
            assert found == pytest.approx(-sum(v * math.log(v) for v in p) / math.log(5))
    assert float(entropy(torch.zeros(1, 7, dtype=torch.float64))) == pytest.approx(1)


def test_bare_logits_grow_with_the_square(measure_study):
    for m in measure_study(STUDY, SETTINGS):
        if m.arm.startswith("bare"):
            first = m.values["of bound"][0]
            assert m.values["of bound"] == pytest.approx([first * c * c for c in SCALES])


@pytest.mark.parametrize("mutation", ["full", "none", "eps"])
def test_another_norm_is_seen(mutation, monkeypatch, measure_study, judge_claim):
    """All heads in one statistic, no statistic at all, or an ε that shows: each must cost the verdict."""

    class Other(QKNorm):
        def __init__(self, dim, heads, *, eps, **kwargs):
            super().__init__(dim, heads, eps=0.3 if mutation == "eps" else eps, **kwargs)

        def forward(self, q, k):
            if mutation == "none":
                return q, k
            if mutation == "full":
                roots = (x.square().mean((-2, -1), keepdim=True).sqrt() for x in (q, k))
                return tuple(x / r for x, r in zip((q, k), roots, strict=True))
            return super().forward(q, k)

    monkeypatch.setattr(module, "QKNorm", Other)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(J1, J1.plays, broken).verdict is Verdict.FAILS
