"""G5: the step against torch's own layers, the profile against its definition, and every verdict reached."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.g5_admin import (
    CLAIMS,
    LABELS,
    STUDY,
    SUBLAYERS,
    WIDTH,
    closed_form,
    fresh,
    moved,
    scale_stream,
    sums_of_shares,
)
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(CLAIM,) = CLAIMS
THEORY = {"post": 1.0, "profiled": 0.44, "log": 0.41, "constant": 0.07}


@pytest.fixture
def bench() -> Bench:
    return Bench(Settings(), Draws(STUDY.id, "post", 7))


def invented(powers: dict[str, float]) -> list[Measurement]:
    variances = [1.0, *[0.5] * SUBLAYERS[-1]]
    return [
        Measurement(
            STUDY.id,
            name,
            seed,
            {
                "moved": [float(n) ** (power + 0.005 * seed) for n in SUBLAYERS],
                "sum": [sums_of_shares(variances[: n + 1]) for n in SUBLAYERS],
                "variances": variances,
            },
        )
        for name, power in powers.items()
        for seed in range(5)
    ]


def test_a_step_is_post_norm_with_the_stream_weighted(bench):
    stack, x = fresh(2, bench)
    scale_stream(stack, "log", x)
    expected = x
    for layer in range(2):
        f = (expected @ stack.up[layer]).clamp(min=0) @ stack.down[layer]
        expected = torch.nn.functional.layer_norm(stack.omega[layer] * expected + f, (WIDTH,))
    torch.testing.assert_close(stack.output(x), expected, rtol=1e-12, atol=1e-12)


def test_the_profile_is_its_definition_in_the_network_it_makes(bench):
    """ω_l² is the sum of the variances before l, measured again once all ω stand; Xavier branches have about 1/2."""
    stack, x = fresh(5, bench)
    scale_stream(stack, "profiled", x)
    total = float(x.var(correction=0))
    for layer in range(5):
        assert stack.omega[layer] ** 2 == pytest.approx(total, rel=1e-12)
        branch = stack.branch(layer, x)
        total += float(branch.var(correction=0))
        x = stack.step(layer, x, branch)
    assert total == pytest.approx(1 + 5 * 0.5, rel=0.15)


def test_shares_add_up_to_the_harmonic_numbers():
    assert sums_of_shares([1.0] * 5) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4 + 1 / 5)


@pytest.mark.parametrize("n", SUBLAYERS)
def test_closed_forms_give_the_sums_they_are_for(n):
    """n equal shares 1/(ω² + 1): n/2, n·ln(n + 1)/(n + 1), n/(n + 1)."""
    shares = {name: n / (closed_form(name, n) ** 2 + 1) for name in ("post", "log", "constant")}
    assert shares == pytest.approx({"post": n / 2, "log": n * math.log(n + 1) / (n + 1), "constant": n / (n + 1)})


def test_the_change_is_linear(bench):
    small, large = (moved(*fresh(8, bench), bench, relative) for relative in (1e-5, 1e-4))
    assert large == pytest.approx(small, rel=1e-2)


def test_one_sublayer_moves_by_its_share(bench):
    """Both maps change by noise of their own size: twice the branch's share, less two directions that LN projects."""
    stack, x = fresh(1, bench)
    stack.omega = [3.0]
    share = 0.5 / (9 + 0.5)
    assert moved(stack, x, bench) == pytest.approx(2 * share, rel=0.15)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.HOLDS),
        ({"post": 0.4}, Verdict.FAILS),
        ({"profiled": 1.0}, Verdict.FAILS),
        ({"log": 1.0}, Verdict.FAILS),
        ({"constant": 0.6}, Verdict.FAILS),
    ],
)
def test_each_verdict_is_reached(change, verdict, judge_claim):
    measured = invented(THEORY | change)
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is verdict
    if verdict is Verdict.HOLDS:
        assert flips(verdict, judge_claim(CLAIM, CLAIM.control.plays, measured).verdict)


@pytest.mark.slow
def test_the_control_flips_what_is_measured(measure_study, judge_claim):
    measured = measure_study(STUDY, Settings())
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(CLAIM, CLAIM.control.plays, measured).verdict is Verdict.FAILS


def test_summary_and_figures(told):
    e = Evidence(invented(THEORY), CLAIM.plays, Settings())
    assert LABELS["profiled"] in told(CLAIM, e)
    assert CLAIM.figures(e)
