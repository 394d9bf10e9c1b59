"""G3: the gradient's profile is the loss's own, and Pre-Norm in DeepNorm's place is told apart."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claim import Bench
from normkit.lab.claims import find
from normkit.lab.claims.g3_thousand_layers import END, STUDY, WIDTH
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict


def test_the_ratio_is_that_of_the_losss_own_gradients():
    bench = Bench(Settings(), Draws(STUDY.id, "pre", 0), load_corpus())
    values = STUDY.measure({"wiring": "pre", "blocks": 2 * END}, bench)
    model = build(TransformerConfig(layers=2 * END, width=WIDTH, heads=2, wiring="pre"), bench.draws)
    next_byte_loss(model, random_windows(bench, bench.draws, 2)).backward()
    norms = [float(model.weights()[f"{i}/down"].weight.grad.norm()) for i in range(2 * END)]
    assert values["gradient"] == pytest.approx(norms, rel=1e-5)
    first, last = torch.tensor(norms[:END]).norm(), torch.tensor(norms[-END:]).norm()
    assert values["ratio"] == pytest.approx(float(first / last), rel=1e-5)
    assert math.isfinite(values["loss"])


@pytest.mark.slow
def test_verdict_and_control(measure_text, judge_claim):
    (claim,) = find(["G3"])
    measurements = measure_text(STUDY, Settings())  # all five seeds: three leave the control open
    assert judge_claim(claim, claim.plays, measurements).verdict is Verdict.HOLDS
    assert judge_claim(claim, claim.control.plays, measurements).verdict is Verdict.FAILS
