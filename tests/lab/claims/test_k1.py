"""K1: the mean square of d − 1 coordinates by its formula, and recentring that forgets a part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import k1_recentring as module
from normkit.lab.claims.k1_recentring import CLAIMS, EPS, STUDY, Stack, _normed
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(K1,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(K1, K1.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(K1, K1.control.plays, measured).verdict is Verdict.FAILS
    assert told(K1, Evidence(measured, K1.plays, SETTINGS))
    check_pictures(K1, measured, SETTINGS)


def test_compressed_norm_by_its_formula():
    """x/√((Σx² + (Σx)²)/d + ε) with d one more than there are coordinates."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    root = ((x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()) / 8 + EPS).sqrt()
    torch.testing.assert_close(_normed(x, "compressed"), x / root, rtol=1e-13, atol=1e-13)


def test_nothing_in_the_stack_has_mean_zero():
    stack = Stack.draw(Draws("x", "y", 0), "cpu")
    assert float(stack.first.mean(-1).abs().min()) > 0.3
    assert max(float(b.mean().abs()) for b in stack.bias) > 0.01
    assert float(stack.recentred().first.mean(-1).abs().max()) < 1e-14


@pytest.mark.parametrize("part", ["first", "down", "bias"])
def test_a_part_that_keeps_its_mean_is_seen(part, monkeypatch, measure_study, judge_claim):
    sound = Stack.recentred
    monkeypatch.setattr(Stack, "recentred", lambda self: replace(sound(self), **{part: getattr(self, part)}))
    broken = [
        measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) if m.arm in ("recentred", "compressed") else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(K1, K1.plays, broken).verdict is Verdict.FAILS


def test_a_fold_that_does_nothing_is_seen(monkeypatch, measure_study, judge_claim):
    class Nothing:
        folded = ()

    monkeypatch.setattr(module, "fold_", lambda *_: Nothing)
    broken = [
        measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) if m.arm == "fold" else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(K1, K1.plays, broken).verdict is Verdict.FAILS
