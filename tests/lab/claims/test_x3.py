"""X3: what the held statistics leave of the gradient, forward values that do not move, and every verdict reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normkit.functional import layer_norm
from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims import x3_detached_statistics as x3
from normkit.lab.claims.x3_detached_statistics import CLAIMS, EPS, HELD, LABELS, RATES, STUDY, norm_of, share
from normkit.lab.model.training import Schedule
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(CLAIM,) = CLAIMS
FULL = Settings(mode="full")
WIDTH = 37


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows off centre and of many scales, strided, with a strided gradient."""
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(2, WIDTH, 11, generator=generator, dtype=torch.float64)
    return (x * torch.logspace(-1, 1, 11, dtype=torch.float64) + 3).T, g.T


def drawn(kind: str, seed: int) -> torch.nn.Module:
    norm = norm_of(kind, WIDTH).double()
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64))
    return norm


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["layer", *HELD])
def test_the_gradient_lacks_the_terms_of_what_is_held_and_nothing_else(kind, seed):
    x, dy = rows(seed)
    norm = drawn(kind, seed)
    x.requires_grad_()
    norm(x).backward(dy)
    std = (x.detach().var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
    normal = (x.detach() - x.detach().mean(-1, keepdim=True)) / std
    g = dy * norm.weight.detach()
    wanted = g.clone()
    if kind in ("layer", "scale"):  # μ depends on x
        wanted = wanted - g.mean(-1, keepdim=True)
    if kind in ("layer", "mean"):  # σ depends on x
        wanted = wanted - normal * (g * normal).mean(-1, keepdim=True)
    torch.testing.assert_close(x.grad, wanted / std, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(norm.weight.grad, (dy * normal).sum(0), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(norm.bias.grad, dy.sum(0))


@pytest.mark.parametrize("kind", HELD)
def test_forward_values_are_layer_norms(kind):
    x, _ = rows(5)
    norm = drawn(kind, 5)
    torch.testing.assert_close(norm(x), layer_norm(x, norm.weight, norm.bias, eps=EPS), rtol=1e-12, atol=1e-12)


def test_without_a_norm_the_same_parameters_are_left():
    x, dy = rows(6)
    norm = drawn("none", 6)
    x.requires_grad_()
    norm(x).backward(dy)
    torch.testing.assert_close(x.grad, dy * norm.weight)
    torch.testing.assert_close(norm.bias.grad, dy.sum(0))
    for kind in LABELS:
        assert {n: p.shape for n, p in norm_of(kind, 8).named_parameters()} == {"weight": (8,), "bias": (8,)}


LOSSES = {"none": 2.8, "layer": 2.3, "both": 2.75, "scale": 2.6, "mean": 2.32}


def invented(losses: dict[str, float], noise: float = 0.01) -> list[Measurement]:
    """The middle rate is the best, of no norm the first: at the last it diverges."""
    made = []
    for kind, loss in losses.items():
        for i, lr in enumerate(RATES):
            for seed in range(5):
                off = abs(i - 1) if kind != "none" else i
                end = loss + 0.1 * off + 0.02 * seed + noise * (seed % 2) * (kind == "both")
                values = {"heldout": None if kind == "none" and i == 2 else end, "margin": 0.07}
                made.append(Measurement(STUDY.id, f"{kind}/lr-{lr:g}", seed, values))
    return made


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.HOLDS),
        ({"both": 3.0}, Verdict.HOLDS),  # worse than no norm at all
        ({"both": 2.55}, Verdict.HOLDS),  # half of it, to a seed's noise
        ({"both": 2.5}, Verdict.UNDECIDED),  # 0.6: past the half, within the tolerance
        ({"both": 2.35}, Verdict.FAILS),
        ({"both": 2.2}, Verdict.FAILS),
    ],
)
def test_each_verdict_is_reached(change, verdict, judge_claim):
    measured = invented(LOSSES | change)
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is verdict
    assert CLAIM.planted is not None
    played = CLAIM.planted if verdict is Verdict.FAILS else CLAIM.control
    if verdict is not Verdict.UNDECIDED:
        assert flips(verdict, judge_claim(CLAIM, played.plays, measured).verdict)


def test_without_a_gain_there_is_nothing_to_be_the_cause_of(judge_claim):
    measured = invented(LOSSES | {"layer": 2.79})
    assert judge_claim(CLAIM, CLAIM.plays, measured).verdict is not Verdict.HOLDS


def test_each_norm_is_taken_at_its_own_best_rate_and_pairs_are_of_one_seed():
    e = Evidence(invented(LOSSES, noise=0.0), CLAIM.plays, FULL)
    assert [x3.best_rate(e, role) for role in ("none", "layer")] == [RATES[0], RATES[1]]
    assert x3.gain(e, "layer") == pytest.approx([0.5] * 5)
    assert share(e, "detached") == pytest.approx([0.1] * 5)
    assert share(e, "layer") == [1.0] * 5


def test_summary_and_figures(told):
    e = Evidence(invented(LOSSES), CLAIM.plays, FULL)
    assert "share kept" in told(CLAIM, e)
    (chart,) = CLAIM.figures(e)
    assert [s.label for s in chart.panels[1].series] == [LABELS[k] for k in ("layer", "mean", "scale", "both")]


def test_it_is_left_to_full_runs_and_planned_for_two_minutes_at_most():
    assert STUDY.full_only
    assert sum(STUDY.seconds(arm.params) for arm in STUDY.arms(FULL)) * STUDY.seeds <= 120


def test_a_short_run_takes_the_arms_own_norm(measure_text, monkeypatch):
    monkeypatch.setattr(x3, "Schedule", lambda lr, steps, rows: Schedule(lr, steps=2, rows=1))
    monkeypatch.setattr(x3, "LAYERS", 1)
    few = replace(STUDY, arms=lambda s: [arm for arm in STUDY.arms(s) if arm.params["lr"] == RATES[1]])
    found = {m.arm: m.values["heldout"] for m in measure_text(few, replace(FULL, seeds=(0,)))}
    assert len(set(found.values())) == len(LABELS)
