"""B2 and B3: whether BatchNorm makes the loss smoother along the gradient, and whether it reduces covariate shift.

Both arms are probed at the same learning rates, so that they look equally far in parameter space.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.b1_batch_norm import MEASURED
from normkit.lab.claims.b1_map import ACTIVATIONS, STUDY, at, best_rate, borne, by_rate, rates
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

_NAMES = {"range": "range of the loss along the gradient", "turn": "largest change of the gradient along itself"}
_PROBED = "Every 20 steps (40 in a quick run) a run without noise is probed, without moving. "


def _differences(
    e: Evidence, a: str, b: str, activation: str, key: str, lr: float, step: float | None = None
) -> list[float]:
    """Return the differences a − b of ``key``, seed by seed; see `by_rate`."""
    ours, others = (by_rate(e, at(role, activation), key, lr, step) for role in (a, b))
    return [p - q for p, q in zip(ours, others, strict=True)]


def _shared(e: Evidence, activation: str) -> float:
    """Return the smaller of the two best rates: one at which both networks are meant to train."""
    return min(best_rate(e, at(role, activation)) for role in ("batch", "none"))


def _near(e: Evidence, activation: str) -> float:
    """Return four of the networks' own steps, as far as the grid goes."""
    return max(step for step in rates(e.settings) if step <= 4 * _shared(e, activation))


def _far(e: Evidence, activation: str) -> float:
    """Return four steps at the largest rate at which BatchNorm trains with all seeds, as far as the grid goes."""
    return max(step for step in rates(e.settings) if step <= 4 * borne(e, at("batch", activation)))


def _smoother(e: Evidence, activation: str, step: float) -> list[Criterion]:
    """Return the criteria that both measures are smaller with BatchNorm; ln of the ratio, without over with."""
    lr = _shared(e, activation)
    return [
        Criterion(
            name=f"{ACTIVATIONS[activation]}, rate {lr:g}, steps to {step:g}: ln of the {name}, without over with "
            "BatchNorm",
            values=_differences(e, "none", "batch", activation, key, lr, step),
            kind="above",
            target=0.0,
            tolerance=math.log(1.25),
            reason="a quarter more, and its double, lie well below the factor of 2 that would speak of another "
            "landscape",
        )
        for key, name in _NAMES.items()
    ]


def _b2_summary(e: Evidence) -> str:
    def line(activation: str) -> str:
        lr, steps = _shared(e, activation), (_near(e, activation), _far(e, activation))
        found = (f"{estimate(_differences(e, 'none', 'batch', activation, 'turn', lr, s))} to {s:g}" for s in steps)
        return f"{activation} " + ", ".join(found)

    return "gradient's change, ln plain/BatchNorm, steps " + "; ".join(map(line, ACTIVATIONS))


def _shift(e: Evidence, activation: str) -> Criterion:
    lr = _shared(e, activation)
    return Criterion(
        name=f"{ACTIVATIONS[activation]}, rate {lr:g}: cosine of a layer's gradient before and after the layers below "
        "move, with minus without BatchNorm",
        values=_differences(e, "batch", "none", activation, "cosine", lr),
        kind="at_most",
        target=0.0,
        tolerance=0.03,
        reason="a gradient that turns by 14° has the cosine 0.97 with itself; a smaller gain reduces little",
    )


def _b3_summary(e: Evidence) -> str:
    def line(activation: str) -> str:
        lr = _shared(e, activation)
        batch, none = (estimate(by_rate(e, at(role, activation), "cosine", lr)) for role in ("batch", "none"))
        return f"{activation} {batch} against {none} at rate {lr:g}"

    return "cosine before/after, BatchNorm against none: " + "; ".join(map(line, ACTIVATIONS))


def _along(e: Evidence) -> Chart:
    def line(role: str, label: str, activation: str, key: str) -> Series:
        lr, grid = _shared(e, activation), rates(e.settings)
        columns = [[math.exp(v) for v in by_rate(e, at(role, activation), key, lr, step)] for step in grid]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    return Chart(
        caption="What lies along a run's gradient, up to each step, at a rate at which both networks train ("
        + ", ".join(f"{label}: {_shared(e, a):g}" for a, label in ACTIVATIONS.items())
        + "). Bands: min–max over seeds.",
        alt="Four panels of two curves that rise with the step.",
        panels=[
            Panel(
                f"{name} ({shown})",
                "step along the gradient",
                {"range": "loss (nats)", "turn": "‖change of gradient‖"}[key],
                [line("batch", "BatchNorm", activation, key), line("none", "no norm", activation, key)],
                x_scale="log",
                y_scale="log",
            )
            for activation, shown in ACTIVATIONS.items()
            for key, name in _NAMES.items()
        ],
    )


