"""B1 to B4: networks side by side, the probes against gradients taken another way, and verdicts on invented maps."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.func import functional_call

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.b1_batch_norm import CLAIMS as B1_B4
from normkit.lab.claims.b1_batch_norm import steps_to
from normkit.lab.claims.b1_map import (
    ACTIVATIONS,
    CURVE,
    FEW,
    LAST,
    STEPS,
    STUDY,
    Runs,
    between,
    bracket,
    gain_of,
    limits,
    plateau,
    shared,
    smoothed,
    too_large,
    train,
    values_of,
)
from normkit.lab.claims.b1_probes import REACH, along_gradient, gradient_shift, gradients_of
from normkit.lab.claims.b2_landscape import CLAIMS as B2_B3
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.byte_mlp import ByteMLPs, MLPConfig, batches, descend, jitter, losses_of
from normkit.lab.settings import Settings
from normkit.lab.verdict import Outcome, Verdict, flips

(B1, B4), (B2, B3) = B1_B4, B2_B3
UNIGRAM, MARGIN, POINTS = 3.0, 0.07, STEPS // CURVE + 1
GAINS = {"none": [0.1, 0.5, 0.0, 0.0, 0.0], "batch": [0.1, 0.6, 0.9, 0.8, 0.4], "noisy": [0.1, 0.4, 0.7, 0.5, 0.2]}


def invented(gains=GAINS, smooth=0.4, cosine=0.6, early=0.6, relu=None) -> list[Measurement]:
    """A quick map; BatchNorm's probes are ``smooth`` and ``cosine``, the plain network's 1.0 and 0.9.

    ``relu`` are the arguments of ReLU's arms where they differ from those of tanh.
    """
    made = []
    for act in ACTIVATIONS:
        if act == "relu" and relu is not None:
            made += [m for m in invented(**relu) if m.arm.endswith("/relu")]
            continue
        for norm, row in gains.items():
            for seed in range(5):
                jiggle = 0.01 * (seed - 2)
                slow = early if norm != "none" else 1.0
                curves = []
                for gain in row:
                    end = UNIGRAM - gain - (jiggle if gain else 0.0)
                    down = [min(1.0, i / (slow * (POINTS - LAST))) for i in range(POINTS)]
                    curves.append([5.5 + (end - 5.5) * share for share in down])
                rough = (smooth * (1 + jiggle) if norm == "batch" else 1.0) * torch.ones(len(FEW), dtype=torch.float64)
                turned = (cosine if norm == "batch" else 0.9) + jiggle * torch.ones(len(FEW), dtype=torch.float64)
                runs = Runs(curves, [torch.full((len(FEW),), 0.1)], [(rough, rough)], [turned])
                values = values_of(runs, UNIGRAM, MARGIN)
                best = max(range(len(FEW)), key=values["gain"].__getitem__)
                again = {"best": FEW[best], "at best": [curves[best]], "closer": [], "closer trained": []}
                made.append(Measurement(STUDY.id, f"{norm}/{act}", seed, values | again))
    return made


def evidence(made, claim=B1) -> Evidence:
    return Evidence(made, claim.plays, Settings())


@pytest.mark.parametrize("claim", [B1, B2, B3, B4], ids=lambda c: c.id)
def test_a_world_that_obeys_holds_and_the_control_flips(claim, judge_claim, told):
    made = invented()
    verdict = judge_claim(claim, claim.plays, made).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(claim, claim.control.plays, made).verdict)
    assert told(claim, evidence(made, claim))
    for chart in claim.figures(evidence(made, claim)):
        assert all(series.y for panel in chart.panels for series in panel.series)


WORSE = {
    "B1": [{"gains": GAINS | {"noisy": [0.0] * 5}}, {"early": 1.3}],
    "B2": [{"smooth": 1.5}],
    "B3": [{"cosine": 0.99}],
    "B4": [{"gains": GAINS | {"batch": [0.1, 0.0, 0.0, 0.0, 0.0], "none": [0.1, 0.5, 0.5, 0.5, 0.0]}}],
}


@pytest.mark.parametrize("claim", [B1, B2, B3, B4], ids=lambda c: c.id)
def test_one_kind_of_units_that_disobeys_refutes(claim, judge_claim):
    for worse in WORSE[claim.id]:
        assert judge_claim(claim, claim.plays, invented(**worse)).verdict is Verdict.FAILS
        assert judge_claim(claim, claim.plays, invented(relu=worse)).verdict is Verdict.FAILS
        with_tanh_alone = judge_claim(claim, claim.plays, invented(**worse, relu={})).verdict
        assert with_tanh_alone is (Verdict.CORRECTED if claim is B2 else Verdict.FAILS)


def test_the_plant_holds_where_the_noise_is_what_refutes(judge_claim):
    made = invented(GAINS | {"noisy": [0.0] * 5})
    assert judge_claim(B1, B1.planted.plays, made).verdict is Verdict.HOLDS


def test_a_best_rate_on_the_edge_of_the_grid_decides_nothing(judge_claim):
    made = invented(GAINS | {"none": [0.5, 0.4, 0.0, 0.0, 0.0]})
    assert judge_claim(B1, B1.plays, made).literal[0].outcome() is Outcome.OPEN
    assert judge_claim(B1, B1.plays, made).verdict is Verdict.UNDECIDED


def test_limits_between_the_same_rates_are_not_decided(judge_claim):
    made = invented(GAINS | {"batch": [0.1, 0.6, 0.0, 0.0, 0.0]})
    assert judge_claim(B4, B4.plays, made).verdict is Verdict.UNDECIDED


def test_the_control_flips_the_correction_too(judge_claim):
    made = invented(smooth=1.0, relu={})
    assert judge_claim(B2, B2.plays, made).verdict is Verdict.CORRECTED
    assert judge_claim(B2, B2.control.plays, made).verdict is Verdict.FAILS


@pytest.mark.parametrize("claim", [B2, B3], ids=lambda c: c.id)
def test_networks_that_share_no_rate_are_not_decided(claim, judge_claim):
    made = invented(GAINS | {"none": [0.0] * 5})
    assert judge_claim(claim, claim.plays, made).verdict is Verdict.UNDECIDED


def test_rates_are_shared_that_break_neither():
    """Plain trains at .1 and .03, BatchNorm from .1 to 3: beyond .1 the plain network is broken."""
    made = invented(GAINS | {"none": [0.1, 0.5, 0.0, 0.0, 0.0], "batch": [0.0, 0.6, 0.9, 0.8, 0.4]})
    assert shared(evidence(made), "batch/tanh", "none/tanh") == FEW[:2]
    assert shared(evidence(made), "batch/tanh", "batch/tanh") == FEW[1:]
    made[0].values["trained"][1] = False  # one seed of the plain network
    assert shared(evidence(made), "none/tanh", "batch/tanh") == FEW[:1]


def test_limits_lie_between_what_was_tried():
    """Too slow is no limit; a hole leaves both ends open; the rates in between only narrow it down."""
    grid = (1.0, 2.0, 4.0, 8.0)
    assert bracket(grid, [False, True, True, False]) == (4.0, 8.0)
    assert bracket(grid, [True, False, True, False]) == (1.0, 8.0)
    assert bracket(grid, [True, True, True, True]) == (8.0, math.inf)
    assert bracket(grid, [False] * 4) == (0.0, 1.0)
    assert between(grid, [True, True, False, False], 3) == pytest.approx([2 * 2 ** (i / 4) for i in (1, 2, 3)])
    assert between(grid, [True, False, True, False], 1) == pytest.approx([2**0.5])
    assert between(grid, [True] * 4, 3) == between(grid, [False] * 4, 3) == ()
    made = invented()
    for m in made:
        if m.arm.startswith("none"):
            m.values.update({"closer": [0.2, 0.15], "closer trained": [False, True]})
    assert limits(evidence(made), "none/tanh") == [(0.15, 0.2)] * 5
    assert too_large(evidence(made), "none/tanh") == FEW[2]
    made[0].values["trained"][FEW.index(0.3)] = True  # one seed of five
    assert too_large(evidence(made), "none/tanh") == FEW[3]


def test_the_ratio_of_limits_is_known_between_its_ends(judge_claim):
    """Plain .1 to .3, BatchNorm 3 or more: at least ln 10, at most anything."""
    (tanh, _) = judge_claim(B4, B4.plays, invented()).literal
    assert tanh.known == (pytest.approx(math.log(3.0 / 0.3)), math.inf)


def test_steps_are_counted_on_the_mean_of_the_last_points():
    made = invented(early=0.5)
    found = steps_to(evidence(made), "noisy", "none", "tanh")
    for m in made:
        if m.arm == "noisy/tanh" and m.seed == 0:
            curve = smoothed(m.values["at best"][0], UNIGRAM)
        if m.arm == "none/tanh" and m.seed == 0:
            goal = smoothed(m.values["at best"][0], UNIGRAM)[-1]
    assert curve[int(found[0]) // CURVE] <= goal < curve[int(found[0]) // CURVE - 1]
    assert steps_to(evidence(made), "none", "batch", "tanh") == [2 * STEPS] * 5


def test_a_run_that_diverged_gains_nothing_and_is_json():
    lost = torch.tensor([math.inf])
    runs = Runs([[5.5, math.inf, math.nan]], [lost], [(lost, lost)], [lost])
    values = values_of(runs, 3.0, 0.1)
    assert (values["gain"], values["trained"]) == ([0.0], [False])
    assert (values["range"], values["cosine"], values["curve"]) == ([None], [None], [[5.5, None, None]])
    json.dumps(values, allow_nan=False)
    assert gain_of([5.5, *[2.9] * LAST], 3.0) == pytest.approx(0.1)
    assert gain_of([2.0, *[2.9] * (LAST - 1), 50.0], 3.0) == pytest.approx(0.1 * (LAST - 1) / LAST)


def test_noise_has_the_moments_of_its_law():
    """Scale: mean 1.125, variance 1/192 + 1/100. Shift: mean 0, variance 1/12 + 1/300. Over many units and samples."""
    scale, shift = jitter(64, 4096, torch.Generator().manual_seed(0))
    assert float(shift.var()) == pytest.approx(1 / 12 + 1 / 300, rel=0.1)  # 4096 units: √(0.8/4096), 7 of those
    assert abs(float(shift.mean())) < 5 * math.sqrt(1 / 12 / 4096)
    assert float(scale.mean()) == pytest.approx(1.125, abs=5 * math.sqrt(1 / 192 / 4096))
    assert float(scale.var()) == pytest.approx(1 / 192 + 1 / 100, rel=0.05)
    assert float(scale.var(0).mean()) == pytest.approx(1 / 100, rel=0.05)  # a unit's scale is one for its whole batch


@pytest.fixture(scope="module", params=[(n, a) for n in ("none", "batch") for a in ACTIVATIONS], ids="/".join)
def probed(request):
    """Two networks side by side, of another copy each, and rows of their own."""
    draws = Draws("probe", "/".join(request.param), 3)
    model = ByteMLPs(MLPConfig(*request.param), draws, (0, 1))
    return model, torch.stack([batches(load_corpus(), 1, 128, draws, copy)[0] for copy in (0, 1)])


def _alone(model, rows, parameters, net):
    """One network's loss and gradient, functionally, with batch statistics."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def loss(p):
        logits = functional_call(model, (p, buffers), (rows[..., :-1],))
        return torch.nn.functional.nll_loss(logits[net].log_softmax(1), rows[net, :, -1])

    leaves = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
    value = loss(leaves)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), dict(zip(leaves, gradients, strict=True))


