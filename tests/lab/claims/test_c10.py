"""C10: each choice of the code made the other way is seen, and seen where it acts."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims.c10_batch_norm_code import CLAIMS, CODES, COUNT, KEYS, STUDY, C, Formula
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C10,) = CLAIMS
ACTS = {
    "remembers-biased": {"running_var", "inference"},
    "normalises-unbiased": {"output", "gradient"},
    "momentum-of-the-old": {"running_mean", "running_var", "inference"},
}


def test_by_hand():
    """1, 2 and 3: mean 2, biased variance 2/3, unbiased 1; a tenth of each beside nine tenths of 0 and 1."""
    code = Formula()
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(1, 3, 1).expand(1, 3, C)
    y = code.train(x, torch.ones(C), torch.zeros(C))
    assert float(y[0, 2, 0]) == pytest.approx((2 / 3 + 1e-5) ** -0.5, rel=1e-14)
    assert float(code.mean[0]) == pytest.approx(0.2, rel=1e-14)
    assert float(code.var[0]) == pytest.approx(0.9 + 0.1, rel=1e-14)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(C10, C10.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(C10, C10.control.plays, measured).verdict)
    e = Evidence(measured, C10.plays, SETTINGS)
    assert told(C10, e)
    (chart,) = C10.figures(e)
    assert chart.panels[0].series[0].y == pytest.approx([COUNT / (COUNT - 1)] * 6)


@pytest.mark.parametrize("code", ACTS)
def test_every_other_choice_fails_and_acts_where_it_should(code, measure_study, judge_claim):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(C10, {**C10.plays, "code": code}, measured).verdict is Verdict.FAILS
    for m in measured:
        if m.arm == code:
            assert {key for key in KEYS if m.values[key] > 1e-3} == ACTS[code]
    assert set(ACTS) | {"article", "normkit"} == set(CODES)
