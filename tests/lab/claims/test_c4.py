"""C4: one token, batch statistics, and the bias that is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.lab.claims.c4_decode import CLAIMS, STUDY, _norm
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(CLAIM,) = CLAIMS


def test_formula_is_pytorchs_where_there_is_a_batch():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator)
    weight, bias = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    theirs = nn.BatchNorm1d(4, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        theirs.bias.copy_(bias)
    assert torch.allclose(_norm("batch", x, weight, bias), theirs(x.transpose(1, 2)).transpose(1, 2), atol=1e-12)


def test_measured(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    assert by_arm["batch"]["from_bias"] == 0.0
    assert by_arm["batch"]["apart"] == 0.0
    assert by_arm["batch"]["normkit_refuses"]
    assert by_arm["batch"]["torch_refuses"]
    assert by_arm["batch"]["strangers"] > 0.1
    assert by_arm["layer"]["strangers"] == by_arm["rms"]["strangers"] == 0.0


@pytest.mark.parametrize(("key", "value"), [("from_bias", 1e-15), ("apart", 0.0)])
def test_less_would_fail(key, value, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda _: value)
    assert judge_claim(CLAIM, CLAIM.plays, wrong).verdict is Verdict.FAILS