def _shift_chart(e: Evidence) -> Chart:
    def line(role: str, label: str, activation: str) -> Series:
        path = at(role, activation)
        grid = [lr for lr in rates(e.settings) if all(map(math.isfinite, by_rate(e, path, "cosine", lr)))]
        columns = [by_rate(e, path, "cosine", lr) for lr in grid]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    return Chart(
        caption="How much of a layer's gradient survives the step of the layers below it (1: all of it). Judged at "
        + ", ".join(f"{_shared(e, a):g} ({label})" for a, label in ACTIVATIONS.items())
        + ". Bands: min–max over seeds.",
        alt="Two panels of two curves that fall as the learning rate grows.",
        panels=[
            Panel(
                f"covariate shift ({shown})",
                "learning rate",
                "cosine before/after",
                [line("batch", "BatchNorm", activation), line("none", "no norm", activation)],
                x_scale="log",
            )
            for activation, shown in ACTIVATIONS.items()
        ],
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="B2",
        title="A smoother loss",
        sentence="Normalization makes the loss surface smoother and the direction of updates steadier.",
        sentences=(5,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018, section 3.",
        measured=MEASURED + _PROBED + "A probe goes steps of the grid's rates along the gradient. Measured are the "
        "range of the loss and the largest change of the gradient up to a step, the geometric mean over probes, at the "
        "smaller of the two networks' best rates, so that neither has been broken by its rate.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="With tanh and with ReLU: along up to four of the networks' own steps both measures are smaller "
            "with BatchNorm, by more than a quarter.",
            origin="sentence",
            criteria=lambda e: [c for a in ACTIVATIONS for c in _smoother(e, a, _near(e, a))],
        ),
        corrected=Rule(
            text="With tanh and with ReLU: from the same points, along up to four steps at the largest rate at which "
            "BatchNorm trains with all seeds, both measures are smaller with it, by more than a quarter.",
            origin="theory",
            criteria=lambda e: [c for a in ACTIVATIONS for c in _smoother(e, a, _far(e, a))],
        ),
        correction="Smoother is not what BatchNorm makes the loss everywhere: over steps that the plain network bears "
        "its own loss is no rougher. Over the long steps that BatchNorm bears the plain network's loss is.",
        control=Control(
            text="BatchNorm taken away: the network without it plays both parts, and is no smoother than itself.",
            plays={"batch": "none", "none": "none"},
        ),
        summary=_b2_summary,
        figures=lambda e: [_along(e)],
        explanation=Explanation(
            text="Without a norm a long step saturates the units it does not kill, and the loss explodes; with "
            "BatchNorm what a step does to the scale is taken back.",
            status="conjecture",
        ),
    ),
    Claim(
        id="B3",
        title="Covariate shift is not reduced",
        sentence="The early explanation, that BatchNorm works because it reduces internal covariate shift, the change "
        "of a layer's task as the layers before it are updated, does not hold: the shift is not reduced.",
        sentences=(4,),
        source="Article, “Why deep networks are hard to train”; Ioffe and Szegedy 2015; Santurkar et al. 2018, "
        "section 2.2.",
        measured=MEASURED + _PROBED + "A probe takes the gradient of each hidden weight on one batch before and "
        "after the layers below have made their step; the cosine of the two is averaged over layers and probes. No "
        "shift is a cosine of 1.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="With tanh and with ReLU: at the smaller of the two networks' best rates the cosine with BatchNorm is "
            "not above that without by more than 0.03.",
            origin="sentence",
            criteria=lambda e: [_shift(e, a) for a in ACTIVATIONS],
        ),
        control=Control(
            text="The roles swapped: of the two networks only one can have the smaller shift.",
            plays={"batch": "none", "none": "batch"},
        ),
        summary=_b3_summary,
        figures=lambda e: [_shift_chart(e)],
        explanation=Explanation(
            text="With BatchNorm a layer's gradient also passes through the statistics of the layers below, which "
            "change with every step.",
            status="conjecture",
        ),
    ),
)
