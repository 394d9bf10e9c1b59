"""B1 to B4: the probes against gradients taken another way, the noise's moments, and verdicts on invented maps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.b1_batch_norm import CLAIMS as B1_B4
from normkit.lab.claims.b1_map import (
    CURVE,
    FEW,
    REACH,
    STEPS,
    STUDY,
    along_gradient,
    boundary,
    gradient_shift,
    gradients_of,
    values_of,
)
from normkit.lab.claims.b2_landscape import CLAIMS as B2_B3
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.byte_mlp import ByteMLP, MLPConfig, batches, jitter
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(B1, B4), (B2, B3) = B1_B4, B2_B3
UNIGRAM, POINTS = 3.0, STEPS // CURVE + 1
GAINS = {"none": [0.5, 0.0, 0.0], "batch": [0.6, 0.9, 0.4], "noisy": [0.4, 0.7, 0.2]}


def invented(gains=GAINS, smooth=0.4, cosine=0.6, spread=0.01, early=0.6) -> list[Measurement]:
    """A quick map; BatchNorm's probes are ``smooth`` and ``cosine``, the plain network's 1.0 and 0.9."""
    made = []
    for norm, row in gains.items():
        for lr, gain in zip(FEW, row, strict=True):
            for seed in range(5):
                end = UNIGRAM - gain - spread * (seed - 2)
                share = [min(1.0, i / (early * POINTS if norm != "none" else POINTS - 1)) for i in range(POINTS)]
                curve = [5.5 + (end - 5.5) * s for s in share]
                rough = smooth * (1 + spread * (seed - 2) * (1 + lr)) if norm == "batch" else 1.0
                probes = (rough, rough, cosine if norm == "batch" else 0.9 + 0.2 * spread * seed)
                probe = dict(zip(("range", "turn", "cosine"), probes, strict=True))
                values = values_of(curve, [0.1], [probe], UNIGRAM, 0.07)
                made.append(Measurement(STUDY.id, f"{norm}/lr-{lr:g}", seed, values))
    return made


@pytest.mark.parametrize("claim", [B1, B2, B3, B4], ids=lambda c: c.id)
def test_a_world_that_obeys_holds_and_the_control_flips(claim, judge_claim, told):
    made = invented()
    verdict = judge_claim(claim, claim.plays, made).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(claim, claim.control.plays, made).verdict)
    evidence = Evidence(made, claim.plays, Settings())
    assert told(claim, evidence)
    for chart in claim.figures(evidence):
        assert all(series.y for panel in chart.panels for series in panel.series)


def test_a_noisy_network_that_is_slower_or_bears_less_refutes_b1_and_the_plant_holds(judge_claim):
    for made in (invented(early=1.5), invented(GAINS | {"noisy": [0.0, 0.0, 0.0]})):
        assert judge_claim(B1, B1.plays, made).verdict is Verdict.FAILS
    only_noisy = invented(GAINS | {"noisy": [0.0, 0.0, 0.0]})
    assert judge_claim(B1, B1.planted.plays, only_noisy).verdict is Verdict.HOLDS


def test_limits_between_the_same_rates_are_not_decided(judge_claim):
    made = invented(GAINS | {"batch": [0.6, 0.0, 0.0]})
    assert judge_claim(B4, B4.plays, made).verdict is Verdict.UNDECIDED
    assert judge_claim(B4, B4.plays, invented(GAINS | {"batch": [0.0, 0.0, 0.0]})).verdict is Verdict.FAILS
    swapped = invented({"none": [0.6, 0.9, 0.4], "batch": [0.5, 0.0, 0.0], "noisy": [0.5, 0.0, 0.0]})
    assert judge_claim(B4, B4.plays, swapped).verdict is Verdict.FAILS


def test_seeds_that_disagree_widen_a_limit():
    made = invented(GAINS | {"none": [0.5, 0.07, 0.0]})
    assert boundary(Evidence(made, B4.plays, Settings()), "none") == (FEW[0], FEW[2])
    assert boundary(Evidence(made, B4.plays, Settings()), "batch") == (FEW[2], math.inf)


def test_a_rougher_loss_and_a_smaller_shift_refute(judge_claim):
    assert judge_claim(B2, B2.plays, invented(smooth=1.5)).verdict is Verdict.FAILS
    assert judge_claim(B3, B3.plays, invented(cosine=0.99)).verdict is Verdict.FAILS


def test_a_run_that_diverged_gains_nothing_and_is_json():
    values = values_of([5.5, math.inf], [0.1], [{"range": math.inf, "turn": 1.0, "cosine": math.nan}], 3.0, 0.1)
    assert (values["heldout"], values["trained"], values["gain"]) == (None, False, 0.0)
    assert (values["range"], values["cosine"], values["curve"]) == (None, None, [5.5, None])


def test_noise_has_the_moments_of_its_law():
    """Scale: mean 1.125, variance 1/192 + 1/100. Shift: mean 0, variance 1/12 + 1/300. Over many units and samples."""
    generator = torch.Generator().manual_seed(0)
    zeros, ones = torch.zeros(64, 4096), torch.ones(64, 4096)
    shift = jitter(zeros, generator)
    assert float(shift.var()) == pytest.approx(1 / 12 + 1 / 300, rel=0.1)  # 4096 units: √(0.8/4096), 7 of those
    assert abs(float(shift.mean())) < 5 * math.sqrt(1 / 12 / 4096)
    both = jitter(ones, torch.Generator().manual_seed(0)) - jitter(zeros, torch.Generator().manual_seed(0))
    assert float(both.mean()) == pytest.approx(1.125, abs=5 * math.sqrt(1 / 192 / 4096))
    assert float(both.var()) == pytest.approx(1 / 192 + 1 / 100, rel=0.05)
    assert float(both.var(0).mean()) == pytest.approx(1 / 100, rel=0.05)  # a unit's scale is one for its whole batch


@pytest.fixture(scope="module", params=["none", "batch"])
def probed(request):
    draws = Draws("probe", request.param, 3)
    model = ByteMLP(MLPConfig(request.param), draws)
    return model, batches(load_corpus(), 1, 128, draws)[0]


def _plain(model, rows, parameters):
    """The loss and its gradient, functionally, with batch statistics."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def loss(p):
        logits = functional_call(model, (p, buffers), (rows[:, :-1],))
        return torch.nn.functional.nll_loss(logits.log_softmax(1), rows[:, -1])

    leaves = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
    value = loss(leaves)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), dict(zip(leaves, gradients, strict=True))


