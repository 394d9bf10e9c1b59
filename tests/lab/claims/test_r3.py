"""R3: the article's class against the formula, the ε that torch really uses, and verdicts that move with them."""

from __future__ import annotations

import pytest
import torch
from pictures import check_pictures
from torch import nn

from normkit.lab.claim import Evidence
from normkit.lab.claims import r3_article_rmsnorm as module
from normkit.lab.claims.r3_article_rmsnorm import CLAIMS, DTYPES, STUDY, ArticleRMSNorm, _epsilon
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(R3,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(R3, R3.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(R3, R3.control.plays, measured).verdict is Verdict.FAILS
    assert told(R3, Evidence(measured, R3.plays, SETTINGS))
    check_pictures(R3, measured, SETTINGS)


def test_torch_s_default_is_the_float32_epsilon_in_every_dtype(measure_study):
    """Of torch 2.13; another version may differ without the article's sentence failing."""
    for m in measure_study(STUDY, SETTINGS):
        for name in DTYPES:
            expected = 1e-6 if m.arm == "aligned" else 2.0**-23
            assert m.values[f"epsilon/torch/{name}"] == pytest.approx(expected, rel=0.02), (m.arm, name)
            assert m.values[f"epsilon/article/{name}"] == pytest.approx(1e-6, rel=0.02), (m.arm, name)


def test_normkit_agrees_as_well(measure_study):
    assert all(m.values["normkit"] < 1 for m in measure_study(STUDY, SETTINGS))


def test_the_article_s_class_is_the_formula():
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(8), dtype=torch.float32)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert float((ArticleRMSNorm(37)(x).detach().double() - exact).abs().max()) < 2e-6
    assert ArticleRMSNorm(37)(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("eps", [1e-8, 1e-6, 3e-5])
def test_an_epsilon_is_read_off_small_rows(eps):
    x = 1e-3 * torch.randn(64, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        assert _epsilon(nn.RMSNorm(100, eps=eps, dtype=torch.float64), x) == pytest.approx(eps, rel=1e-6)


def test_epsilon_outside_the_root_is_seen(monkeypatch, measure_study, judge_claim):
    class Outside(ArticleRMSNorm):
        def forward(self, x):
            return x / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    monkeypatch.setattr(module, "ArticleRMSNorm", Outside)
    broken = [measure_study.fresh(STUDY, SETTINGS, m.arm, m.seed) for m in measure_study(STUDY, SETTINGS)]
    assert judge_claim(R3, R3.plays, broken).verdict is Verdict.FAILS
