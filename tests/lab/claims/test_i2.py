"""I2: nGPT's update and weights against their formulas, and what a step off the sphere would be judged."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.i2_sphere import ALPHA, CLAIMS, STUDY, angle
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.ngpt import build_ngpt, ending_on_sphere, on_sphere, to_sphere
from normkit.lab.model.training import Schedule, train_model
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(I2,) = CLAIMS
SETTINGS = Settings(seeds=(0,))
SMALL = TransformerConfig(layers=2, width=24, heads=2)


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    return measure_text(STUDY, SETTINGS)


def test_it_holds_and_the_control_flips(measured, judge_claim, told):
    verdict = judge_claim(I2, I2.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(I2, I2.control.plays, measured).verdict)
    for plays in (I2.plays, I2.control.plays):
        e = Evidence(measured, plays, SETTINGS)
        assert told(I2, e)
        assert [len(p.series) for p in I2.figures(e)[0].panels] == [4, 4]


@pytest.mark.parametrize(
    ("key", "change"),
    [("off sphere", lambda v: v + 1e-5), ("off law", lambda v: v + 1e-6), ("beside", lambda v: v + 1e-6)],
)
def test_what_would_break_it_is_seen(key, change, measured, judge_claim, altered):
    assert judge_claim(I2, I2.plays, altered(measured, key, change)).verdict is Verdict.FAILS


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_step_of_another_length_is_seen(factor, judge_claim, monkeypatch):
    """A network that walks a tenth less or more of the way leaves the law of the angle, though not the sphere."""
    from normkit.lab.claims import i2_sphere

    made = i2_sphere._network

    def other(params, bench):
        model = made(params, bench)
        for step in model.steps:
            step.get_parameter("alpha").data *= factor
        return model

    monkeypatch.setattr(i2_sphere, "_network", other)
    params = {"wiring": "ngpt", "state": "fresh"}
    values = i2_sphere._measure(params, Bench(SETTINGS, Draws("sphere", "a", 0), load_corpus()))
    assert values["off sphere"] < 1e-10
    assert values["off law"] > 1e-4


def test_the_law_of_the_angle_on_a_circle():
    theta = 1.1
    h, b = torch.tensor([[1.0, 0.0], [math.cos(theta), math.sin(theta)]], dtype=torch.float64)
    walked = h + ALPHA * (b - h)
    phi = math.atan2(float(walked[1]), float(walked[0]))
    assert math.tan(phi) == pytest.approx(ALPHA * math.sin(theta) / (1 - ALPHA + ALPHA * math.cos(theta)), rel=1e-14)
    assert float(angle(h, walked)) == pytest.approx(phi, rel=1e-14)
    assert float(angle(h, h + 1e-9 * (b - h))) == pytest.approx(1e-9 * math.sin(theta), rel=1e-6)


def lengths(model) -> torch.Tensor:
    """All that shall be 1: length of rows of maps that read the stream, of columns of those that write to it."""
    found = [model.embedding.weight.detach().double().square().mean(1)]
    for name, linear in model.weights().items():
        found.append(
            linear.weight.detach().double().square().sum(0 if name.rpartition("/")[2] in ("output", "down") else 1)
        )
    return torch.cat(found)


def test_weights_are_on_the_sphere_after_building_and_after_training():
    corpus = load_corpus()
    model = build_ngpt(SMALL, Draws("t", "a", 1))
    assert float((lengths(model) - 1).abs().max()) < 1e-6
    before = [p.detach().clone() for p in model.parameters()]
    train_model(
        model,
        Schedule(3e-3, steps=5, rows=2),
        corpus,
        Draws("t", "a", 1),
        during=ending_on_sphere(model),
        backward=on_sphere,
    )
    assert float((lengths(model) - 1).abs().max()) < 1e-6
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "something never learns"


def test_without_the_projection_training_leaves_the_sphere():
    model = build_ngpt(SMALL, Draws("t", "a", 1))
    train_model(model, Schedule(3e-3, steps=5, rows=2), load_corpus(), Draws("t", "a", 1))
    assert float((lengths(model) - 1).abs().max()) > 1e-4
    to_sphere(model)
    assert float((lengths(model) - 1).abs().max()) < 1e-6


def test_the_update_is_the_formula():
    model = build_ngpt(SMALL, Draws("t", "a", 2))
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(4))

    def unit(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    with torch.no_grad():
        for step in model.steps:
            step.alpha.copy_(torch.rand(24, generator=torch.Generator().manual_seed(5)))
        *_, got = model.stream(tokens)
        x = model.embedding(tokens)
        for pair in zip(model.attentions, model.feed_forwards, strict=True):
            for f, alpha in zip(pair, (model.steps[0].alpha,) * 2, strict=True):
                x = unit((1 - alpha) * x + alpha * unit(f(x)))
    torch.testing.assert_close(got, x, rtol=1e-5, atol=1e-5)