def _of(tensor, net):
    return tensor.reshape(2, -1)[net]


@pytest.mark.parametrize("net", [0, 1])
def test_probes_agree_with_functions_and_move_nothing(probed, net):
    model, rows = probed
    lrs, start = torch.tensor([0.2, 0.3]), {n: p.detach() for n, p in model.named_parameters()}
    at_start, g = _alone(model, rows, start, net)
    losses, turns = [at_start], list[float]()
    for reach in REACH:
        moved = {n: p - reach * float(lrs[net]) * g[n] for n, p in start.items()}
        loss, there = _alone(model, rows, moved, net)
        losses.append(loss)
        turns.append(float(torch.cat([_of(there[n] - g[n], net) for n in g]).norm()))
    now, gradients = gradients_of(model, rows)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    spread, turn = along_gradient(model, rows, now, gradients, lrs)
    assert float(spread[net]) == pytest.approx(max(losses) - min(losses), rel=1e-3)  # float32 sums in another order
    assert float(turn[net]) == pytest.approx(max(turns), rel=1e-3)

    cosines = gradient_shift(model, rows, gradients, lrs)[:, net]
    for i in (0, 3, 7):
        below = ("embedding", *(f"{part}.{k}" for k in range(i) for part in ("weights", "biases", "norms")))
        moved = {n: p - float(lrs[net]) * g[n] if n.startswith(below) else p for n, p in start.items()}
        a, b = (_of(x[f"weights.{i}"], net) for x in (_alone(model, rows, moved, net)[1], g))
        assert float(cosines[i]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-3)
    still = gradient_shift(model, rows, gradients, torch.zeros(2))
    assert still[:, net].tolist() == pytest.approx([1.0] * 8, abs=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(("norm", "act"), [("none", "tanh"), ("batch", "relu"), ("noisy", "relu")])
def test_networks_side_by_side_are_what_they_are_alone_whatever_becomes_of_the_others(norm, act):
    """Three steps of three networks; the middle one is lost at once, in NaN, the others never hear of it."""
    draws, corpus = Draws("beside", norm, 0), load_corpus()

    def descended(copies, lrs):
        model = ByteMLPs(MLPConfig(norm, act), draws, copies)
        for step in range(3):
            model.step = step
            rows = torch.stack([batches(corpus, 3, 32, draws, copy)[step] for copy in copies])
            descend(dict(model.named_parameters()), gradients_of(model, rows)[1], torch.tensor(lrs))
        return model

    together = descended((0, 1, 2), (0.1, math.inf, 0.2))
    for place, (copy, lr) in {0: (0, 0.1), 2: (2, 0.2)}.items():
        for name, p in descended((copy,), (lr,)).state_dict().items():
            if p.dim() > 0:
                beside = together.state_dict()[name].reshape(3, -1)[place]
                torch.testing.assert_close(beside, p.flatten(), rtol=1e-4, atol=1e-6)  # sums in another order
    assert not together.weights[-1][1].isfinite().all()


def test_arms_start_alike_and_the_noise_belongs_to_its_step_and_copy():
    models = {n: ByteMLPs(MLPConfig(n), Draws("s", n, 1), (0, 0, 1)) for n in ("none", "batch", "noisy")}
    assert torch.equal(models["none"].weights[-1], models["noisy"].weights[-1])
    assert torch.equal(models["none"].weights[0][0], models["none"].weights[0][1])
    assert not torch.equal(models["none"].weights[0][0], models["none"].weights[0][2])
    rows = batches(load_corpus(), 1, 16, Draws("s", "none", 1))[0].expand(3, -1, -1)
    noisy = models["noisy"]
    first, again = losses_of(noisy, rows), losses_of(noisy, rows)
    noisy.step = 1
    assert torch.equal(first, again)
    assert first[0] == first[1] != losses_of(noisy, rows)[0]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_weights_have_the_variance_of_their_law(act):
    """Xavier 2/(in + out), He 2/in where a ReLU follows; of n draws the variance is known within 5·√(2/n)."""
    model = ByteMLPs(MLPConfig("none", act), Draws("law", act, 0), (0, 1))
    for i, weight in enumerate(model.weights):
        _, fan_in, fan_out = weight.shape
        law = 2 / fan_in if act == "relu" and i < 8 else 2 / (fan_in + fan_out)
        assert float(weight.detach().var()) == pytest.approx(law, rel=5 * math.sqrt(2 / weight.numel()))


def test_a_full_run_trains_fresh_networks_at_the_best_rate_and_tries_rates_in_between(monkeypatch):
    """The second training is asked for copies 1 to 3 at the best rate, and copy 0 up to the first rate too large."""
    asked = []

    def pretended(config, nets, bench, along=0, shift=0):
        asked.append(list(nets))
        return Runs([[5.5, *[UNIGRAM - (0.5 - abs(lr - 0.5) if lr <= 0.6 else 0.0)] * LAST] for lr, _ in nets])

    monkeypatch.setattr("normkit.lab.claims.b1_map.train", pretended)
    monkeypatch.setattr("normkit.lab.claims.b1_map.plateau", lambda corpus: (UNIGRAM, MARGIN))
    settings = Settings(mode="full")
    params = next(a.params for a in STUDY.arms(settings) if a.name == "batch/relu")
    values = STUDY.measure(params, Bench(settings, Draws(STUDY.id, "batch/relu", 0), load_corpus()))
    assert values["best"] == 0.5
    assert asked[1] == [(0.5, 1), (0.5, 2), (0.5, 3), *((pytest.approx(2 ** (i / 4 - 1)), 0) for i in (1, 2, 3))]
    assert values["closer trained"] == [True, False, False]
    assert len(values["at best"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_a_full_run_says_the_limit_again(norm):
    """At rate 1, tanh, BatchNorm leaves the plateau and the plain network does not: the pilot's finding."""
    corpus = load_corpus()
    runs = train(MLPConfig(norm, "tanh"), [(1.0, 0)], Bench(Settings(), Draws(STUDY.id, f"{norm}/tanh", 0), corpus))
    unigram, margin = plateau(corpus)
    assert (gain_of(runs.curves[0], unigram) > margin) is (norm == "batch")
