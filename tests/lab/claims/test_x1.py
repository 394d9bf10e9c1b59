"""X1: the count itself, and what would be judged of a fused nn.RMSNorm."""

from __future__ import annotations

import torch
from pictures import check_pictures
from torch import nn

from normkit.lab.claim import Evidence
from normkit.lab.claims.x1_operators import CLAIMS, STUDY, operators
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(X1,) = CLAIMS


def test_verdict_controls_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(X1, X1.plays, measured).verdict
    assert verdict is Verdict.FAILS
    assert flips(verdict, judge_claim(X1, X1.control.plays, measured).verdict)
    assert flips(verdict, judge_claim(X1, X1.planted.plays, measured).verdict)
    assert "pow" in told(X1, Evidence(measured, X1.plays, SETTINGS))
    check_pictures(X1, measured, SETTINGS)


def test_what_counts():
    """Views start no kernel; a reduction is an operator, but not one of full size."""
    x = torch.randn(4, 6)
    seen = operators(lambda: (x.reshape(2, 12).unflatten(1, (3, 4)) * 2).mean(-1).exp(), x.numel())
    assert seen == [("mul", True), ("mean", False), ("exp", False)]


def test_operators_written_out_are_counted_as_the_module_s():
    """nn.RMSNorm's chain, written by hand, gives the same list of operators."""
    x, w = torch.randn(4, 6), torch.randn(6)
    by_hand = operators(lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(1e-6)) * w, x.numel())
    norm = nn.RMSNorm(6)
    assert by_hand == operators(lambda: norm(x), x.numel())


def test_a_fused_one_would_hold(measure_study, judge_claim, altered):
    fused = altered(measure_study(STUDY, SETTINGS), "operators", lambda _: 1)
    assert judge_claim(X1, X1.plays, fused).verdict is Verdict.HOLDS
