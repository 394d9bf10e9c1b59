"""I1 and I1b: stand-ins for a norm against formulas and differences taken anew, and verdicts that turn over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import i1_pointwise, i1_training
from normkit.lab.claims.i1_pointwise import NAMES, functions
from normkit.lab.draws import Draws
from normkit.lab.model.seednorm import SeeDNorm, seednorm
from normkit.lab.model.training import Schedule
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

pytestmark = pytest.mark.slow  # a full run's claim; `make test` has ten minutes for everything

(I1,), (I1B,) = i1_pointwise.CLAIMS, i1_training.CLAIMS
SETTINGS = Settings(seeds=(0, 1, 2))


@pytest.fixture(scope="module")
def measured(measure_study):
    return measure_study(i1_pointwise.STUDY, SETTINGS)


def test_it_holds_and_the_control_flips(measured, judge_claim, told):
    verdict = judge_claim(I1, I1.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(I1, I1.control.plays, measured).verdict)
    for plays in (I1.plays, I1.control.plays):
        e = Evidence(measured, plays, SETTINGS)
        assert told(I1, e)
        (chart,) = I1.figures(e)
        assert len(chart.panels) == 2


@pytest.mark.parametrize(
    ("role", "other"),
    [("dyt", "derf"), ("derf", "dyt"), ("seed", "seed-zero"), ("seed-zero", "seed"), ("rms", "dyt"), ("dyt", "rms")],
)
def test_every_function_is_told_from_another(role, other, measured, judge_claim):
    assert judge_claim(I1, {**I1.plays, role: other}, measured).given is Verdict.FAILS


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("largest", lambda v: v + 1e-9),
        ("to sign", lambda v: v + 1e-9),
        ("slope", lambda v: v * 1.001),
        ("from rms", lambda v: v + 1e-9),
        ("change", lambda row: [0.0 for _ in row]),
    ],
)
def test_what_would_break_it_is_seen(key, change, measured, judge_claim, altered):
    assert judge_claim(I1, I1.plays, altered(measured, key, change)).given is Verdict.FAILS


BY_HAND = {
    "dyt": lambda x, w, a, b: w * (1 - 2 / ((2 * 0.7 * x).exp() + 1)),
    "derf": lambda x, w, a, b: w * (2 * torch.special.ndtr(0.7 * x * 2**0.5) - 1),
    "seed": lambda x, w, a, b: (torch.tanh(x @ b)[:, None] * a + w) * x / x.square().mean(1, keepdim=True).sqrt(),
    "seed-zero": lambda x, w, a, b: w * x / x.square().mean(1, keepdim=True).sqrt(),
    "rms": lambda x, w, a, b: w * x * x.shape[1] ** 0.5 / x.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_function_is_its_formula(name):
    bench = Bench(SETTINGS, Draws("t", "a", 4))
    made, w = functions(bench)
    alpha, beta = (bench.draws.randn(60, stream=s, dtype=torch.float64) for s in ("alpha", "beta"))
    x = 3 * torch.randn(7, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = BY_HAND[name](x, w, alpha, beta / 60**0.5)
    torch.testing.assert_close(made[name](x), expected, rtol=1e-11, atol=1e-11)


def test_seednorm_starts_as_rms_norm_and_stays_within_its_bound():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 12, generator=generator)
    torch.testing.assert_close(SeeDNorm(12)(x), torch.nn.functional.rms_norm(x, (12,), eps=1e-6))
    alpha, beta, gamma = torch.randn(3, 12, generator=generator)
    y = seednorm(1e3 * x, alpha, beta, gamma)
    assert bool((y.abs() <= 12**0.5 * (alpha.abs() + gamma.abs()) * (1 + 1e-6)).all())


def test_seednorm_s_gradients_are_right():
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 7), (7,), (7,), (7,))
    parts = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(seednorm, parts)


def invented(behind: dict[str, float], spread: float = 0.01, mode: str = "full") -> list[Measurement]:
    """Runs that end so much above RMSNorm's 2.1."""
    settings = Settings(mode=mode)  # type: ignore[arg-type]
    made = []
    for arm in i1_training.STUDY.arms(settings):
        for seed in range(5):
            loss = 2.1 + 0.05 * seed + behind.get(arm.name, 0.0) + (spread * (seed - 2) if arm.name != "rms" else 0)
            values = {"heldout": loss, "curve": [3.0, 2.5, loss], "outcome": "trained"}
            made.append(Measurement("pointwise_training", arm.name, seed, values))
    return made


UNTUNED = {"untuned": 0.3}


def judged(plays, measurements, mode="full"):
    from normkit.lab.verdict import judge

    return judge(I1B.literal.criteria(Evidence(measurements, plays, Settings(mode=mode))), None).verdict


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_as_good_as_rms_norm_holds_and_untuned_fails(mode, told):
    made = invented({"dyt": 0.02, "derf": -0.01, "seed": 0.02} | UNTUNED, mode=mode)
    assert judged(I1B.plays, made, mode) is Verdict.HOLDS
    assert judged(I1B.control.plays, made, mode) is Verdict.FAILS
    e = Evidence(made, I1B.plays, Settings(mode=mode))
    assert told(I1B, e)
    assert len(I1B.figures(e)[0].panels[0].series) == 4


@pytest.mark.parametrize("late", ["dyt", "derf", "seed"])
def test_one_that_is_behind_refutes_it_and_what_was_planted_holds(late):
    made = invented({late: 0.15} | UNTUNED)
    assert judged(I1B.plays, made) is Verdict.FAILS
    assert I1B.planted is not None
    assert judged(I1B.planted.plays, made) is Verdict.HOLDS


def test_seeds_that_disagree_leave_it_open():
    assert judged(I1B.plays, invented({"dyt": 0.05}, spread=0.05)) is Verdict.UNDECIDED


def test_a_short_run_is_measured_like_a_long_one(measure_text, monkeypatch):
    monkeypatch.setattr(i1_training, "Schedule", lambda lr, steps, rows: Schedule(lr, steps=10, rows=2))
    small = replace(i1_training.STUDY, arms=lambda s: [a for a in i1_training.STUDY.arms(s) if a.name != "rms"])
    runs = {m.arm: m.values for m in measure_text(small, Settings(seeds=(0,)))}
    assert all(math.isfinite(v["heldout"]) and len(v["curve"]) == 1 for v in runs.values())
    assert len({v["heldout"] for v in runs.values()}) == len(runs)
    assert [len(runs[name]["learnt alpha"]) for name in ("seed", "dyt", "derf")] == [0, 5, 5]
    assert max(abs(a - 0.01) for a in runs["untuned"]["learnt alpha"]) < 0.05
