from itertools import pairwise

import pytest
import torch

from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims.h1_zoo import CLAIMS, LEAST_MORE_KEPT, NAMES, STUDY, kept_by_b2t, kept_by_post
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(H1,) = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    return measure_text(STUDY, Settings(seeds=(0,)))


@pytest.mark.slow
def test_it_holds_and_the_control_flips(measured, judge_claim, told):
    verdict = judge_claim(H1, H1.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(H1, H1.control.plays, measured).verdict)
    e = Evidence(measured, H1.plays, Settings())
    assert told(H1, e)
    assert len(H1.figures(e)[0].panels[0].series[0].x) == len(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "pre"])
def test_every_row_is_told_from_pre_norm_or_from_one_that_stands_still(name, measured, judge_claim):
    """Each wiring has a criterion of its own: the wrong network in its place is seen."""
    wrong = "rezero" if name in ("parallel", "mix-ln") else "pre"
    assert judge_claim(H1, {**H1.plays, name: wrong}, measured).given is Verdict.FAILS


@pytest.mark.parametrize("name", ["b2t", "resi-dual"])
def test_what_is_made_of_post_norm_is_told_from_it(name, measured, judge_claim):
    assert judge_claim(H1, {**H1.plays, name: "post"}, measured).given is Verdict.FAILS


def test_what_a_block_keeps_of_its_input_falls_with_what_attention_adds():
    """Bounds that hold for all of 0 … 1 need the ends alone; and what is left is a cosine."""
    for kept in (kept_by_post, kept_by_b2t):
        values = [kept(a / 100) for a in range(101)]
        assert all(0 < after < before < 1 for before, after in pairwise(values))
    assert min(kept_by_b2t(a / 100) ** 4 - kept_by_post(a / 100) ** 4 for a in range(101)) == LEAST_MORE_KEPT


@pytest.mark.parametrize("attention", [0.0, 0.4, 1.0])
def test_what_a_block_keeps_of_its_input_against_a_block_of_random_vectors(attention):
    """Hundreds of thousands of channels: cosines of what is drawn apart scatter by 1/√n, sizes by √(2/n)."""
    n = 400_000
    x, a, f = torch.randn(3, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, f = attention**0.5 * a, 0.32**0.5 * f
    y = (x + a) / (x + a).square().mean().sqrt()
    for total, kept in ((y + f, kept_by_post), (x + y + f, kept_by_b2t)):
        assert float(torch.cosine_similarity(total, x, dim=0)) == pytest.approx(kept(attention), abs=5 / n**0.5)
