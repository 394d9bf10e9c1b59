import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import f2_layer_profile as module
from normkit.lab.claims.f2_layer_profile import CLAIMS, KINDS, LAYERS, ROWS, STUDY, WIDTH
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(F2,) = CLAIMS
THEORY = {"post/relu": 0.1, "post/swiglu": -0.3, "pre": -0.45, "deepnorm": 0.0}


def invented(slopes: dict[str, float]) -> list[Measurement]:
    """Profiles ∝ l^slope, by wiring or by wiring and kind."""
    return [
        Measurement(STUDY.id, arm.name, seed, {"gradient": [float(n) ** slope for n in range(1, LAYERS + 1)]})
        for arm in STUDY.arms(Settings())
        for slope in [slopes.get(arm.name, slopes.get(arm.name.partition("/")[0], 0.0))]
        for seed in range(5)
    ]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.CORRECTED),
        ({"post/relu": 0.6, "post/swiglu": 0.6}, Verdict.HOLDS),  # the sentence
        ({"post/relu": 0.6}, Verdict.FAILS),
        ({"post/swiglu": 0.0}, Verdict.FAILS),
        ({"pre": 0.0}, Verdict.FAILS),
        ({"deepnorm": -0.5}, Verdict.FAILS),
    ],
)
def test_each_verdict_is_reached(change, verdict, judge_claim):
    assert judge_claim(F2, F2.plays, invented(THEORY | change)).verdict is verdict


def test_the_control_flips(judge_claim):
    control = judge_claim(F2, F2.control.plays, invented(THEORY)).verdict
    assert flips(Verdict.CORRECTED, control)


@pytest.mark.slow
def test_the_control_flips_what_is_measured(measure_text, judge_claim):
    measured = measure_text(STUDY, Settings())
    verdict = judge_claim(F2, F2.plays, measured).given
    assert verdict is Verdict.CORRECTED
    assert flips(verdict, judge_claim(F2, F2.control.plays, measured).given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_profile_is_that_of_a_whole_backward(kind):
    draws = Draws(STUDY.id, f"pre/{kind}", 3)
    bench = Bench(Settings(), draws, load_corpus())
    squares = module._squares({"wiring": "pre", "kind": kind}, bench, draws)
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward=kind, norm=KINDS[kind], wiring="pre")
    model = build(config, draws)
    next_byte_loss(model, random_windows(bench, draws, ROWS)).backward()
    expected = [float(f.down.weight.grad.double().square().sum()) for f in model.feed_forwards]
    assert squares == pytest.approx(expected, rel=1e-6)
    assert squares[0] > squares[-1] > 0


def test_pre_norm_s_fall_is_that_of_its_stream_s_size():
    """The theory in the module's words: first over last gradient is rms(x_L) over rms(x_1), here within a third."""
    draws = Draws(STUDY.id, "pre/relu", 11)
    bench = Bench(Settings(), draws, load_corpus())
    squares = module._squares({"wiring": "pre", "kind": "relu"}, bench, draws)
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", norm="layer", wiring="pre")
    with torch.no_grad():
        stream = list(build(config, draws).stream(random_windows(bench, draws, ROWS)[:, :-1]))
    ratio = float(stream[-1].square().mean() / stream[2].square().mean())
    assert (squares[0] / squares[-1]) ** 0.5 == pytest.approx(ratio**0.5, rel=1 / 3)


def test_summary_and_figures_speak_of_both_kinds(told):
    e = Evidence(invented(THEORY), F2.plays, Settings())
    assert "SwiGLU" in told(F2, e)
    (chart,) = F2.figures(e)
    assert len(chart.panels) == len(KINDS)
