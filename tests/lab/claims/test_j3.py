"""J3: the sharded full-width norm against the formula, and what a missing share does."""

from __future__ import annotations

import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import j3_qk_coverage as module
from normkit.lab.claims.j3_qk_coverage import CLAIMS, EPS, STUDY, reduced
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(J3,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(J3, J3.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(J3, J3.control.plays, measured).verdict is Verdict.FAILS
    assert told(J3, Evidence(measured, J3.plays, SETTINGS))
    check_pictures(J3, measured, SETTINGS)


def test_uneven_shards_sum_to_the_formula():
    x = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    w = torch.rand(21, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parts = reduced(list(x.split([1, 4, 2], 1)), list(w.split([3, 12, 6])))
    exact = x / (x.square().mean((1, 2), keepdim=True) + EPS).sqrt() * w.reshape(7, 3)
    torch.testing.assert_close(torch.cat(parts, 1), exact, rtol=1e-13, atol=1e-13)


def test_a_forgotten_shard_is_seen(monkeypatch, measure_study, judge_claim):
    def forgetful(shards, weights):
        return [*reduced(shards[:-1], weights[:-1]), *reduced(shards[-1:], weights[-1:])]

    monkeypatch.setattr(module, "reduced", forgetful)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(J3, J3.plays, broken).verdict is Verdict.FAILS


def test_heads_of_one_scale_would_not_tell_the_two_apart(measure_study, judge_claim, altered):
    same = altered(measure_study(STUDY, SETTINGS), "error", lambda v: min(v, 0.02))
    assert judge_claim(J3, J3.plays, same).verdict is Verdict.FAILS
