"""A1: the slope of ln rms is ln g; the tolerance is what a random layer's sampling allows."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claims.a1_depth_gain import CLAIMS, DEPTH, STUDY, WIDTH, _log_rms, _run, _slope, tolerance
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))


def test_slope_of_a_line():
    assert _slope([3 + 0.25 * i for i in range(20)]) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("net", ["linear", "relu"])
def test_gain_of_scaled_identities(net):
    """Layers 1.5·I on positive numbers: the gain is exactly 1.5 a layer, both ways."""
    weights = 1.5 * torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    x = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    for states in _run(weights, x, torch.ones_like(x), {"net": net, "normalized": False}):
        assert len(states) == 7
        assert _slope(_log_rms(states)) == pytest.approx(math.log(1.5), abs=1e-12)
    normalized, _ = _run(weights, x, torch.ones_like(x), {"net": net, "normalized": True})
    assert _log_rms(normalized[1:]) == pytest.approx([math.log(1.5)] * 6, abs=1e-5)  # ε = 1e-6 beside rms² near 0.3


def test_tolerance_is_the_sampling_of_one_layer():
    """Monte Carlo of the step that the bound is derived from: one input through one ReLU layer."""
    z = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(0))
    step = 0.5 * torch.log(2 * torch.relu(z).square().mean(-1))
    bias, deviation = 5 / (4 * WIDTH), math.sqrt(5 / (4 * WIDTH))
    assert float(step.mean()) == pytest.approx(-bias, abs=4 * deviation / 4000**0.5)
    assert float(step.std()) == pytest.approx(deviation, rel=0.06)
    assert tolerance("relu") == pytest.approx(2 * (bias + 3 * deviation * math.sqrt(1.2 / DEPTH)))
    assert 2 * tolerance("relu") < math.log(1.2)  # even doubled, no gain is not a gain of 1.2


@pytest.mark.slow
def test_fails_when_a_slope_is_off(measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), "backward/1.2", lambda v: v + 0.15 if isinstance(v, float) else v)
    assert judge_claim(CLAIMS[0], CLAIMS[0].plays, wrong).verdict is Verdict.FAILS
