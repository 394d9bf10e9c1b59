from dataclasses import replace

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.f1_last_layer_gradient import CLAIMS, DEPTHS, STUDY
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.initial import INITIALS
from normkit.lab.settings import Settings
from normkit.lab.verdict import Outcome, Verdict, combine, flips

(F1,) = CLAIMS


def invented(post: float, pre: float, spread: float = 0.0) -> list[Measurement]:
    """Gradients ∝ L^post and ∝ L^pre under Xavier."""
    return [
        Measurement(
            STUDY.id, f"{wiring}/xavier", seed, {"gradient": [2.0 * d ** (p + spread * (seed - 2)) for d in DEPTHS]}
        )
        for wiring, p in (("post", post), ("pre", pre))
        for seed in range(5)
    ]


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    corpus, settings = load_corpus(), Settings()
    return [
        Measurement(
            STUDY.id,
            arm.name,
            seed,
            STUDY.measure({**arm.params, "networks": 2}, Bench(settings, Draws(STUDY.id, arm.name, seed), corpus)),
        )
        for arm in STUDY.arms(settings)
        if arm.name.endswith("/xavier")
        for seed in range(3)
    ]


@pytest.mark.slow
def test_the_control_flips_what_is_measured(measured, judge_claim):
    # Two networks a seed and three seeds do not settle it at half tolerance; the run uses five of four.
    verdict = judge_claim(F1, F1.plays, measured).given
    assert flips(verdict, judge_claim(F1, F1.control.plays, measured).given)


@pytest.mark.parametrize(
    ("post", "pre", "verdict"),
    [
        (0.0, -0.5, Verdict.CORRECTED),  # the theory
        (0.6, 0.0, Verdict.HOLDS),  # the sentence
        (0.0, 0.0, Verdict.FAILS),  # no difference
        (-0.5, 0.0, Verdict.FAILS),  # the other way round
        (0.25, -0.3, Verdict.UNDECIDED),  # between the exponents
    ],
)
def test_each_verdict_is_reached(post, pre, verdict, judge_claim):
    assert judge_claim(F1, F1.plays, invented(post, pre)).verdict == verdict


def test_noise_leaves_it_open(judge_claim):
    judgement = judge_claim(F1, F1.plays, invented(0.2, -0.3, spread=0.3))
    assert combine([c.outcome() for c in judgement.literal]) is Outcome.OPEN
    assert judgement.verdict == Verdict.UNDECIDED


def test_the_gradient_is_that_of_the_last_down_projection():
    from normkit.lab.claims import f1_last_layer_gradient as module
    from normkit.lab.model.training import next_byte_loss
    from normkit.lab.model.transformer import build

    corpus, draws = load_corpus(), Draws(STUDY.id, "pre/xavier", 0)
    seen = {}

    def spy(config, d):
        seen["model"] = build(config, d)
        return seen["model"]

    def loss(model, windows):
        seen["windows"] = windows
        return next_byte_loss(model, windows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build", spy)
        patch.setattr(module, "next_byte_loss", loss)
        params = {"wiring": "pre", "init": "xavier", "width": 64}
        got = module._gradient(params, Bench(Settings(), draws, corpus), draws, 2)
    model = seen["model"]
    next_byte_loss(model, seen["windows"]).backward()
    assert got == pytest.approx(float(model.feed_forwards[-1].down.weight.grad.norm()), rel=1e-6)
    assert got != pytest.approx(float(model.feed_forwards[0].down.weight.grad.norm()), rel=1e-2)


def test_every_initialisation_has_both_wirings_and_full_is_wider():
    for mode in ("quick", "full"):
        arms = STUDY.arms(replace(Settings(), mode=mode))
        assert {a.name for a in arms} == {f"{w}/{i}" for w in ("post", "pre") for i in INITIALS}
    assert {a.params["width"] for a in STUDY.arms(replace(Settings(), mode="full"))} == {128}


def test_summary_and_figures_cover_every_initialisation(told):
    made = [
        Measurement(STUDY.id, f"{wiring}/{init}", seed, {"gradient": [1.0 + seed] * len(DEPTHS)})
        for wiring in ("post", "pre")
        for init in INITIALS
        for seed in range(3)
    ]
    e = Evidence(made, F1.plays, Settings())
    assert "Xavier" in told(F1, e)
    first, second = F1.figures(e)
    assert [p.title for p in second.panels] == [init for init in INITIALS if init != "xavier"]
    assert len(first.panels) == 2
    assert len(second.panels) == len(INITIALS) - 1
    assert torch.tensor(first.panels[0].series[0].y).isfinite().all()
