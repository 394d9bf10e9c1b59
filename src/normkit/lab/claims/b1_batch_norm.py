"""B1 and B4: noise after BatchNorm against no norm at all, and how large a learning rate BatchNorm allows.

Every arm is judged at its own best rate of one shared grid, or by the largest rate it bears: which arm is faster at a
given rate says as much about the rate as about the norm.
"""

from __future__ import annotations

import math
from typing import Literal

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.b1_map import CURVE, ROWS, STEPS, STUDY, WIDER, at, best_rate, boundary, rates
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.byte_mlp import BYTES, EMBEDDING, HELDOUT, LAYERS, WIDTH
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

LABELS = {"none": "no norm", "batch": "BatchNorm", "noisy": "BatchNorm + noise"}

_STABLER: tuple[tuple[str, Literal["above", "at_most"]], ...] = (("noisy", "above"), ("none", "at_most"))

MEASURED = (
    f"{LAYERS} hidden layers of {WIDTH} tanh units (Xavier) predict a byte of real text from the {BYTES} before it "
    f"(embedding {EMBEDDING}): plain SGD, {STEPS} steps of {ROWS} rows, with no norm, with normkit.BatchNorm before "
    "each tanh, or with noise after BatchNorm while training (each unit's shift and scale drawn anew at every step, "
    "each sample's around them). Arms share text and initial weights. Held-out loss "
    f"({HELDOUT} rows, running statistics, no noise) is read every {CURVE} steps. A rate is borne where in all seeds "
    "the final loss is below the entropy of the bytes' frequencies by a tenth of what one byte of context is worth. "
)


def largest(e: Evidence, role: str, other: str) -> Criterion:
    """Return the criterion that ``role`` bears a larger rate than ``other``."""
    (low, high), (other_low, other_high) = boundary(e, role), boundary(e, other)
    floor = rates(e.settings)[0]
    if e.arm(role) == e.arm(other):
        known = (0.0, 0.0)  # one arm has one limit, wherever it lies
    else:
        known = (
            math.log(low / other_high) if low > 0 and other_high < math.inf else -math.inf,
            math.log(high / other_low) if other_low > 0 and high < math.inf else math.inf,
        )
    return Criterion(
        name=f"ln of the largest rate borne, {role} ({told(low, high)}) over {other} ({told(other_low, other_high)})",
        values=[math.log(max(low, floor) / max(other_low, floor))],
        kind="above",
        target=0.0,
        tolerance=math.log(3) / 4,
        reason="a rate a third larger, or 1.7 times as large at double the tolerance, is not yet the several times "
        "that the papers speak of",
        known=known,
    )


def told(low: float, high: float) -> str:
    """Say where a limit lies."""
    if low == 0:
        return f"below {high:g}"
    if high == math.inf:
        return f"{low:g} or more"
    return f"{low:g} to {high:g}"


def steps_to(e: Evidence, role: str, goal: str) -> list[float]:
    """Return the steps ``role`` needs to the final held-out loss of ``goal``, each at its best rate, seed by seed.

    A run that does not get there is counted as twice as long.
    """
    goals = e.numbers(at(goal, best_rate(e, goal)), "heldout")
    curves = e.values(at(role, best_rate(e, role)), "curve")
    return [
        float(next((CURVE * i for i, point in enumerate(curve) if point is not None and point <= target), 2 * STEPS))
        for curve, target in zip(curves, goals, strict=True)
    ]


def _faster(e: Evidence) -> Criterion:
    return Criterion(
        name=f"steps of the noisy network to what the plain one reaches in {STEPS}, each at its best rate",
        values=steps_to(e, "noisy", "none"),
        kind="below",
        target=float(STEPS),
        tolerance=float(CURVE),
        reason=f"the curve has a point every {CURVE} steps",
    )


def _too_large(e: Evidence, role: str) -> float:
    """Return the smallest rate above all that ``role`` bears; the grid's last where it bears them all."""
    borne = boundary(e, role)[0]
    return next((lr for lr in rates(e.settings) if lr > borne), rates(e.settings)[-1])


def _b1(e: Evidence) -> list[Criterion]:
    lr = _too_large(e, "none")
    stabler = [
        Criterion(
            name=f"{role}, rate {lr:g}: held-out gain over the unigram plateau (nats/byte)",
            values=e.numbers(at(role, lr), "gain"),
            kind=kind,
            target=0.0,
            tolerance=float(e.first(at(role, lr), "margin")),
            reason="a tenth of what the previous byte tells about a byte in this text",
        )
        for role, kind in _STABLER
    ]
    return [_faster(e), *stabler]


