"""D9: the network against torch's own layers, the offset that centred weights lack, and every verdict reached."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims.d9_off_centre import CENTRE, CLAIMS, LAYERS, RATES, STUDY, best, initial, logits
from normkit.lab.draws import Draws
from normkit.lab.model.byte_mlp import BYTES, EMBEDDING, WIDTH
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(CLAIM,) = CLAIMS
LOSSES = {
    "none/centre-0.2": 3.2,
    "rms/centre-0.2": 2.8,
    "layer/centre-0.2": 2.3,
    "rms/centre-0": 2.3,
    "layer/centre-0": 2.3,
}


def invented(losses: dict[str, float | None]) -> list[Measurement]:
    """The middle rate is the best; runs that have no loss diverged at every rate."""
    return [
        Measurement(
            STUDY.id,
            f"{arm}/lr-{lr:g}",
            seed,
            {"heldout": None if loss is None else loss + 0.1 * abs(i - 1) + 0.01 * seed, "margin": 0.1},
        )
        for arm, loss in losses.items()
        for i, lr in enumerate(RATES)
        for seed in range(3)
    ]


@pytest.mark.parametrize(("norm", "module"), [("layer", nn.LayerNorm(WIDTH)), ("rms", nn.RMSNorm(WIDTH, eps=1e-6))])
def test_the_network_is_what_torch_would_build(norm, module):
    weights = initial(CENTRE, Draws(STUDY.id, norm, 3))
    rows = torch.randint(0, 256, (5, BYTES), generator=torch.Generator().manual_seed(0))
    ones, zeros = [torch.ones(WIDTH)] * LAYERS, [torch.zeros(WIDTH)] * LAYERS
    x = nn.functional.embedding(rows, weights[0]).flatten(1)
    for weight in weights[1:-1]:
        x = module(x @ weight).tanh()
    torch.testing.assert_close(logits(norm, weights, ones, zeros, rows), x @ weights[-1], rtol=1e-4, atol=1e-5)


def test_hidden_weights_lie_around_the_centre_and_nothing_else_moves():
    off, on = (initial(c, Draws(STUDY.id, "rms", 4)) for c in (CENTRE, 0.0))
    torch.testing.assert_close([w - CENTRE for w in off[1:-1]], on[1:-1])
    assert torch.equal(off[0], on[0])
    assert torch.equal(off[-1], on[-1])
    assert off[1].shape == (BYTES * EMBEDDING, WIDTH)


def test_layer_norm_alone_sees_no_centre():
    """c·Σx is the same for every unit: LayerNorm's logits do not change with c, RMSNorm's do."""
    rows = torch.randint(0, 256, (9, BYTES), generator=torch.Generator().manual_seed(1))
    ones, zeros = [torch.ones(WIDTH)] * LAYERS, [torch.zeros(WIDTH)] * LAYERS
    change = {}
    for norm in ("layer", "rms"):
        off, on = (logits(norm, initial(c, Draws(STUDY.id, norm, 5)), ones, zeros, rows) for c in (CENTRE, 0.0))
        change[norm] = float((off - on).abs().max())
    assert change["layer"] < 1e-4 < 0.1 < change["rms"]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.FAILS),
        ({"rms/centre-0.2": 2.31}, Verdict.HOLDS),
        ({"rms/centre-0.2": 1.9}, Verdict.HOLDS),
        ({"rms/centre-0.2": None}, Verdict.FAILS),
        ({"rms/centre-0.2": 2.4}, Verdict.UNDECIDED),
    ],
)
def test_each_verdict_is_reached(change, verdict, judge_claim):
    measured = invented(LOSSES | change)
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is verdict
    assert CLAIM.planted is not None
    played = CLAIM.planted if verdict is Verdict.FAILS else CLAIM.control
    if verdict is not Verdict.UNDECIDED:
        assert flips(verdict, judge_claim(CLAIM, played.plays, measured).verdict)


def test_the_best_rate_is_the_one_of_the_lowest_mean():
    e = Evidence(invented(LOSSES), CLAIM.plays, Settings())
    assert best(e, "layer") == pytest.approx([2.3, 2.31, 2.32])


@pytest.mark.slow
def test_what_is_measured_fails_and_the_planted_control_holds(measure_text, judge_claim):
    measured = measure_text(STUDY, Settings())
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is Verdict.FAILS
    assert CLAIM.planted is not None
    assert judge_claim(CLAIM, CLAIM.planted.plays, measured).verdict is Verdict.HOLDS


def test_summary_and_figures(told):
    e = Evidence(invented(LOSSES), CLAIM.plays, Settings())
    assert "RMSNorm" in told(CLAIM, e)
    assert CLAIM.figures(e)
