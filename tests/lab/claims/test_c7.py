"""C7: that a prediction sees its prefix only, norms against formulas written anew, and verdicts that turn over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from normkit.lab.claim import Arm, Evidence
from normkit.lab.claims.c7_language_model import CLAIMS, STUDY, WAYS, Scorer, score
from normkit.lab.draws import Draws
from normkit.lab.model.padded import KINDS, PaddedLM, QuadraticMeanNorm, cut, padded_loss
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

pytestmark = pytest.mark.slow  # a full run's claim; `make test` has ten minutes for everything

C7, C7B = CLAIMS
SETTINGS = Settings(seeds=(0,))
SMALL = replace(STUDY, arms=lambda settings: [Arm(k, {"kind": k, "steps": 20, "scored": 16}) for k in KINDS])


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed))


def fresh(kind, width: int = 24) -> PaddedLM:
    """Return a network whose running statistics and affine have left where they start."""
    model = PaddedLM(kind, TransformerConfig(layers=2, width=width, context=128), Draws("c7", "test", 3))
    with torch.no_grad():
        model.train()(cut(text(4, 64, seed=5), torch.tensor([64, 30, 17, 9])))
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_sees_its_prefix_and_the_company_alone(kind):
    model, length = fresh(kind), torch.tensor([20])
    window, others, lengths = text(1, 65), text(3, 65, seed=1), torch.tensor([64, 11, 40])
    later = window.clone()
    later[:, 21:] = text(1, 44, seed=2)
    beyond = others.clone()
    beyond[1, 12:] = text(53, seed=3)
    was, now = (score(model, w, length, o, lengths) for w, o in ((window, others), (later, beyond)))
    honest = [way for way in WAYS if way != "future"]
    assert [was[way] for way in honest] == [now[way] for way in honest]
    assert (was["future"] == now["future"]) == (kind == "layer")


def test_scoring_leaves_running_statistics_alone_and_both_modes_of_layer_norm_agree():
    for kind in KINDS:
        model = fresh(kind)
        before = {name: b.clone() for name, b in model.named_buffers()}
        losses = score(model, text(1, 65), torch.tensor([20]), text(3, 65, seed=1), torch.tensor([64, 11, 40]))
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
        assert (losses["running"] == losses["company"]) == (kind == "layer")


def by_hand(kind, x, mask, norm, training):
    """The four norms once more, in float64 and without a line of normkit's."""
    x = x.double()
    real = x[mask]
    if kind == "layer":
        y = F.layer_norm(x, x.shape[-1:], eps=1e-5)
    elif kind == "power":
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        square = x[mask].square().mean(0) if training else norm.running.double()
        y = x / (square + 1e-5).sqrt()
    else:
        seen = real if kind == "batch" else x.flatten(0, 1)
        mean = seen.mean(0) if training else norm.running_mean.double()
        var = seen.var(0, unbiased=False) if training else norm.running_var.double()
        y = (x - mean) / (var + 1e-5).sqrt()
    return y * norm.weight.double() + norm.bias.double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_norm_is_its_formula_on_real_positions(kind, training):
    generator = torch.Generator().manual_seed(7)
    norm = KINDS[kind](13)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(13, generator=generator))
        norm.bias.copy_(torch.randn(13, generator=generator))
        mask = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
        norm.train()(torch.randn(3, 9, 13, generator=generator), mask=mask)
        norm.train(training)
        x = 2 + 3 * torch.randn(3, 9, 13, generator=generator)
        expected = by_hand(kind, x, mask, norm, training)
        torch.testing.assert_close(norm(x, mask=mask)[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)


def test_the_quadratic_mean_s_average_moves_by_its_momentum():
    norm, x = QuadraticMeanNorm(5), torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    y = norm(x, mask=mask)
    hat = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())[mask]
    torch.testing.assert_close(norm.running, 0.9 + 0.1 * hat.square().mean(0))
    assert not norm.running.requires_grad
    assert y.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_padding_reaches_the_loss_of_the_blind_alone(kind):
    model, windows, lengths = fresh(kind), text(3, 65), torch.tensor([9, 30, 21])
    shorter = padded_loss(model, windows, lengths)
    longer = padded_loss(model, torch.cat([windows, text(1, 65, seed=4)]), torch.tensor([9, 30, 21, 0]))
    assert torch.isclose(shorter, longer, rtol=1e-5) == (kind != "blind")


def test_the_loss_is_the_mean_over_real_positions():
    model, windows, lengths = fresh("layer"), text(2, 65), torch.tensor([9, 30])
    with torch.no_grad():
        rows = [
            F.cross_entropy(model.network(w[None, :n]).flatten(0, 1), w[1 : n + 1], reduction="sum")
            for w, n in zip(windows, lengths.tolist(), strict=True)
        ]
        assert float(padded_loss(model, windows, lengths)) == pytest.approx(float(sum(rows)) / 39, rel=1e-5)


@pytest.fixture(scope="module")
def measured(measure_text):
    return measure_text(SMALL, SETTINGS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_after_twenty_steps_it_holds_and_the_control_flips(claim, measured, judge_claim, told):
    given = judge_claim(claim, claim.plays, measured).given
    assert given is Verdict.HOLDS
    assert flips(given, judge_claim(claim, claim.control.plays, measured).given)
    for plays in (claim.plays, claim.control.plays):
        e = Evidence(measured, plays, SETTINGS)
        assert told(claim, e)
        (chart,) = claim.figures(e)
        assert len(chart.panels[0].series) == len(plays)


@pytest.mark.parametrize(
    ("claim", "key", "change"),
    [
        (C7, "gap", lambda v: v / 20),
        (C7, "gap", lambda v: 0.3),  # power like batch
        (C7, "largest gap", lambda v: v + 1e-9),
        (C7B, "moved", lambda v: v / 50),
        (C7B, "largest move", lambda v: v + 1e-3),
    ],
)
def test_what_would_break_it_is_seen(claim, key, change, measured, judge_claim, altered):
    assert judge_claim(claim, claim.plays, altered(measured, key, change)).given is Verdict.FAILS


def test_a_score_is_minus_the_log_of_the_byte_s_probability():
    model, rows = fresh("layer"), cut(text(2, 40), torch.tensor([40, 12]))
    with torch.no_grad():
        expected = -model.eval()(rows)[0, 7].double().softmax(-1)[99].log()
        assert Scorer(model)(rows, 7, 99, training=False) == pytest.approx(float(expected), rel=1e-5)
