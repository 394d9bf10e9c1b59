import math

import pytest
import torch
import torch.nn.functional as F

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import a5_final_norm
from normkit.lab.claims.a5_final_norm import CLAIMS, DEPTHS, HEAD, ROWS, STUDY
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(A5,) = CLAIMS


def invented(grows: float, costs: float, scale: float = 1.0) -> list[Measurement]:
    """Logits ∝ L^grows and an excess ∝ L^costs without the final norm; level with it, ``scale`` off the head's."""
    return [
        Measurement(
            STUDY.id,
            role,
            seed,
            {
                "logits": [scale * HEAD * d ** (grows * (role == "without")) for d in DEPTHS],
                "excess": [0.3 * d ** (costs * (role == "without")) for d in DEPTHS],
            },
        )
        for role in ("without", "with")
        for seed in range(5)
    ]


@pytest.mark.parametrize(
    ("grows", "costs", "scale", "verdict"),
    [
        (0.5, 0.9, 1.0, Verdict.HOLDS),
        (0.5, 0.5, 1.0, Verdict.HOLDS),  # the slowest growth of the loss that theory allows
        (0.0, 0.0, 1.0, Verdict.FAILS),  # the norm makes no difference
        (1.0, 0.9, 1.0, Verdict.FAILS),
        (0.5, 0.0, 1.0, Verdict.FAILS),  # logits grow, the loss does not
        (0.5, 0.9, 1.5, Verdict.FAILS),  # another scale than the head's
    ],
)
def test_each_verdict_is_reached(grows, costs, scale, verdict, judge_claim):
    assert judge_claim(A5, A5.plays, invented(grows, costs, scale)).verdict is verdict


def test_what_is_measured_holds_and_its_control_does_not(measure_text, judge_claim, told):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a5_final_norm, "NETWORKS", 1)
        measured = measure_text(STUDY, Settings(seeds=(0, 1, 2)))
    # One network and three seeds do not settle it at half tolerance; the run uses five of four.
    verdict = judge_claim(A5, A5.plays, measured).given
    assert flips(verdict, judge_claim(A5, A5.control.plays, measured).given)
    e = Evidence(measured, A5.plays, Settings())
    assert "p = 0.5" in told(A5, e)
    assert A5.figures(e)


@pytest.mark.parametrize("final", [True, False])
def test_a_depth_of_the_stream_is_a_network_of_that_depth(final):
    """One network's stream serves all depths; a network built that deep says the same, bit for bit."""
    draws = Draws(STUDY.id, "with", 0)
    bench = Bench(Settings(), draws, load_corpus())
    with torch.no_grad():
        squares, losses = a5_final_norm._one({"final": final}, bench, draws)
        config = TransformerConfig(
            layers=4, width=128, heads=4, feed_forward="relu", norm="layer", wiring="pre", final_norm=final
        )
        windows = random_windows(bench, draws, ROWS)
        logits = build(config, draws)(windows[:, :-1])
    target = windows[:, 1:].flatten()
    pair = [float(F.cross_entropy(z.flatten(0, 1), target)) for z in (logits, -logits)]
    assert squares[1] == pytest.approx(float(logits.square().mean()), rel=1e-6)
    assert losses[1] == pytest.approx(math.fsum(pair) / 2, rel=1e-6)