def _b1_summary(e: Evidence) -> str:
    noisy, none = (told(*boundary(e, role)) for role in ("noisy", "none"))
    return (
        f"{estimate(steps_to(e, 'noisy', 'none'))} steps to what the plain network reaches in {STEPS}; largest rate "
        f"borne {noisy}, plain {none}"
    )


def _b4_summary(e: Evidence) -> str:
    batch, none = (told(*boundary(e, role)) for role in ("batch", "none"))
    return f"largest rate borne by all seeds: {batch} with BatchNorm, {none} without"


def loss_chart(e: Evidence, roles: dict[str, str]) -> Chart:
    """Draw final held-out loss over the learning rate; what does not train is drawn on the plateau."""
    grid = rates(e.settings)
    unigram = float(e.first(at(next(iter(roles)), grid[0]), "unigram"))

    def line(role: str, label: str) -> Series:
        columns = [[unigram - max(gain, 0.0) for gain in e.numbers(at(role, lr), "gain")] for lr in grid]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    plateau = Series("unigram plateau", grid, [unigram] * len(grid), kind="reference")
    lines = [line(role, label) for role, label in roles.items()]
    return Chart(
        caption=f"Held-out loss after {STEPS} steps over the learning rate. Runs that end above the plateau, or "
        "diverge, are drawn on it. Bands: min–max over seeds.",
        alt=". ".join(
            f"{label}: best at {best_rate(e, role):g}, largest rate borne {told(*boundary(e, role))}"
            for role, label in roles.items()
        ),
        panels=[Panel("what a rate leads to", "learning rate", "loss (nats/byte)", [*lines, plateau], x_scale="log")],
    )


def _curves(e: Evidence) -> Chart:
    def line(role: str) -> Series:
        lr = best_rate(e, role)
        rows: list[list[float]] = e.values(at(role, lr), "curve")
        points = range(1, min(map(len, rows)))  # the first is the loss before training
        return band(f"{LABELS[role]}, rate {lr:g}", [CURVE * i for i in points], [[r[i] for i in points] for r in rows])

    drifts = [
        Series(LABELS[role], [i], [max(1e-9, math.fsum(values) / len(values))], kind="bars")
        for i, role in enumerate(LABELS)
        if all(map(math.isfinite, values := e.numbers(at(role, best_rate(e, role)), "drift")))
    ]
    return Chart(
        caption="Left: held-out loss, each arm at its best rate; bands: min–max over seeds. Right: change of a unit's "
        "batch mean and deviation from one step to the next, root mean square. That noise raises it is by "
        "construction; it is shown, not scored.",
        alt="Three falling curves; beside them three bars, the tallest that of the noisy network.",
        panels=[
            Panel("learning", "step", "held-out loss (nats/byte)", [line(role) for role in LABELS]),
            Panel("drift (shown)", "arm", "change a step", drifts, x_names=list(LABELS.values())),
        ],
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="B1",
        title="Noise after BatchNorm",
        sentence="Even when noise is injected after normalization, so that distributions shift all the more, a network "
        "with normalization still trains faster and more stably than one without.",
        sentences=(4,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018, section 2.",
        measured=MEASURED + "Compared are the noisy network and the plain one: steps to the plain one's final loss, "
        "each at its own best rate, and what either comes to at the first rate too large for the plain one. A first "
        "run asked instead for the ratio of the largest rates borne, which a grid of three rates left open.",
        study=STUDY,
        plays={"noisy": "noisy", "none": "none", "batch": "batch"},
        literal=Rule(
            text=f"Each at its best rate, the noisy network reaches the plain one's final held-out loss more than "
            f"{CURVE} steps before step {STEPS}; and at the smallest rate above all that the plain network bears, the "
            "noisy one trains while the plain one stays at the unigram plateau or above.",
            origin="sentence",
            criteria=_b1,
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
        measured=MEASURED + "Compared is the largest rate that all seeds bear, known to lie between the largest at "
        "which all train and the next at which none does; what is judged is the ratio's whole possible range. Rates "
        f"are {len(WIDER)} from {WIDER[0]:g} to {WIDER[-1]:g}.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="The largest rate that all seeds bear is larger with BatchNorm than without. If both may "
            "lie between the same two rates, this is not decided.",
            origin="sentence",
            criteria=lambda e: [largest(e, "batch", "none")],
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
