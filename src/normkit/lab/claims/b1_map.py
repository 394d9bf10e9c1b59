"""The map behind B1 to B4: deep networks without a norm, with BatchNorm, and with noise after BatchNorm, over rates.

Arms are named norm/activation; a role of the claims is a norm. A measurement trains the whole grid of rates side by
side, and in a full run once more: fresh networks at the rate that came out best, which so are not those it was chosen
by, and rates between the last that trains and the first that does not. Runs without noise also probe their own
trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Evidence, Params, Study, Values
from normkit.lab.claims.b1_probes import along_gradient, gradient_shift, gradients_of
from normkit.lab.corpus import Corpus, bigram_entropy, unigram_entropy
from normkit.lab.model.byte_mlp import ByteMLPs, MLPConfig, batches, descend, heldout_losses, heldout_rows
from normkit.lab.settings import Settings

STEPS, ROWS = 160, 128
CURVE = 8  # steps between two points of the held-out curve
LAST = 5  # points that a score is the mean of: 40 steps
NORMS = ("none", "batch", "noisy")
ACTIVATIONS = {"tanh": "tanh, Xavier", "relu": "ReLU, He"}
FEW = (0.03, 0.1, 0.3, 1.0, 3.0)
WIDER = tuple(2.0**k for k in range(-5, 4))
ALONG, SHIFT = 5, 20  # steps between two probes along the gradient, and of what the layers below do to it
FRESH = 3  # networks at the best rate
BETWEEN = 3  # rates between the last that trains and the first that does not


def rates(settings: Settings) -> tuple[float, ...]:
    """Return the learning rates of the map, the same for all arms; three of them under quick settings."""
    return FEW if settings.mode == "quick" else WIDER


def _arms(settings: Settings) -> list[Arm]:
    again = {"fresh": 0, "between": 0} if settings.mode == "quick" else {"fresh": FRESH, "between": BETWEEN}
    probes = {"along": 40, "shift": 40} if settings.mode == "quick" else {"along": ALONG, "shift": SHIFT}
    how = {"rates": rates(settings), **probes, **again}
    return [Arm(f"{norm}/{act}", {"norm": norm, "activation": act, **how}) for norm in NORMS for act in ACTIVATIONS]


@dataclass
class Runs:
    """What R networks trained side by side leave: a curve each, and what was seen on the way, (R,) each time."""

    curves: list[list[float]]
    drift: list[Tensor] = field(default_factory=list[Tensor])
    along: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    shift: list[Tensor] = field(default_factory=list[Tensor])


def train(config: MLPConfig, nets: Sequence[tuple[float, int]], bench: Bench, along: int = 0, shift: int = 0) -> Runs:
    """Train networks side by side, each with its learning rate and copy.

    All are probed along their gradients every ``along`` steps, for what the layers below do every ``shift``; 0: never.
    """
    assert bench.corpus is not None
    device, copies = bench.settings.device, [copy for _, copy in nets]
    lrs = torch.tensor([lr for lr, _ in nets], device=device)
    model = ByteMLPs(config, bench.draws, copies).to(device)
    judged = heldout_rows(bench.corpus).to(device)
    text = {copy: batches(bench.corpus, STEPS, ROWS, bench.draws, copy) for copy in set(copies)}
    runs, before = Runs([[loss] for loss in heldout_losses(model, judged)]), None
    for step in range(STEPS):
        model.step = step
        rows = torch.stack([text[copy][step] for copy in copies]).to(device)
        losses, gradients = gradients_of(model, rows)
        if step % CURVE < 2:
            units = moments_of(model.inputs)
            if before is not None and step % CURVE == 1:
                runs.drift.append((units - before).square().mean((0, 1, 3)).sqrt())
            before = units
        if along and step % along == 0:
            runs.along.append(along_gradient(model, rows, losses, gradients, lrs))
        if shift and step % shift == 0:
            runs.shift.append(gradient_shift(model, rows, gradients, lrs).mean(0))
        descend(dict(model.named_parameters()), gradients, lrs)
        if step % CURVE == CURVE - 1:
            model.step = STEPS + step  # another noise than that of the step just taken
            for curve, loss in zip(runs.curves, heldout_losses(model, judged), strict=True):
                curve.append(loss)
    return runs


def moments_of(inputs: list[Tensor]) -> Tensor:
    """Return the mean and the standard deviation of every unit over the batch, (layers, 2, R, units)."""
    return torch.stack([torch.stack([x.mean(1), x.std(1)]) for x in inputs])


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    config, grid = MLPConfig(params["norm"], params["activation"]), tuple(params["rates"])
    probes = () if params["norm"] == "noisy" else (params["along"], params["shift"])
    unigram, margin = plateau(bench.corpus)
    values = values_of(train(config, [(lr, 0) for lr in grid], bench, *probes), unigram, margin)
    best, closer = grid[best_of(values["gain"])], between(grid, values["trained"], params["between"])
    nets = [*((best, copy) for copy in range(1, 1 + params["fresh"])), *((lr, 0) for lr in closer)]
    curves = train(config, nets, bench).curves if nets else []
    at_best = curves[: params["fresh"]] or [values["curve"][grid.index(best)]]
    gains = [gain_of(curve, unigram) for curve in curves[params["fresh"] :]]
    return values | {
        "best": best,
        "at best": [_finite(curve) for curve in at_best],
        "closer": list(closer),
        "closer trained": [gain > margin for gain in gains],
    }


def values_of(runs: Runs, unigram: float, margin: float) -> Values:
    """Return a grid's runs as measurements, a list over its rates each; geometric means of ``range`` and ``turn``."""
    gains = [gain_of(curve, unigram) for curve in runs.curves]
    return {
        "gain": gains,
        "trained": [gain > margin for gain in gains],
        "curve": [_finite(curve) for curve in runs.curves],
        "unigram": unigram,
        "margin": margin,
        "drift": _means(runs.drift),
        "range": _means([spread.log() for spread, _ in runs.along]),
        "turn": _means([turn.log() for _, turn in runs.along]),
        "cosine": _means(runs.shift),
    }


