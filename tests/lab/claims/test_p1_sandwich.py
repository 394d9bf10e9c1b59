import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import p1_sandwich as module
from normkit.lab.claims.p1_sandwich import CLAIMS, EPS, LAYERS, ROWS, STEPS, STUDY, WIDTH
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(P1,) = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NETWORKS", {"drawn": 1, "large": 1})
        return measure_text(STUDY, Settings(seeds=(0, 1, 2)))


def test_the_control_flips_what_is_measured(measured, judge_claim, told):
    # One network a seed may leave the law open at half tolerance; the run averages four.
    verdict = judge_claim(P1, P1.plays, measured).at_double
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(P1, P1.control.plays, measured).at_double)
    e = Evidence(measured, P1.plays, Settings())
    assert "rms 1" in told(P1, e)
    assert P1.figures(e)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("most added", lambda v: 1.01 * v),
        ("least read", lambda v: 0.99 * v),
        ("over bound", lambda v: 1.001),
        ("stream", lambda row: [2 * v for v in row]),
        ("stream", lambda row: [v / 2 for v in row]),
    ],
)
def test_what_would_break_it_is_seen(key, change, measured, judge_claim, altered):
    assert judge_claim(P1, P1.plays, altered(measured, key, change)).given is Verdict.FAILS


def test_what_is_added_is_the_normed_output_of_the_sublayer():
    """Written out by hand from the sublayers' own outputs: x + N(F(N(x))) in float64."""
    draws = Draws(STUDY.id, "sandwich/drawn", 2)
    bench = Bench(Settings(), draws, load_corpus())
    values = module._one({"wiring": "sandwich", "factor": 1.0}, bench, draws)
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", wiring="sandwich")
    model = build(config, draws).double()

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    with torch.no_grad():
        x = first = model.embedding(random_windows(bench, draws, ROWS)[:, :-1])
        for attention, feed_forward in zip(model.attentions, model.feed_forwards, strict=True):
            x = x + normed(attention(normed(x)))
            x = x + normed(feed_forward(normed(x)))
    assert len(values["stream"]) == STEPS + 1
    assert values["stream"][-1] == pytest.approx(float(x.square().mean() / first.square().mean()), rel=1e-9)
