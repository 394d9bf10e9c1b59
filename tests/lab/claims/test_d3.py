"""D3: the closed form of what γ and β leave, against independent computations."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claims.d3_identity_recovery import CLAIMS, STUDY, TOKENS, WIDTH, _recovered, left_over
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
IDENTITY, RESTORED = CLAIMS


def test_closed_form_to_first_order():
    assert left_over(True) == pytest.approx(1.5 / WIDTH, rel=0.02)
    assert left_over(False) == pytest.approx(0.5 / WIDTH, rel=0.02)


def test_closed_form_against_a_large_sample():
    z = torch.randn(200_000, WIDTH, generator=torch.Generator().manual_seed(1))
    s = z.std(-1, correction=0).double()
    error = 4 * 2 * float(s.std()) / math.sqrt(len(s))  # of 1 − mean², four standard errors
    assert left_over(True) == pytest.approx(1 - float(s.mean()) ** 2, abs=error)


@pytest.mark.parametrize("name", ["batch", "layer", "rms"])
def test_no_other_line_does_better(name):
    """The fit is the optimum: every nudge of γ·N(x) + β away from it raises the residual."""
    x = torch.randn(300, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    best = _recovered(x, name, fitted_on=len(x))
    residual = (x - best).square().sum(0)
    for nudged in (best + 0.01, best - 0.01, best + 0.01 * (best - best.mean(0)), best - 0.01 * (best - best.mean(0))):
        assert ((x - nudged).square().sum(0) > residual).all()


def test_batch_norm_brings_everything_back(measure_study):
    for m in measure_study(STUDY, SETTINGS):
        if m.arm == "batch":
            assert m.values["worst"] < 1e-13
            assert m.values["shift"] == pytest.approx(1.0)
            assert m.values["scale"] == pytest.approx(1.0)


def test_verdicts_follow_the_numbers(measure_study, judge_claim, altered):
    measurements = measure_study(STUDY, SETTINGS)
    everything = altered(measurements, "residual", lambda _: 1e-30)
    assert judge_claim(IDENTITY, IDENTITY.plays, everything).verdict is Verdict.HOLDS
    off = altered(measurements, "residual", lambda v: 1.5 * v)
    assert judge_claim(IDENTITY, IDENTITY.plays, off).verdict is Verdict.FAILS
    half = altered(measurements, "scale", lambda _: 0.5)
    assert judge_claim(RESTORED, RESTORED.plays, half).verdict is Verdict.FAILS
    assert TOKENS > 2 * WIDTH
