"""C2: sampling laws of a batch's statistics against numbers computed another way, and verdicts that move with them."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims.c2_batch_noise import CLAIMS, CORRELATION, LENGTH, SIZES, STUDY, effective, sampling
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C2,) = CLAIMS


def test_effective_tokens_are_those_of_the_covariance():
    """1/m_eff is the mean of the correlation matrix of the tokens."""
    one = torch.full((LENGTH, LENGTH), CORRELATION, dtype=torch.float64).fill_diagonal_(1.0)
    whole = torch.block_diag(one, one, one)
    assert effective(3 * LENGTH) == pytest.approx(1 / float(whole.mean()), rel=1e-12)
    assert effective(LENGTH) < LENGTH


def test_the_standard_error_is_that_of_a_variance_of_two():
    """Spread of √(sample variance) over repeats, for s² of two numbers: χ²₁ has the kurtosis 15."""
    z = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = z.square().std(dim=1)
    expected = sampling(15.0) * math.sqrt(16384 / 4096)
    assert float(spread.std() / spread.mean()) == pytest.approx(expected, rel=0.25)  # 200 repeats: 5 %, five of those


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(C2, C2.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(C2, C2.control.plays, measured).verdict)
    assert told(C2, Evidence(measured, C2.plays, SETTINGS))
    (chart,) = C2.figures(Evidence(measured, C2.plays, SETTINGS))
    assert list(chart.panels[1].series[0].x) == list(SIZES)


def test_counting_correlated_tokens_as_independent_fails(measure_study, judge_claim):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(C2, {"batch": "sequences", "sequences": "sequences"}, measured).verdict is Verdict.FAILS
    assert judge_claim(C2, {"batch": "batch", "sequences": "batch"}, measured).verdict is Verdict.FAILS


@pytest.mark.parametrize("key", ["mean/512", "var/2"])
def test_noise_off_the_law_is_seen(key, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda v: 1.3 * v)
    assert judge_claim(C2, C2.plays, wrong).verdict is Verdict.FAILS
