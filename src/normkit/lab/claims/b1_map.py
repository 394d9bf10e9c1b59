"""The map behind B1 to B4: a deep network without a norm, with BatchNorm, and with noise after BatchNorm, over rates.

Arms are named norm/rate; a role of the claims is a norm, read over all rates. Runs without noise also probe their own
trajectory: the loss along the gradient, and how far each layer's gradient turns when the layers below it move.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Evidence, Params, Study, Values
from normkit.lab.corpus import Corpus, bigram_entropy, unigram_entropy
from normkit.lab.model.byte_mlp import ByteMLP, MLPConfig, batches, descend, heldout_loss, heldout_rows, loss_of
from normkit.lab.settings import Settings

STEPS, ROWS = 160, 128
CURVE = 10  # steps between two points of the held-out curve
PROBE = 40  # steps between two probes
REACH = (0.5, 1.0, 2.0, 4.0)  # how many of the run's own steps a probe goes along the gradient
NORMS = ("none", "batch", "noisy")
FEW = (0.3, 1.0, 3.0)
WIDER = (0.03, 0.1, 0.3, 0.55, 1.0, 1.75, 3.0, 5.5, 10.0, 30.0)

Gradients = Mapping[str, Tensor]


def rates(settings: Settings) -> tuple[float, ...]:
    """Return the learning rates of the map, the same for all arms; three of them under quick settings."""
    return FEW if settings.mode == "quick" else WIDER


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(f"{norm}/lr-{lr:g}", {"norm": norm, "lr": lr}) for norm in NORMS for lr in rates(settings)]


def _measure(params: Params, bench: Bench) -> Values:
    """Train once; a run ends where a loss is not finite."""
    assert bench.corpus is not None
    device, lr = bench.settings.device, params["lr"]
    model = ByteMLP(MLPConfig(params["norm"]), bench.draws).to(device)
    judged = heldout_rows(bench.corpus).to(device)
    curve, drift, probes = [heldout_loss(model, judged)], list[float](), list[Values]()
    before: Tensor | None = None
    for step, rows in enumerate(batches(bench.corpus, STEPS, ROWS, bench.draws).to(device)):
        model.step = step
        loss, gradients = gradients_of(model, rows)
        units = moments_of(model.inputs)
        if not math.isfinite(loss):
            break
        if before is not None:
            drift.append(float((units - before).square().mean().sqrt()))
        before = units
        if step % PROBE == 0 and params["norm"] != "noisy":
            probes.append(probe(model, rows, gradients, lr))
        descend(dict(model.named_parameters()), gradients, lr)
        if step % CURVE == CURVE - 1:
            curve.append(heldout_loss(model, judged))
    return values_of(curve, drift, probes, *plateau(bench.corpus))


def values_of(curve: list[float], drift: list[float], probes: list[Values], unigram: float, margin: float) -> Values:
    """Return a run as measurements. A run that diverged has gained nothing over the unigram plateau."""
    whole = len(curve) == STEPS // CURVE + 1 and all(map(math.isfinite, curve))
    heldout = curve[-1] if whole else None
    return {
        "heldout": heldout,
        "trained": heldout is not None and heldout < unigram - margin,
        "gain": 0.0 if heldout is None else unigram - heldout,
        "curve": [point if math.isfinite(point) else None for point in curve],
        "unigram": unigram,
        "margin": margin,
        "drift": _mean(drift),
        "range": _log_mean([p["range"] for p in probes]),
        "turn": _log_mean([p["turn"] for p in probes]),
        "cosine": _mean([p["cosine"] for p in probes]),
    }


@lru_cache(maxsize=4)
def plateau(corpus: Corpus) -> tuple[float, float]:
    """Return the entropy of the judged bytes, and a tenth of what the byte before tells about a byte."""
    information = unigram_entropy(corpus.train) - bigram_entropy(corpus.train)
    return unigram_entropy(heldout_rows(corpus)[:, -1]), information / 10


def gradients_of(model: ByteMLP, rows: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss on ``rows`` and its gradient by parameter name."""
    named = dict(model.named_parameters())
    loss = loss_of(model, rows)
    return float(loss.detach()), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def moments_of(inputs: list[Tensor]) -> Tensor:
    """Return the mean and the standard deviation of every unit over the batch, (layers, 2, units)."""
    return torch.stack([torch.stack([x.mean(0), x.std(0)]) for x in inputs])


