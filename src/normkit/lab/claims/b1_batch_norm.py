"""B1 and B4: noise after BatchNorm against no norm at all, and how large a learning rate BatchNorm allows.

Every arm is judged at its own best rate of one shared grid, or by the largest rate at which it trains: which arm is
faster at a given rate says as much about the rate as about the norm. And each judgement must hold with tanh and
Xavier's weights, which shrink a deep network's signal, as well as with ReLU and He's, which keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.b1_map import (
    ACTIVATIONS,
    BETWEEN,
    CURVE,
    FRESH,
    LAST,
    ROWS,
    STEPS,
    STUDY,
    WIDER,
    at,
    best_rate,
    by_rate,
    limits,
    rates,
    smoothed,
    too_large,
)
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.byte_mlp import BYTES, EMBEDDING, HELDOUT, LAYERS, WIDTH
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion, interval

LABELS = {"none": "no norm", "batch": "BatchNorm", "noisy": "BatchNorm + noise"}

MEASURED = (
    f"{LAYERS} hidden layers of {WIDTH} units predict a byte of real text from the {BYTES} before it (embedding "
    f"{EMBEDDING}): plain SGD, {STEPS} steps of {ROWS} rows, with no norm, with normkit.BatchNorm before each "
    "activation, or with noise after BatchNorm (each unit's shift and scale drawn anew at every step, each sample's "
    "around them); units are tanh with Xavier's weights or ReLU with He's. Arms share text, initial "
    f"weights and {len(WIDER)} rates from {WIDER[0]:g} to {WIDER[-1]:g}. "
    f"Held-out loss is read every {CURVE} steps, that of the network as it trains: by the statistics of the {HELDOUT} "
    "held-out rows, and with noise, since running statistics gathered under noise fit no network without it. A run's "
    f"score is the mean of the last {CURVE * LAST} steps, and it trains if that is below the entropy of the bytes' "
    "frequencies by a tenth of what one byte of context is worth. "
)


def largest(e: Evidence, role: str, other: str, activation: str) -> Criterion:
    """Return the criterion that ``role`` trains at larger rates than ``other``, seed by seed."""
    pairs = list(zip(limits(e, at(role, activation)), limits(e, at(other, activation)), strict=True))
    least = [_ln(low, other_high, -math.inf) for (low, _), (_, other_high) in pairs]
    most = [_ln(high, other_low, math.inf) for (_, high), (other_low, _) in pairs]
    known = (
        interval(least).low if all(map(math.isfinite, least)) else -math.inf,
        interval(most).high if all(map(math.isfinite, most)) else math.inf,
    )
    floor = rates(e.settings)[0]
    return Criterion(
        name=f"{ACTIVATIONS[activation]}: ln of the largest rate that trains, {role} ({told(e, role, activation)}) "
        f"over {other} ({told(e, other, activation)})",
        values=[math.log(max(low, floor) / max(other_low, floor)) for (low, _), (other_low, _) in pairs],
        kind="above",
        target=0.0,
        tolerance=math.log(3) / 4,
        reason="a rate a third larger, or 1.7 times as large at double the tolerance, is not yet the several times "
        "that the papers speak of",
        known=(0.0, 0.0) if e.arm(role) == e.arm(other) else known,  # one arm has one limit, wherever it lies
    )


def _ln(top: float, bottom: float, unknown: float) -> float:
    return math.log(top / bottom) if 0 < top < math.inf and 0 < bottom < math.inf else unknown


def told(e: Evidence, role: str, activation: str) -> str:
    """Say where an arm's limits lie: between the rates that all seeds' limits lie between."""
    found = limits(e, at(role, activation))
    low, high = min(low for low, _ in found), max(high for _, high in found)
    if low == 0:
        return f"below {high:.2g}" if high < math.inf else "unknown"
    return f"{low:.2g} or more" if high == math.inf else f"{low:.2g} to {high:.2g}"


def curves_at_best(e: Evidence, path: str) -> list[list[float]]:
    """Return what an arm's score has come to by each point, at each seed's best rate, the mean over its networks."""
    found = list[list[float]]()
    for networks, unigram in zip(e.values(path, "at best"), e.numbers(path, "unigram"), strict=True):
        columns = zip(*(smoothed(curve, unigram) for curve in networks), strict=True)
        found.append([math.fsum(column) / len(column) for column in columns])
    return found


def steps_to(e: Evidence, role: str, goal: str, activation: str) -> list[float]:
    """Return the steps ``role`` needs to the score that ``goal`` ends on, each at its best rate, seed by seed.

    A run that does not get there is counted as twice as long.
    """
    curves, goals = (curves_at_best(e, at(r, activation)) for r in (role, goal))
    return [
        float(next((CURVE * i for i, point in enumerate(curve) if point <= ended[-1]), 2 * STEPS))
        for curve, ended in zip(curves, goals, strict=True)
    ]


def _faster(e: Evidence, activation: str) -> Criterion:
    edges = {rates(e.settings)[0], rates(e.settings)[-1]}
    best = {lr for role in ("noisy", "none") for lr in e.numbers(at(role, activation), "best")}
    return Criterion(
        name=f"{ACTIVATIONS[activation]}: steps of the noisy network to what the plain one reaches in {STEPS}, each at "
        "its best rate",
        values=steps_to(e, "noisy", "none", activation),
        kind="below",
        target=float(STEPS),
        tolerance=float(CURVE),
        reason=f"the curve has a point every {CURVE} steps",
        known=(-math.inf, math.inf) if best & edges else None,  # the best may lie beyond the grid
    )


def _stabler(e: Evidence, activation: str) -> list[Criterion]:
    lr = too_large(e, at("none", activation))

    def gain(role: str) -> tuple[str, list[float]]:
        name = f"{ACTIVATIONS[activation]}, {role}, rate {lr:g}: held-out gain over the unigram plateau (nats/byte)"
        return name, by_rate(e, at(role, activation), "gain", lr)

    margin = float(e.first(at("none", activation), "margin"))
    reason = "a tenth of what the previous byte tells about a byte in this text"
    return [
        Criterion(*gain("noisy"), kind="above", target=0.0, tolerance=margin, reason=reason),
        Criterion(*gain("none"), kind="at_most", target=0.0, tolerance=margin, reason=reason),
    ]


def _b1_summary(e: Evidence) -> str:
    def line(activation: str) -> str:
        steps = estimate(steps_to(e, "noisy", "none", activation))
        return f"{steps}, trains to {told(e, 'noisy', activation)}, plain {told(e, 'none', activation)}"

    return f"steps to the plain score at {STEPS}: tanh {line('tanh')}; ReLU {line('relu')}"


def _b4_summary(e: Evidence) -> str:
    ends = (f"{a} {told(e, 'batch', a)}, {told(e, 'none', a)} without" for a in ACTIVATIONS)
    return f"largest rate that trains with BatchNorm: {'; '.join(ends)}"


def loss_chart(e: Evidence, roles: Mapping[str, str]) -> Chart:
    """Draw the score over the learning rate; what does not train is drawn on the plateau."""
    grid = rates(e.settings)

    def line(role: str, activation: str) -> Series:
        unigram = e.numbers(at(role, activation), "unigram")
        columns = [by_rate(e, at(role, activation), "gain", lr) for lr in grid]
        rows = zip(*columns, strict=True)
        return band(roles[role], grid, [[u - gain for gain in row] for u, row in zip(unigram, rows, strict=True)])

    def panel(activation: str) -> Panel:
        level = float(e.first(at(next(iter(roles)), activation), "unigram"))
        plateau = Series("unigram plateau", grid, [level] * len(grid), kind="reference")
        lines = [*(line(role, activation) for role in roles), plateau]
        return Panel(ACTIVATIONS[activation], "learning rate", "loss (nats/byte)", lines, x_scale="log")

    return Chart(
        caption=f"Held-out loss over the learning rate, the mean of the last {CURVE * LAST} of {STEPS} steps. Points "
        "above the plateau, or not finite, count as on it. Bands: min–max over seeds.",
        alt=". ".join(
            f"{ACTIVATIONS[a]}, {label}: best at {best_rate(e, at(role, a)):g}, largest rate that trains "
            f"{told(e, role, a)}"
            for a in ACTIVATIONS
            for role, label in roles.items()
        ),
        panels=[panel(activation) for activation in ACTIVATIONS],
    )


def _curves(e: Evidence) -> Chart:
    def line(role: str, activation: str) -> Series:
        curves = curves_at_best(e, at(role, activation))
        points = range(1, len(curves[0]))  # the first is the loss before training
        return band(LABELS[role], [CURVE * i for i in points], [[curve[i] for i in points] for curve in curves])

    def drift(activation: str) -> Series:
        paths = [at(role, activation) for role in LABELS]
        seen = [by_rate(e, path, "drift", best_rate(e, path)) for path in paths]
        means = [(i, math.fsum(row) / len(row)) for i, row in enumerate(seen) if all(map(math.isfinite, row))]
        return Series(ACTIVATIONS[activation], [i for i, _ in means], [mean for _, mean in means], kind="bars")

    return Chart(
        caption=f"Held-out loss, the mean of {CURVE * LAST} steps, each arm at its best rate. Bands: min–max over "
        "seeds. Last: change of a unit's batch mean and deviation from one step to the next, root mean square. That "
        "noise raises it is by construction; it is shown, not scored.",
        alt="Two panels of three falling curves; beside them bars, the tallest those of the noisy network.",
        panels=[
            *(
                Panel(label, "step", "held-out loss (nats/byte)", [line(role, activation) for role in LABELS])
                for activation, label in ACTIVATIONS.items()
            ),
            Panel(
                "drift (shown)",
                "arm",
                "change a step",
                [drift(activation) for activation in ACTIVATIONS],
                x_names=list(LABELS.values()),
            ),
        ],
    )


_AT_BEST = (
    f"Then {FRESH} fresh networks, those compared, are trained at the rate that came out best for the seed (a quick "
    "run compares the first one itself). "
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="B1",
        title="Noise after BatchNorm",
        sentence="Even when noise is injected after normalization, so that distributions shift all the more, a network "
        "with normalization still trains faster and more stably than one without.",
        sentences=(4,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018, section 2.",
        measured=MEASURED + _AT_BEST + "Compared are the noisy network and the plain one: steps to the score the plain "
        "one ends on, each at its own best rate, and what either comes to at a rate too large for the plain one.",
        study=STUDY,
        plays={"noisy": "noisy", "none": "none", "batch": "batch"},
        literal=Rule(
            text=f"With tanh and with ReLU: each at its best rate, which must not be the grid's first or last, the "
            f"noisy network reaches the plain one's final score more than {CURVE} steps before step {STEPS}; and at "
            "the smallest rate above all at which the plain network trains with some seed, the noisy one trains while "
            "the plain one stays at the unigram plateau or above.",
            origin="sentence",
            criteria=lambda e: [c for a in ACTIVATIONS for c in (_faster(e, a), *_stabler(e, a))],
        ),
        control=Control(
            text="The roles swapped: the plain network must not be faster and bear larger rates than the noisy one.",
            plays={"noisy": "none", "none": "noisy", "batch": "batch"},
        ),
        planted=Control(
            text="The noise taken out: BatchNorm alone plays the noisy network, and must be found faster and stabler.",
            plays={"noisy": "batch", "none": "none", "batch": "batch"},
        ),
        summary=_b1_summary,
        figures=lambda e: [_curves(e), loss_chart(e, LABELS)],
        explanation=Explanation(
            text="What BatchNorm does for the scale of activations and gradients is done before the noise is added, "
            "and the noise stays of the order of the signal.",
            status="conjecture",
        ),
    ),
    Claim(
        id="B4",
        title="BatchNorm allows larger rates",
        sentence="Normalization makes updates steadier and so allows larger learning rates.",
        sentences=(5,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018; Bjorck et al. 2018.",
        measured=MEASURED + f"A full run also tries {BETWEEN} rates between the last that trains and the next of the "
        "grid. Compared is the largest rate that trains, known to lie between the last before the first failure and "
        "the first above all that train; what is judged is the mean ratio's whole possible range.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="With tanh and with ReLU: the largest rate that trains is larger with BatchNorm than without, by "
            "more than a third. If both may lie between the same two rates, this is not decided.",
            origin="sentence",
            criteria=lambda e: [largest(e, "batch", "none", a) for a in ACTIVATIONS],
        ),
        control=Control(
            text="BatchNorm taken away: the network without it plays both parts, and bears no more than itself.",
            plays={"batch": "none", "none": "none"},
        ),
        summary=_b4_summary,
        figures=lambda e: [loss_chart(e, {"batch": LABELS["batch"], "none": LABELS["none"]})],
        explanation=Explanation(
            text="The loss does not depend on the scale of a weight that BatchNorm follows; a step that is too long "
            "lengthens the weight, which shrinks its gradient.",
            status="conjecture",
        ),
    ),
)
