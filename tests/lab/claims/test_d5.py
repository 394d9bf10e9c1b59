"""D5: the closed form of the gradient, and verdicts for gradients that keep a direction."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims import d5_backward as module
from normkit.lab.claims.d5_backward import CLAIMS, STUDY, WIDTH, differences
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(D5,) = CLAIMS


@pytest.mark.parametrize("name", ["layer", "rms", "detached"])
def test_the_gradient_is_the_closed_form(name):
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(7, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    weight = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    x, g = 3 * x + 1, weight * dy
    sigma = x.std(-1, unbiased=False, keepdim=True)
    hat = (x - x.mean(-1, keepdim=True)) / sigma
    want = g / sigma
    if name == "layer":
        want = (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True)) / sigma
    if name == "rms":
        root = x.square().mean(-1, keepdim=True).sqrt()
        want = (g - x / root * (g * x / root).mean(-1, keepdim=True)) / root
    torch.testing.assert_close(module._gradient(module._NORMS[name], x, weight, dy), want, rtol=1e-12, atol=1e-14)


def test_differences_of_a_cubic():
    x, dy = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert differences(lambda rows: rows**3, x, dy).tolist() == pytest.approx([3, -12], rel=1e-9)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(D5, D5.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(D5, D5.control.plays, measured).verdict)
    e = Evidence(measured, D5.plays, SETTINGS)
    assert told(D5, e)
    assert len(D5.figures(e)[0].panels) == 2
    # RMSNorm takes out x alone: what it keeps along 1 must be seen as well.
    assert judge_claim(D5, {**D5.plays, "norm": "rms"}, measured).verdict is Verdict.FAILS


@pytest.mark.parametrize("key", ["mean", "normed", "longest", "differences", "narrow"])
def test_a_gradient_that_keeps_something_is_seen(key, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda v: v + 1e-5 + (1 - v if key == "longest" else 0))
    assert judge_claim(D5, D5.plays, wrong).verdict is Verdict.FAILS