def probe(model: ByteMLP, rows: Tensor, gradients: Gradients, lr: float) -> Values:
    """Look around a point of the trajectory without moving anything: parameters or running statistics."""
    spread, turn = along_gradient(model, rows, gradients, lr)
    cosines = gradient_shift(model, rows, gradients, lr)
    return {"range": spread, "turn": turn, "cosine": sum(cosines) / len(cosines)}


def along_gradient(model: ByteMLP, rows: Tensor, gradients: Gradients, lr: float) -> tuple[float, float]:
    """Return the range of L(θ − ηg), η = 0 and `REACH` × lr, and the largest ‖∇L(θ − ηg) − g‖ among them."""
    losses, turned = list[float](), 0.0
    for reach in (0.0, *REACH):
        moved = copy.deepcopy(model)
        descend(dict(moved.named_parameters()), gradients, reach * lr)
        loss, there = gradients_of(moved, rows)
        losses.append(loss)
        turned = max(turned, math.sqrt(sum(float((there[n] - g).square().sum()) for n, g in gradients.items())))
    return max(losses) - min(losses), turned


def gradient_shift(model: ByteMLP, rows: Tensor, gradients: Gradients, lr: float) -> list[float]:
    """Return, for each hidden weight, the cosine between its gradient before and after all layers below took a step.

    This is internal covariate shift as Santurkar et al. measure it: what the layer above sees of the others' update.
    """
    moved = copy.deepcopy(model)
    named, below, cosines = dict(moved.named_parameters()), ["embedding.weight"], list[float]()
    for i in range(moved.config.layers):
        descend({name: named[name] for name in below}, gradients, lr)
        weight = f"hidden.{i}.weight"
        (after,) = torch.autograd.grad(loss_of(moved, rows), [named[weight]])
        cosines.append(float(torch.cosine_similarity(after.flatten(), gradients[weight].flatten(), dim=0)))
        below = [name for name in named if name.startswith((f"hidden.{i}.", f"norms.{i}."))]
    return cosines


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _log_mean(values: list[float]) -> float | None:
    """Return the mean of the logarithms, None where one is not a positive finite number."""
    return _mean([math.log(v) for v in values]) if all(v > 0 and math.isfinite(v) for v in values) else None


def _seconds(params: Params) -> float:
    return {"none": 0.6, "batch": 1.8, "noisy": 1.7}[params["norm"]]


STUDY = Study(id="batch_norm_map", arms=_arms, measure=_measure, seconds=_seconds, seeds=5, corpus=True, full_only=True)


def at(role: str, lr: float) -> str:
    """Return the evidence path of a role at a learning rate."""
    return f"{role}/lr-{lr:g}"


def best_rate(e: Evidence, role: str) -> float:
    """Return the learning rate at which this arm gains most on held-out text, in the mean over seeds."""
    return max(rates(e.settings), key=lambda lr: math.fsum(e.numbers(at(role, lr), "gain")))


def share_trained(e: Evidence, role: str, lr: float) -> float:
    """Return the share of seeds that leave the unigram plateau."""
    runs = e.numbers(at(role, lr), "trained")
    return sum(runs) / len(runs)


def boundary(e: Evidence, role: str) -> tuple[float, float]:
    """Return between which two rates of the grid the largest that all seeds bear lies.

    The first is the largest at which all seeds train, the second the smallest above it at which none does: where
    seeds disagree the limit may lie at either end. Beyond an edge of the grid it lies at 0 or ∞ at most.
    """
    grid = rates(e.settings)
    shares = [share_trained(e, role, lr) for lr in grid]
    low = max((lr for lr, share in zip(grid, shares, strict=True) if share == 1), default=0.0)
    return low, min((lr for lr, share in zip(grid, shares, strict=True) if lr > low and share == 0), default=math.inf)
