"""C6: the loops are the oracle, so they are held against PyTorch's own norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from normkit.coverage import COVERAGE
from normkit.lab.claims.c6_coverage import CLAIMS, EPS, GROUPS, SHAPE, STUDY, C, formula, loops
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0,))
(CLAIM,) = CLAIMS
TORCH = {
    "batch": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True, eps=EPS).transpose(1, 2),
    "layer": lambda x: F.layer_norm(x, (C,), eps=EPS),
    "instance": lambda x: F.instance_norm(x.transpose(1, 2), eps=EPS).transpose(1, 2),
    "group": lambda x: F.group_norm(x.transpose(1, 2), GROUPS, eps=EPS).transpose(1, 2),
}


@pytest.mark.parametrize("name", COVERAGE)
def test_loops_and_formula_are_pytorchs(name):
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    expected = TORCH[name](x)
    assert torch.allclose(loops(x, COVERAGE[name], C // GROUPS), expected, atol=1e-12)
    assert torch.allclose(formula(x, COVERAGE[name]), expected, atol=1e-12)


@pytest.mark.parametrize(("key", "value"), [("loops/group", 1e-11), ("formula/batch", 1e-11), ("loops/layer", 1e-3)])
def test_a_wrong_coverage_is_seen(key, value, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda _: value)
    assert judge_claim(CLAIM, CLAIM.plays, wrong).verdict is Verdict.FAILS
