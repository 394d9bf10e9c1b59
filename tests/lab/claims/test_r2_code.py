"""R2: the theory of rounding after every step against rounding itself, and verdicts of repaired and broken code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit.lab.claim import Evidence
from normkit.lab.claims import r2_layer_norm_code as module
from normkit.lab.claims.r2_layer_norm_code import CLAIMS, LOG_UNIFORM, NORMAL, STUDY, operators
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
R2, R2B = CLAIMS


def test_constants_against_rounding_itself():
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(500_000, dtype=torch.float64, generator=generator)
    spread = torch.rand(500_000, dtype=torch.float64, generator=generator).exp2()
    assert float((z.bfloat16().double() - z).square().mean()) == pytest.approx(NORMAL, rel=0.01)
    relative = ((spread.bfloat16().double() - spread) / spread).square().mean()
    assert float(relative) == pytest.approx(LOG_UNIFORM, rel=0.01)
    assert math.sqrt(LOG_UNIFORM) == pytest.approx(1.66e-3, rel=0.01)  # what nn.LayerNorm's error was found to be


def test_operators_that_run():
    x = torch.randn(3, 8)
    assert operators(lambda: nn.functional.layer_norm(x, (8,))) == ["native_layer_norm"]
    assert operators(lambda: x.rsqrt() * 2) == ["rsqrt", "mul"]


@pytest.mark.parametrize(("claim", "verdict"), [(R2, Verdict.HOLDS), (R2B, Verdict.CORRECTED)], ids=["R2", "R2b"])
def test_verdicts_and_controls(claim, verdict, measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(claim, claim.plays, measured).verdict is verdict
    assert flips(verdict, judge_claim(claim, claim.control.plays, measured).verdict)
    e = Evidence(measured, claim.plays, SETTINGS)
    assert told(claim, e)
    assert claim.figures(e)


def test_code_that_follows_the_text_would_hold(measure_study, judge_claim):
    plays = {**R2B.plays, "code": "text"}
    assert judge_claim(R2B, plays, measure_study(STUDY, SETTINGS)).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("key", "change"),
    [("error", lambda v: 1.15 * v), ("cast last", lambda v: 0.01), ("cast first", lambda v: 0.1), ("div", lambda v: 2)],
)
def test_other_findings_fail(key, change, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, change)
    assert judge_claim(R2B, R2B.plays, wrong).verdict is Verdict.FAILS


def test_the_assertion_is_torchs(measure_study):
    """`share` ≤ 1 is torch.allclose(atol=1e-6), at its edge too."""
    a, b = torch.tensor([2.0]), torch.tensor([2.0 + 2.0e-5])
    for scale in (0.9, 1.2):
        near = a + (b - a) * scale
        share = float((near - a).abs() / (module.ATOL + module.RTOL * a.abs()))
        assert (share <= 1) == torch.allclose(near, a, atol=1e-6)
