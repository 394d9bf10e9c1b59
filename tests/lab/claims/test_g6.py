"""G6: the first step against closed forms of its own, the identity against a broken one, and every verdict reached."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.g6_without_norms import (
    CLAIMS,
    DEPTHS,
    LABELS,
    ROWS,
    STUDY,
    WIDTH,
    change,
    gains,
    moved,
    network,
    off_identity,
)
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

IDENTITY, STEP = CLAIMS
THEORY = {"rezero": 0.7, "fixup": 0.0, "t-fixup": 0.0, "plain": 9.0}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Settings(), Draws(STUDY.id, "rezero", 5), load_corpus())


def invented(powers: dict[str, float]) -> list[Measurement]:
    return [
        Measurement(
            STUDY.id,
            name,
            seed,
            {
                "moved": [float(d) ** (power + 0.01 * seed) for d in DEPTHS],
                "jacobian off": 0.0 if name in ("rezero", "fixup") else 3.0,
                "output off": 0.0 if name in ("rezero", "fixup") else 2.0,
            },
        )
        for name, power in powers.items()
        for seed in range(5)
    ]


def _gradient_of_features(model, windows):
    """Return −∂loss/∂(what the head reads) with that stream, both (rows, T, width)."""
    *_, stream = model.stream(windows[:, :-1])
    x = stream.detach().requires_grad_()
    logits = model.head(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    (g,) = torch.autograd.grad(loss, x)
    return x.detach(), g


@pytest.mark.parametrize("blocks", [1, 3])
def test_rezero_moves_by_its_branches_share_of_the_gradient(bench, blocks):
    """Every branch is 0, so the stream is the embedding everywhere and the step is −Σ ⟨g, F_l⟩ F_l."""
    model = network("rezero", blocks, WIDTH, bench.draws).double()
    windows = random_windows(bench, bench.draws, ROWS, 9)
    x, g = _gradient_of_features(model, windows)
    with torch.no_grad():
        branches = [f(x) for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]
    expected = -sum((g * f).sum() * f for f in branches)
    torch.testing.assert_close(change(model, windows), expected, rtol=1e-4, atol=1e-9)


def test_fixup_moves_by_its_hidden_mean_squares(bench):
    """Only the last maps have a gradient, g hᵀ summed over positions, so the step is −Σ_l (Σ g hᵀ) h."""
    model = network("fixup", 2, WIDTH, bench.draws).double()
    windows = random_windows(bench, bench.draws, ROWS, 9)
    x, g = _gradient_of_features(model, windows)
    expected = torch.zeros_like(x)
    for attention, feed_forward in zip(model.attentions, model.feed_forwards, strict=True):
        for sublayer, last in ((attention, attention.output), (feed_forward, feed_forward.down)):
            read: list[torch.Tensor] = []
            handle = last.register_forward_pre_hook(lambda _, args, kept=read: kept.append(args[0].detach()))
            sublayer(x)
            handle.remove()
            (h,) = read
            expected -= h @ torch.einsum("nti,ntj->ij", g, h).T
    torch.testing.assert_close(change(model, windows), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", LABELS)
def test_the_step_is_linear(name, bench):
    windows = random_windows(bench, bench.draws, ROWS, 9)
    small, large = (change(network(name, 6, WIDTH, bench.draws).double(), windows, rate) for rate in (1e-6, 1e-5))
    assert float((large - small).norm() / small.norm()) < 1e-3


def test_the_papers_constants():
    assert gains("fixup", 8) == {"first": 0.25, "last": 0.0, "embedding": 1.0}  # 16 branches of two maps: 16^(−1/2)
    t = gains("t-fixup", 16)
    assert (t["first"], t["last"], t["embedding"]) == pytest.approx((0.335, 0.335, 12**-0.5))
    assert set(gains("rezero", 3).values()) == {1.0}


@pytest.mark.parametrize("name", ["rezero", "fixup"])
def test_the_smallest_branch_is_noticed(name, bench):
    """One λ, or one weight of one last map, off by a little: the identity is not to the bit any more."""
    x = bench.draws.randn(1, 2, 8)
    for broken in (False, True):
        model = network(name, 2, 8, bench.draws)
        with torch.no_grad():
            if broken and name == "rezero":
                model.steps[1].scale.fill_(1e-4)
            elif broken:
                model.feed_forwards[0].down.weight[0].fill_(1e-3)
        output, jacobian = off_identity(model, x)
        assert (output > 0) is broken
        assert (jacobian > 0) is broken


def test_identity_with_the_opposite_sign_of_zero(bench):
    """A stream of zeros, negative ones among them, and gradients through it stay equal to the identity's."""
    x = torch.zeros(1, 2, 8)
    x[0, 0, ::2] = -0.0
    assert off_identity(network("fixup", 2, 8, bench.draws), x) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change_", "verdict"),
    [
        ({}, Verdict.CORRECTED),
        ({"rezero": 0.0}, Verdict.HOLDS),
        ({"fixup": 0.5}, Verdict.FAILS),
        ({"t-fixup": 0.5}, Verdict.FAILS),
        ({"t-fixup": -0.5}, Verdict.FAILS),
        ({"plain": 0.0}, Verdict.FAILS),
    ],
)
def test_each_verdict_is_reached(change_, verdict, judge_claim):
    measured = invented(THEORY | change_)
    assert judge_claim(STEP, STEP.plays, measured).verdict is verdict
    if verdict is not Verdict.FAILS:
        assert flips(verdict, judge_claim(STEP, STEP.control.plays, measured).verdict)


def test_the_control_is_no_identity(judge_claim, bench):
    fresh = {name: network(name, 2, 8, bench.draws) for name in LABELS}
    x = bench.draws.randn(1, 2, 8)
    off = {name: off_identity(model, x) for name, model in fresh.items()}
    measured = [Measurement(STUDY.id, name, 0, {"output off": a, "jacobian off": b}) for name, (a, b) in off.items()]
    verdict = judge_claim(IDENTITY, IDENTITY.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(IDENTITY, IDENTITY.control.plays, measured).verdict)


def test_plain_weights_move_further_with_depth(bench):
    few, more = (moved("plain", blocks, bench) for blocks in (2, 4))
    assert more > 4 * few  # faster than any power law up to L²


@pytest.mark.slow
def test_the_control_flips_what_is_measured(measure_text, judge_claim):
    measured = measure_text(STUDY, Settings(seeds=(0, 1, 2, 3, 4)))
    for claim, expected in ((IDENTITY, Verdict.HOLDS), (STEP, Verdict.CORRECTED)):
        assert judge_claim(claim, claim.plays, measured).verdict is expected
        assert flips(expected, judge_claim(claim, claim.control.plays, measured).verdict)


def test_summaries_and_figures(told):
    for claim in CLAIMS:
        e = Evidence(invented(THEORY), claim.plays, Settings())
        assert "ReZero" in told(claim, e)
        assert claim.figures(e)
