"""D6 and D7: the angle of the mean, and the estimate from a part, against other ways to the same numbers."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims import d6_mean_offset, d7_partial_rms
from normkit.lab.claims.d7_partial_rms import WIDTH, K, estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
MODULES = (d6_mean_offset, d7_partial_rms)


def test_the_angle_by_hand():
    """(0, 2) has mean 1 and deviation 1: layer norm gives (−1, 1), RMSNorm (0, √2), 45° apart."""
    assert d6_mean_offset.law(1.0) == pytest.approx(math.cos(math.pi / 4), rel=1e-15)
    a, b = torch.tensor([[-1.0, 1.0]]), torch.tensor([[0.0, 2**0.5]])
    assert float(d6_mean_offset._cosines(a, b)) == pytest.approx(math.cos(math.pi / 4), rel=1e-6)
    assert math.degrees(math.acos(d6_mean_offset.law(0.1))) == pytest.approx(5.7, abs=0.05)


def test_pilot_numbers():
    assert [round(d6_mean_offset.law(v), 3) for v in (0.1, 0.5, 1.0, 2.0)] == [0.995, 0.894, 0.707, 0.447]
    assert estimate(K)[1] == pytest.approx(0.120, abs=0.002)
    assert estimate(K)[0] == pytest.approx(1, abs=0.02)


def test_the_estimate_is_a_beta_distributions():
    """Integrate √(d/k·b) over the density of Beta(k/2, (d − k)/2) by midpoints."""
    a, c = K / 2, (WIDTH - K) / 2
    b = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    log = (a - 1) * b.log() + (c - 1) * (1 - b).log()
    weight = (log - log.max()).exp()
    root = (WIDTH / K * b).sqrt()
    mean = float((weight * root).sum() / weight.sum())
    square = float((weight * root.square()).sum() / weight.sum())
    assert estimate(K) == pytest.approx((mean, math.sqrt(square - mean**2)), rel=1e-6)
    # For k ≪ d the paper's rule of thumb, times the part that RMS_k shares with RMS_d.
    assert estimate(K)[1] == pytest.approx(math.sqrt((1 - K / WIDTH) / (2 * K)), rel=0.02)


@pytest.mark.parametrize("module", MODULES, ids=["D6", "D7"])
def test_the_claims_hold_and_the_controls_fail(module, measure_study, judge_claim, told):
    (claim,) = module.CLAIMS
    measured = measure_study(module.STUDY, SETTINGS)
    verdict = judge_claim(claim, claim.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(claim, claim.control.plays, measured).verdict)
    e = Evidence(measured, claim.plays, SETTINGS)
    assert told(claim, e)
    assert claim.figures(e)


@pytest.mark.parametrize(
    ("module", "key", "change"),
    [
        (d6_mean_offset, "off/float64", lambda row: [v + 1e-11 for v in row]),
        (d6_mean_offset, "off/float32", lambda row: [v + 1e-4 for v in row]),
        (d7_partial_rms, f"std/{K}", lambda v: v * 1.2),
        (d7_partial_rms, f"mean/{K}", lambda v: v * 1.03),
    ],
)
def test_off_the_law_is_seen(module, key, change, measure_study, judge_claim, altered):
    (claim,) = module.CLAIMS
    wrong = altered(measure_study(module.STUDY, SETTINGS), key, change)
    assert judge_claim(claim, claim.plays, wrong).verdict is Verdict.FAILS
