"""A1: a gain per layer compounds exponentially with depth, forward and backward.

A net of `DEPTH` square layers, weights N(0, c·g²/width) with c = 1 for the linear net and 2 for ReLU, which
throws half the mean square away: every layer then multiplies the mean square by g² on average, and so does
every layer of the backward pass. The control arm normalizes before each weight, which takes the gain out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

DEPTH, WIDTH, BATCH = 50, 512, 16
GAINS = (0.8, 1.0, 1.2)
NETS = ("linear", "relu")
DIRECTIONS = ("forward", "backward")


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{name}/{net}", {"normalized": name == "normalized", "net": net})
        for name in ("plain", "normalized")
        for net in NETS
    ]


def _log_rms(states: Sequence[Tensor]) -> list[float]:
    return [0.5 * math.log(float(s.square().mean())) for s in states]


def _slope(y: Sequence[float]) -> float:
    centre = (len(y) - 1) / 2
    squares = sum((i - centre) ** 2 for i in range(len(y)))
    return sum((i - centre) * v for i, v in enumerate(y)) / squares


def _run(weights: Tensor, x: Tensor, cotangent: Tensor, params: Params) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states h_0 … h_DEPTH and the gradients of ⟨cotangent, h_DEPTH⟩ on them, from the output back."""
    states = [x.requires_grad_()]
    for weight in weights:
        h = F.relu(states[-1]) if params["net"] == "relu" else states[-1]
        states.append((rms_norm(h) if params["normalized"] else h) @ weight)
    gradients = torch.autograd.grad(states[-1], states, cotangent)
    return [s.detach() for s in states], list(reversed(gradients))


def _measure(params: Params, bench: Bench) -> Values:
    kept = 0.5 if params["net"] == "relu" else 1.0  # share of the mean square that the nonlinearity keeps
    device = bench.settings.device
    weights = bench.draws.randn(DEPTH, WIDTH, WIDTH, stream="weights").to(device)
    weights /= math.sqrt(WIDTH * kept)
    cotangent = bench.draws.randn(BATCH, WIDTH, stream="cotangent").to(device)
    values: Values = {}
    for i, gain in enumerate(GAINS):
        weights *= gain / GAINS[i - 1] if i else gain
        x = bench.draws.randn(BATCH, WIDTH).to(device)
        for direction, states in zip(DIRECTIONS, _run(weights, x, cotangent, params), strict=True):
            curve = _log_rms(states)
            values[f"{direction}/{gain}"] = _slope(curve)
            values[f"{direction}/{gain}/curve"] = curve
    return values


STUDY = Study(
    id="depth_gain",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.22 if params["normalized"] else 0.17,
    seeds=3,
)


def tolerance(net: str) -> float:
    """Return how far a measured slope may lie from ln g, from the sampling theory of one random layer.

    With κ the variance of one unit's squared activation in units of its squared mean (2 for a normal number, 5
    for a rectified one), the ln rms of a state moves per layer by ln g − κ/4d with standard deviation at most
    √(κ/4d): the bound is met when all inputs of the batch point the same way. A least-squares slope through
    N steps of a random walk has √(6/5N) times the step's deviation. Bias and three deviations, twice, so that
    the judgement at half tolerance still leaves room for them.
    """
    kappa = 5.0 if net == "relu" else 2.0
    deviation = math.sqrt(kappa / (4 * WIDTH)) * math.sqrt(6 / (5 * DEPTH))
    return 2 * (kappa / (4 * WIDTH) + 3 * deviation)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"{net}, g = {gain}: slope of ln rms {direction} (per layer)",
            values=e.numbers(f"net/{net}", f"{direction}/{gain}"),
            kind="near",
            target=math.log(gain),
            tolerance=tolerance(net),
            reason=f"twice (bias + 3 standard deviations) of the slope at width {WIDTH}, depth {DEPTH}",
            every=True,
        )
        for net in NETS
        for gain in GAINS
        for direction in DIRECTIONS
    ]


def _summary(e: Evidence) -> str:
    off = max(
        abs(slope - math.log(gain))
        for net in NETS
        for gain in GAINS
        for direction in DIRECTIONS
        for slope in e.numbers(f"net/{net}", f"{direction}/{gain}")
    )
    gains = ", ".join(f"{g:g}" for g in GAINS)
    return f"slope of ln rms per layer: within {number(off, 2)} of ln g, forward and backward, for g = {gains}"


def _figures(e: Evidence) -> list[Chart]:
    names = {"linear": "linear", "relu": "ReLU"}

    def panel(direction: str, x_label: str, y_label: str) -> Panel:
        layers = list(range(DEPTH + 1))
        series = [
            band(f"{names[net]}, g = {g}", layers, _powers(e.values(f"net/{net}", f"{direction}/{g}/curve")))
            for g in GAINS
            for net in NETS
        ]
        laws = [Series(f"{g}ˡ", layers, [g**i for i in layers], kind="reference") for g in GAINS]
        return Panel(direction, x_label, y_label, [*series, *laws], y_scale="log")

    return [
        Chart(
            caption=f"Scale of states and gradients over {DEPTH} layers of width {WIDTH}; dashed: gˡ, "
            "with l the layers passed. Bands: min–max over seeds.",
            alt="Straight lines on a logarithmic axis: rising for gain 1.2, level for 1, falling for 0.8, "
            "the same forward and backward, each on its dashed law.",
            panels=[
                panel("forward", "layer l", "rms of the state"),
                panel("backward", "layers l from the output", "rms of the gradient"),
            ],
        )
    ]


def _powers(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[math.exp(v) for v in curve] for curve in curves]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="A1",
        title="A gain per layer compounds",
        sentence="If one layer amplifies the signal a little on average, the effect builds up "
        "exponentially over tens of layers until activations explode, or they decay until they vanish; "
        "gradients suffer the same on the way back.",
        sentences=(1, 2),
        source="Article, “The difficulty of training deep networks”.",
        measured=f"Root mean square of the state after each of {DEPTH} layers, and of the gradient on each "
        "state for a random cotangent at the output, in a linear and a ReLU net whose layers multiply the "
        f"mean square by g², g = {', '.join(map(str, GAINS))}; a straight line is fitted to its logarithm. "
        f"Width {WIDTH}, {BATCH} random inputs, weights shared by all gains and by the normalized arm.",
        study=STUDY,
        plays={"net": "plain"},
        literal=Rule(
            text="In both nets and both directions the slope of ln rms against depth is ln g, within twice "
            "(bias + 3 standard deviations) that a random layer of this width allows "
            f"({tolerance('linear'):.3f} linear, {tolerance('relu'):.3f} ReLU), at every seed.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The same weights with a normalization before each layer: no gain is passed on, so the "
            "slopes at g ≠ 1 must leave ln g.",
            plays={"net": "normalized"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Independent layers multiply the mean square by g² each, so its logarithm adds up. "
            "Normalizing before the layer divides by the very scale that was passed on, forward, and by its "
            "inverse, backward, and the slope is zero at any g.",
            status="tested",
        ),
    ),
)
