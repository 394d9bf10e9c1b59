import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.a6_fixed_scale import CLAIMS, STUDY, SUBLAYERS, _listen
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(A6,) = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    return measure_text(STUDY, Settings(seeds=(0, 1)))


def test_it_holds_and_without_norms_it_fails(measured, judge_claim, told):
    verdict = judge_claim(A6, A6.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(A6, A6.control.plays, measured).verdict)
    e = Evidence(measured, A6.plays, Settings())
    assert "scale 1" in told(A6, e)
    assert A6.figures(e)


@pytest.mark.parametrize(("key", "factor"), [("smallest", 0.9999), ("largest", 1.0001)])
def test_a_ten_thousandth_off_is_seen(key, factor, measured, judge_claim, altered):
    off = altered(measured, key, lambda row: [factor * v for v in row])
    assert judge_claim(A6, A6.plays, off).verdict is Verdict.FAILS


def test_the_tolerance_s_reason_holds(measured):
    """Twice ε/2v is given at v = 1/4: no token's variance may fall below it."""
    assert min(m.values["least mean square"] for m in measured if m.arm.startswith("norm/")) > 0.25


def test_a_stream_that_does_not_grow_needs_no_correction(measured, judge_claim, altered):
    level = altered(measured, "stream", lambda row: [1.0] * SUBLAYERS)
    assert judge_claim(A6, A6.plays, level).verdict is Verdict.FAILS


def test_what_is_heard_is_what_the_norms_make_of_the_stream():
    draws = Draws(STUDY.id, "norm/rms", 0)
    config = TransformerConfig(layers=3, width=24, heads=2, feed_forward="relu", norm="rms", wiring="pre")
    model = build(config, draws)
    heard = _listen(model)
    tokens = random_windows(Bench(Settings(), draws, load_corpus()), draws, 2)[:, :-1]
    with torch.no_grad():
        stream = list(model.stream(tokens))
    assert len(heard) == 6
    for x, read in zip(stream, heard, strict=False):
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(read.double(), expected, rtol=2.0**-21, atol=0)
