"""Wirings beside the article's: OLMo 2's order, float16's range, CogView's softmax."""

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import h2_reordered_qk, h3_overflow, h4_pb_relax
from normkit.lab.claims.h2_reordered_qk import DEPTHS
from normkit.lab.claims.h4_pb_relax import ALPHA, relaxed
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(H2,), (H3,), (H4,) = h2_reordered_qk.CLAIMS, h3_overflow.CLAIMS, h4_pb_relax.CLAIMS


def invented(without: float, with_norm: float, start: float = 1.0) -> list[Measurement]:
    powers = {"without": (without, start), "with": (with_norm, 1.0)}
    return [
        Measurement(
            H2.study.id, role, seed, {"gradient": [first * (d / DEPTHS[0]) ** (p + 0.01 * seed) for d in DEPTHS]}
        )
        for role, (p, first) in powers.items()
        for seed in range(5)
    ]


@pytest.mark.parametrize(
    ("without", "with_norm", "start", "verdict"),
    [
        (1.5, 0.1, 1.0, Verdict.HOLDS),
        (0.1, 0.1, 1.0, Verdict.FAILS),  # no need
        (1.5, 1.5, 1.0, Verdict.FAILS),  # no help
        (1.5, 0.1, 0.01, Verdict.FAILS),  # grows, from so little that it is no larger at 16 blocks
    ],
)
def test_h2_reaches_each_verdict(without, with_norm, start, verdict, judge_claim, told):
    measured = invented(without, with_norm, start)
    assert judge_claim(H2, H2.plays, measured).verdict is verdict
    e = Evidence(measured, H2.plays, Settings())
    assert told(H2, e)
    assert H2.figures(e)


@pytest.mark.slow
def test_h2_s_control_flips_what_is_measured(measure_text, judge_claim):
    measured = measure_text(H2.study, Settings())
    verdict = judge_claim(H2, H2.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(H2, H2.control.plays, measured).verdict)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_h2_s_gradient_is_the_first_block_s(qk_norm):
    draws = Draws(H2.study.id, "with", 1)
    bench = Bench(Settings(), draws, load_corpus())
    model = build(TransformerConfig(layers=4, width=64, heads=4, wiring="reordered", qk_norm=qk_norm), draws)
    next_byte_loss(model, random_windows(bench, draws, h2_reordered_qk.ROWS)).backward()
    expected = float(model.feed_forwards[0].down.weight.grad.double().square().sum())
    assert h2_reordered_qk._square(4, qk_norm, bench, draws) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def overflow(measure_text) -> list[Measurement]:
    return measure_text(H3.study, Settings(seeds=(0, 1)))


def test_h3_holds_and_its_control_flips(overflow, judge_claim, told):
    verdict = judge_claim(H3, H3.plays, overflow).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(H3, H3.control.plays, overflow).verdict)
    e = Evidence(overflow, H3.plays, Settings())
    assert "65504" in told(H3, e)
    assert H3.figures(e)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("fits", lambda row: [*row[:-1], False]),
        ("largest", lambda row: [1e3 * v for v in row]),
        ("largest", lambda row: [1e-3 * v for v in row]),
    ],
)
def test_h3_sees_what_would_break_it(key, change, overflow, judge_claim, altered):
    assert judge_claim(H3, H3.plays, altered(overflow, key, change)).verdict is Verdict.FAILS


def test_h3_s_unbounded_stream_is_proportional_to_the_factor(overflow):
    """Large factors dwarf the embedding: ten times the weights, ten times the coordinate, within a percent."""
    for m in overflow:
        if m.arm == "pre":
            assert m.values["largest"][-1] / m.values["largest"][-2] == pytest.approx(10, rel=0.05)


def test_h4_holds_and_its_control_flips(measure_study, judge_claim, told):
    measured = measure_study(H4.study, Settings(seeds=(0, 1, 2)))
    verdict = judge_claim(H4, H4.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(H4, H4.control.plays, measured).verdict)
    e = Evidence(measured, H4.plays, Settings())
    assert told(H4, e)
    assert H4.figures(e)


def test_the_relaxed_softmax_against_float64():
    """Any α, also one that is no power of two; and a wrong factor is another function."""
    scores = 5 * torch.randn(7, 13, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for alpha in (ALPHA, 7.3):
        torch.testing.assert_close(relaxed(scores / alpha, alpha), scores.softmax(-1))
    assert float((relaxed(scores / 32, 31.0) - scores.softmax(-1)).abs().max()) > 1e-3
