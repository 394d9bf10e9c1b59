"""B2 and B3: whether BatchNorm makes the loss smoother along the gradient, and whether it reduces covariate shift.

Both arms are probed at the same learning rates, so that they look equally far in parameter space, and judged at those
that have broken neither: what a network that diverged meets along its gradient says nothing about its norm.
"""

from __future__ import annotations

import math
from typing import Any

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.b1_batch_norm import MEASURED
from normkit.lab.claims.b1_map import ACTIVATIONS, ALONG, SHIFT, STUDY, at, by_rate, rates, shared
from normkit.lab.claims.b1_probes import REACH
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

_NAMES = {"range": "range of the loss along the gradient", "turn": "largest change of the gradient along itself"}
_SHARED = (
    "Judged is the mean over the rates at which at least one of the two networks trains with all seeds, and which are "
    "above no network's largest such rate. "
)


def _shared(e: Evidence, activation: str) -> tuple[float, ...]:
    return shared(e, at("batch", activation), at("none", activation))


def _means(e: Evidence, role: str, activation: str, key: str) -> list[float]:
    """Return the mean of ``key`` over the rates shared, seed by seed; NaN without any."""
    columns = [by_rate(e, at(role, activation), key, lr) for lr in _shared(e, activation)]
    return [math.fsum(row) / len(row) for row in zip(*columns, strict=True)] or [math.nan]


def _differences(e: Evidence, a: str, b: str, activation: str, key: str) -> list[float]:
    """Return the differences a − b of the means of ``key``, seed by seed."""
    ours, others = (_means(e, role, activation, key) for role in (a, b))
    return [p - q for p, q in zip(ours, others, strict=True)]


def _judged(name: str, e: Evidence, activation: str, **how: Any) -> Criterion:
    """Return a criterion that is open where the two networks share no rate."""
    if not _shared(e, activation):
        how |= {"values": [0.0], "known": (-math.inf, math.inf)}
    at_rates = ", ".join(f"{lr:g}" for lr in _shared(e, activation)) or "none"
    return Criterion(name=f"{ACTIVATIONS[activation]}, rates {at_rates}: {name}", **how)


def _smoother(e: Evidence, activation: str) -> list[Criterion]:
    return [
        _judged(
            f"ln of the {name}, without over with BatchNorm",
            e,
            activation,
            values=_differences(e, "none", "batch", activation, key),
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
        return " and ".join(estimate(_differences(e, "none", "batch", activation, key)) for key in _NAMES)

    return "ln of the loss's range and the gradient's change, without over with: " + "; ".join(
        f"{activation} {line(activation)}" for activation in ACTIVATIONS
    )


def _shift(e: Evidence, activation: str) -> Criterion:
    return _judged(
        "cosine of a layer's gradient before and after the layers below move, with minus without BatchNorm",
        e,
        activation,
        values=_differences(e, "batch", "none", activation, "cosine"),
        kind="at_most",
        target=0.0,
        tolerance=0.03,
        reason="a gradient that turns by 14° has the cosine 0.97 with itself; a smaller gain reduces little",
    )


def _b3_summary(e: Evidence) -> str:
    def line(activation: str) -> str:
        batch, none = (estimate(_means(e, role, activation, "cosine")) for role in ("batch", "none"))
        return f"{activation} {batch} against {none}"

    return "cosine of gradients before and after, BatchNorm against none: " + "; ".join(map(line, ACTIVATIONS))


def _over_rates(e: Evidence, keys: dict[str, str], caption: str, alt: str) -> Chart:
    def line(role: str, label: str, activation: str, key: str) -> Series:
        path = at(role, activation)
        grid = [lr for lr in rates(e.settings) if all(map(math.isfinite, by_rate(e, path, key, lr)))]
        shown = [by_rate(e, path, key, lr) for lr in grid]
        columns = shown if key == "cosine" else [[math.exp(v) for v in column] for column in shown]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    judged = "; ".join(
        f"{label}: {', '.join(f'{lr:g}' for lr in _shared(e, activation)) or 'none'}"
        for activation, label in ACTIVATIONS.items()
    )
    return Chart(
        caption=f"{caption} Bands: min–max over seeds. Judged are the rates that break neither ({judged}).",
        alt=alt,
        panels=[
            Panel(
                f"{_NAMES.get(key, 'covariate shift')} ({shown})",
                "learning rate",
                label,
                [line("batch", "BatchNorm", activation, key), line("none", "no norm", activation, key)],
                x_scale="log",
                y_scale="linear" if key == "cosine" else "log",
            )
            for activation, shown in ACTIVATIONS.items()
            for key, label in keys.items()
        ],
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="B2",
        title="A smoother loss",
        sentence="Normalization makes the loss surface smoother and the direction of updates steadier.",
        sentences=(5,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018, section 3.",
        measured=MEASURED + f"Every {ALONG} steps a run looks along its own gradient, as far as {REACH[0]:g} to "
        f"{REACH[-1]:g} of its steps, without moving. Measured are the range of the loss and the largest change of the "
        "gradient, the geometric mean over probes. " + _SHARED,
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="With tanh and with ReLU: both measures are larger without BatchNorm, by more than a quarter.",
            origin="sentence",
            criteria=lambda e: [c for activation in ACTIVATIONS for c in _smoother(e, activation)],
        ),
        corrected=Rule(
            text="With ReLU both measures are larger without BatchNorm, by more than a quarter. ReLU passes on all "
            "that a step adds to a layer, so that without a norm the layers' changes multiply; tanh is bounded.",
            origin="theory",
            criteria=lambda e: _smoother(e, "relu"),
        ),
        correction="BatchNorm makes the loss smoother where the units pass on all that a step adds, as ReLU does. With "
        "tanh, which is bounded, it does not, in the mean over the rates that the plain network bears.",
        control=Control(
            text="BatchNorm taken away: the network without it plays both parts, and is no smoother than itself.",
            plays={"batch": "none", "none": "none"},
        ),
        summary=_b2_summary,
        figures=lambda e: [
            _over_rates(
                e,
                {"range": "loss (nats)", "turn": "‖change of gradient‖"},
                "What a run meets along its own gradient, over its learning rate.",
                "Four panels of two curves over the learning rate: with tanh they cross, with ReLU they lie apart.",
            )
        ],
        explanation=Explanation(
            text="Without a norm a step changes the scale of every layer, and with ReLU the changes multiply; with "
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
        measured=MEASURED + f"Every {SHIFT} steps the gradient of each hidden weight is taken on one batch before and "
        "after the layers below have made their step; the cosine of the two is averaged over layers and probes. No "
        "shift is a cosine of 1. " + _SHARED,
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="With tanh and with ReLU: the cosine with BatchNorm is not above that without by more than 0.03.",
            origin="sentence",
            criteria=lambda e: [_shift(e, activation) for activation in ACTIVATIONS],
        ),
        control=Control(
            text="The roles swapped: of the two networks only one can have the smaller shift.",
            plays={"batch": "none", "none": "batch"},
        ),
        summary=_b3_summary,
        figures=lambda e: [
            _over_rates(
                e,
                {"cosine": "cosine before/after"},
                "How much of a layer's gradient survives the step of the layers below it (1: all of it).",
                "Two panels of two curves over the learning rate, that without a norm the upper one at small rates.",
            )
        ],
        explanation=Explanation(
            text="With BatchNorm a layer's gradient also passes through the statistics of the layers below, which "
            "change with every step.",
            status="conjecture",
        ),
    ),
)