def gain_of(curve: Sequence[float | None], unigram: float) -> float:
    """Return what a curve ends on: by how much the mean of its last `LAST` points lies below the unigram plateau."""
    return unigram - smoothed(curve, unigram)[-1]


def smoothed(curve: Sequence[float | None], unigram: float) -> list[float]:
    """Return the mean of each point and those before it, `LAST` in all, or as many as there are.

    A point above the plateau, or not finite, counts as on it: nothing is known there but the bytes' frequencies, if
    that.
    """
    points = [min(p, unigram) if p is not None and math.isfinite(p) else unigram for p in curve]
    windows = [points[max(0, i + 1 - LAST) : i + 1] for i in range(len(points))]
    return [math.fsum(window) / len(window) for window in windows]


def best_of(gains: Sequence[float]) -> int:
    """Return the place of the largest gain."""
    return max(range(len(gains)), key=gains.__getitem__)


def bracket(tried: Sequence[float], trained: Sequence[bool]) -> tuple[float, float]:
    """Return between which two of the rates tried, in ascending order, the largest that trains lies.

    The first is the last before the first failure above the smallest that trains, the second the smallest above all
    that train. Beyond an edge it lies at 0 or ∞ at most. Below, networks are merely too slow.
    """
    pairs = list(zip(tried, trained, strict=True))
    some = [lr for lr, well in pairs if well]
    if not some:
        return 0.0, tried[0]
    failed = min((lr for lr, well in pairs if not well and lr > some[0]), default=math.inf)
    return max(lr for lr in some if lr < failed), min((lr for lr in tried if lr > some[-1]), default=math.inf)


def between(grid: Sequence[float], trained: Sequence[bool], number: int) -> tuple[float, ...]:
    """Return ``number`` rates, evenly spaced in logarithms, between the last that trains and the next of the grid."""
    low, _ = bracket(grid, trained)
    following = min((lr for lr in grid if lr > low), default=low)
    if low == 0 or following == low:
        return ()
    return tuple(low * (following / low) ** (i / (number + 1)) for i in range(1, number + 1))


@lru_cache(maxsize=4)
def plateau(corpus: Corpus) -> tuple[float, float]:
    """Return the entropy of the judged bytes, and a tenth of what the byte before tells about a byte."""
    information = unigram_entropy(corpus.train) - bigram_entropy(corpus.train)
    return unigram_entropy(heldout_rows(corpus)[:, -1]), information / 10


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _means(seen: list[Tensor]) -> list[float | None]:
    """Return each network's mean, None where it is not finite; nothing at all where nothing was seen."""
    return _finite(torch.stack(seen).double().mean(0).tolist()) if seen else []


def _seconds(params: Params) -> float:
    """Estimate from a network's share of a training side by side, the grid's first, then those of a full run."""
    first, then = {"none": (0.3, 0.2), "batch": (0.8, 0.5), "noisy": (0.5, 0.8)}[params["norm"]]
    return first * len(params["rates"]) + then * (params["fresh"] + params["between"])


STUDY = Study(id="batch_norm_map", arms=_arms, measure=_measure, seconds=_seconds, seeds=5, corpus=True, full_only=True)


def at(role: str, activation: str) -> str:
    """Return the evidence path of a role with an activation."""
    return f"{role}/{activation}"


def by_rate(e: Evidence, path: str, key: str, lr: float) -> list[float]:
    """Return ``key`` at a learning rate of the grid, seed by seed; None becomes NaN, which no criterion passes."""
    place = rates(e.settings).index(lr)
    found = [row[place] for row in e.values(path, key)]
    return [math.nan if v is None else float(v) for v in found]


def best_rate(e: Evidence, path: str) -> float:
    """Return the learning rate of the grid at which this arm gains most on held-out text, in the mean over seeds."""
    return max(rates(e.settings), key=lambda lr: math.fsum(by_rate(e, path, "gain", lr)))


def shared(e: Evidence, *paths: str) -> tuple[float, ...]:
    """Return the learning rates of the grid at which one of these arms trains and none is broken.

    An arm trains at a rate if it does with all seeds, and is broken by a rate above all at which it trains. Below them
    it is merely slower.
    """
    grid = rates(e.settings)
    trains = [{lr for lr in grid if all(by_rate(e, path, "trained", lr))} for path in paths]
    borne = min(max(well, default=0.0) for well in trains)
    return tuple(lr for lr in grid if lr <= borne and any(lr in well for well in trains))


def too_large(e: Evidence, path: str) -> float:
    """Return the smallest learning rate of the grid above all at which some seed trains; its last if there is none."""
    grid = rates(e.settings)
    some = max((lr for lr in grid if any(by_rate(e, path, "trained", lr))), default=0.0)
    return next((lr for lr in grid if lr > some), grid[-1])


def limits(e: Evidence, path: str) -> list[tuple[float, float]]:
    """Return between which two learning rates the largest that trains lies, seed by seed."""
    found = list[tuple[float, float]]()
    for trained, closer, well in zip(
        *(e.values(path, k) for k in ("trained", "closer", "closer trained")), strict=True
    ):
        tried = sorted([*zip(rates(e.settings), trained, strict=True), *zip(closer, well, strict=True)])
        found.append(bracket([lr for lr, _ in tried], [did for _, did in tried]))
    return found
