"""B5: the right side against the whole Jacobian, and verdicts of a layer that projects less."""

from __future__ import annotations

import pytest
import torch

from normkit.functional import batch_norm
from normkit.lab.claim import Evidence
from normkit.lab.claims.b5_gradient_identity import CLAIMS, STUDY, C, L, N, right_side
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(B5,) = CLAIMS


def test_the_right_side_is_the_jacobians():
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(N, L, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    weight = torch.tensor([0.5, -3.0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda v: batch_norm(v, None, None, weight, training=True, eps=0.0), x
    )
    dx = torch.einsum("nlc,nlcijk->ijk", g, jacobian)
    torch.testing.assert_close(dx.square().sum((0, 1)), right_side(x, g, weight), rtol=1e-11, atol=1e-13)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(B5, B5.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(B5, B5.control.plays, measured).verdict)
    e = Evidence(measured, B5.plays, SETTINGS)
    assert told(B5, e)
    (chart,) = B5.figures(e)
    assert len(chart.panels[0].series[0].y) == C


@pytest.mark.parametrize("key", ["off", "longest"])
def test_a_longer_gradient_is_seen(key, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda v: 1 + 1e-9)
    assert judge_claim(B5, B5.plays, wrong).verdict is Verdict.FAILS
