"""L1: five routes to a variance, against exact rational arithmetic and against each other's bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims import l1_variance as module
from normkit.lab.claims.l1_variance import CLAIMS, POWERS, STUDY, U
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(L1,) = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_study):
    return measure_study(STUDY, SETTINGS)


def test_verdict_control_and_summary(measured, judge_claim, told):
    assert judge_claim(L1, L1.plays, measured).verdict is Verdict.CORRECTED
    assert judge_claim(L1, L1.control.plays, measured).verdict is Verdict.FAILS
    assert "one pass" in told(L1, Evidence(measured, L1.plays, SETTINGS))
    check_pictures(L1, measured, SETTINGS)


@pytest.mark.parametrize("name", module.ALGORITHMS)
def test_algorithms_against_fractions(name):
    """Small integers: every intermediate is exact in float32, or one rounding away from a fraction."""
    x = torch.randint(-40, 40, (3, 37), generator=torch.Generator().manual_seed(5)).float()
    for row, found in zip(x.tolist(), module._VARIANCES[name](x).tolist(), strict=True):
        numbers = [Fraction(int(v)) for v in row]
        mean = sum(numbers) / len(numbers)
        exact = sum((v - mean) ** 2 for v in numbers) / len(numbers)
        assert found == pytest.approx(float(exact), rel=40 * U)


def test_pilot_orders_of_magnitude(measured):
    """Medians at μ/σ near 10² and 10³, of other rows than those of the literature's table."""
    by_arm = {m.arm: m.values["median"] for m in measured if m.seed == 0}
    at = {k: i for i, k in enumerate(POWERS)}
    assert 1e-4 < by_arm["one-pass"][at[7]] < 1e-2
    assert 1e-2 < by_arm["one-pass"][at[11]] < 1
    assert 1e-6 < by_arm["welford"][at[7]] < 1e-4
    assert 1e-4 < by_arm["welford"][at[15]] < 1e-1


def test_one_pass_loses_whole_steps_of_its_own_grid():
    """At 2¹³ the one-pass variance is a multiple of 4: that is the criterion's only ground."""
    z = torch.randn(64, 4096, generator=torch.Generator().manual_seed(9))
    found = module._one_pass(z + 2.0**13)
    assert bool((found % 4 == 0).all())
    assert bool((found != 0).any())


def test_an_uncorrected_mean_would_be_seen(measured, judge_claim, altered):
    off = altered(measured, "largest", lambda row: [v + 1e-3 for v in row])
    assert judge_claim(L1, L1.plays, off).verdict is Verdict.FAILS


def test_layer_norm_that_adds_epsilon_is_seen(monkeypatch, judge_claim, measured, measure_study):
    """Break the measured operator: ε = 0.01 in layer_norm must cost the verdict."""
    original = module.layer_norm
    monkeypatch.setattr(module, "layer_norm", lambda x, eps: original(x, eps=0.01))
    broken = [
        measure_study.fresh(STUDY, SETTINGS, "layer-norm", m.seed) if m.arm == "layer-norm" else m for m in measured
    ]
    assert judge_claim(L1, L1.plays, broken).verdict is Verdict.FAILS
