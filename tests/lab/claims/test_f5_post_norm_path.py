import math

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import f5_post_norm_path as module
from normkit.lab.claims.f5_post_norm_path import CLAIMS, EPS, LAYERS, ROWS, ROWS_OF, STEPS, STUDY, WIDTH
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

F5, F5B = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NETWORKS", 1)
        return measure_text(STUDY, Settings(seeds=(0, 1, 2, 3)))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_the_control_flips_what_is_measured(claim, measured, judge_claim, told):
    # One network a seed may leave the equal branches open at half tolerance; the run averages four.
    verdict = judge_claim(claim, claim.plays, measured).at_double
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(claim, claim.control.plays, measured).at_double)
    e = Evidence(measured, claim.plays, Settings())
    assert told(claim, e)
    assert claim.figures(e)


@pytest.mark.parametrize("shift", [0.2, -0.2])
def test_another_product_than_the_norms_own_is_seen(shift, measured, judge_claim, altered):
    """One norm more or less on the path of sixteen changes ln Π 1/σ by about 0.2."""
    off = altered(measured, "law", lambda row: [v + shift for v in row])
    assert judge_claim(F5B, F5B.plays, off).verdict is Verdict.FAILS


def test_a_block_off_scale_is_seen(measured, judge_claim, altered):
    off = altered(measured, "largest", lambda row: [1.0001 * v for v in row])
    assert judge_claim(F5, F5.plays, off).verdict is Verdict.FAILS


@pytest.mark.parametrize("name", ["post", "equal"])
def test_the_path_against_the_derivative_written_out(name):
    """Send the gradient back by hand: (I − x̂x̂ᵀ/d)/σ for every norm, in float64."""
    draws = Draws(STUDY.id, name, 7)
    bench = Bench(Settings(), draws, load_corpus())
    values = module._one({"wiring": name}, bench, draws)
    config = TransformerConfig(
        layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", norm="rms", wiring=ROWS_OF[name]
    )
    model = build(config, draws).double()
    sums: list[torch.Tensor] = []
    for step in model.steps:
        step.norm_out.register_forward_pre_hook(lambda module, args: sums.append(args[0]))
    with torch.no_grad():
        list(model.stream(random_windows(bench, draws, ROWS)[:, :-1]))
    assert len(sums) == STEPS
    sent = g = draws.randn(*sums[0].shape, stream="gradient", dtype=torch.float64)
    for total in reversed(sums):
        sigma = (total.square().mean(-1, keepdim=True) + EPS).sqrt()
        unit = total / sigma
        g = (g - unit * (unit * g).mean(-1, keepdim=True)) / sigma
    by_hand = 0.5 * float((g.square().sum(-1) / sent.square().sum(-1)).log().mean())
    assert values["coefficient"][0] == pytest.approx(by_hand, rel=1e-12)
    product = -math.fsum(float(s.square().mean(-1).sqrt().log().mean()) for s in sums)
    assert values["law"][0] == pytest.approx(product, rel=1e-12)