def test_probes_agree_with_functions_and_move_nothing(probed):
    model, rows = probed
    lr, before = 0.2, {n: t.clone() for n, t in model.state_dict().items()}
    start = {n: p.detach() for n, p in model.named_parameters()}
    _, g = _plain(model, rows, start)
    losses, turns = [], []
    for eta in (0.0, *(r * lr for r in REACH)):
        loss, there = _plain(model, rows, {n: p - eta * g[n] for n, p in start.items()})
        losses.append(loss)
        turns.append(torch.cat([(there[n] - g[n]).flatten() for n in g]).norm())
    spread, turn = along_gradient(model, rows, g, lr)
    assert spread == pytest.approx(max(losses) - min(losses), rel=1e-3)  # float32 sums in another order
    assert turn == pytest.approx(float(max(turns)), rel=1e-3)

    cosines = gradient_shift(model, rows, g, lr)
    for i in (0, 3, 7):
        below = ("embedding", *(f"{part}.{k}." for k in range(i) for part in ("hidden", "norms")))
        moved = {n: p - lr * g[n] if n.startswith(below) else p for n, p in start.items()}
        a, b = _plain(model, rows, moved)[1][f"hidden.{i}.weight"].flatten(), g[f"hidden.{i}.weight"].flatten()
        assert cosines[i] == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-3)
    assert gradient_shift(model, rows, g, 0.0) == pytest.approx([1.0] * 8, abs=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_arms_start_alike_and_the_noise_belongs_to_its_step():
    models = {n: ByteMLP(MLPConfig(n), Draws("s", n, 1)) for n in ("none", "batch", "noisy")}
    assert torch.equal(models["none"].head.weight, models["noisy"].head.weight)
    rows = batches(load_corpus(), 1, 16, Draws("s", "none", 1))[0]
    noisy = models["noisy"]
    first, again = gradients_of(noisy, rows)[0], gradients_of(noisy, rows)[0]
    noisy.step = 1
    assert first == again != gradients_of(noisy, rows)[0]


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_a_full_run_says_the_limit_again(norm):
    """At rate 1 BatchNorm leaves the plateau and the plain network does not: the pilot's finding, as regression."""
    settings, corpus = Settings(), load_corpus()
    (params,) = [a.params for a in STUDY.arms(settings) if a.name == f"{norm}/lr-1"]
    values = STUDY.measure(params, Bench(settings, Draws(STUDY.id, f"{norm}/lr-1", 0), corpus))
    assert values["trained"] is (norm == "batch")
