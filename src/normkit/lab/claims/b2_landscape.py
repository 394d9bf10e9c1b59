"""B2 and B3: whether BatchNorm makes the loss smoother along the gradient, and whether it reduces covariate shift.

Both arms are probed at the same learning rates, so that they look equally far in parameter space.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.b1_batch_norm import MEASURED
from normkit.lab.claims.b1_map import PROBE, REACH, STUDY, at, best_rate, boundary, rates
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

_NAMES = {"range": "range of the loss along the gradient", "turn": "largest change of the gradient along itself"}
_PROBED = (
    f"Every {PROBE} steps a run looks along its own gradient, as far as {REACH[0]:g} to {REACH[-1]:g} of its steps, "
    "without moving. "
)


def _ratios(e: Evidence, key: str, lr: float) -> list[float]:
    """Return ln (no norm / BatchNorm) at a rate, seed by seed: above 0 where BatchNorm is smoother."""
    return e.paired(at("none", lr), at("batch", lr), key)


def _smoother(e: Evidence, lr: float) -> list[Criterion]:
    return [
        Criterion(
            name=f"rate {lr:g}: ln of the {name}, without over with BatchNorm",
            values=_ratios(e, key, lr),
            kind="above",
            target=0.0,
            tolerance=math.log(1.25),
            reason="a quarter more, and its double, lie well below the factor of 2 that would speak of another "
            "landscape",
        )
        for key, name in _NAMES.items()
    ]


def _shared(e: Evidence) -> float:
    """Return the smaller of the two best rates: one at which both networks are meant to train."""
    return min(best_rate(e, role) for role in ("batch", "none"))


def _borne(e: Evidence) -> float:
    return boundary(e, "batch")[0] or rates(e.settings)[0]


def _b2_summary(e: Evidence) -> str:
    best, borne = _shared(e), _borne(e)
    here, there = (estimate(_ratios(e, "range", lr)) for lr in (best, borne))
    return f"ln of the loss's range, without over with: {here} at rate {best:g}, {there} at {borne:g}"


def _shift(e: Evidence) -> list[Criterion]:
    lr = _shared(e)
    return [
        Criterion(
            name=f"rate {lr:g}: cosine of a layer's gradient before and after the layers below move, with minus "
            "without BatchNorm",
            values=e.paired(at("batch", lr), at("none", lr), "cosine"),
            kind="at_most",
            target=0.0,
            tolerance=0.03,
            reason="a gradient that turns by 14° has the cosine 0.97 with itself; a smaller gain reduces little",
        )
    ]


def _b3_summary(e: Evidence) -> str:
    lr = _shared(e)
    batch, none = (estimate(e.numbers(at(role, lr), "cosine")) for role in ("batch", "none"))
    return f"rate {lr:g}: cosine of gradients before and after {batch} with BatchNorm, {none} without"


def _over_rates(e: Evidence, keys: dict[str, str], caption: str, alt: str) -> Chart:
    def line(role: str, label: str, key: str) -> Series:
        grid = [lr for lr in rates(e.settings) if all(map(math.isfinite, e.numbers(at(role, lr), key)))]
        shown = [e.numbers(at(role, lr), key) for lr in grid]
        columns = shown if key == "cosine" else [[math.exp(v) for v in column] for column in shown]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    return Chart(
        caption=caption + " Bands: min–max over seeds.",
        alt=alt,
        panels=[
            Panel(
                _NAMES.get(key, "covariate shift"),
                "learning rate",
                label,
                [line("batch", "BatchNorm", key), line("none", "no norm", key)],
                x_scale="log",
                y_scale="linear" if key == "cosine" else "log",
            )
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
        measured=MEASURED + _PROBED + "Measured are the range of the loss and the largest change of the gradient, the "
        "geometric mean over probes.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="At the smaller of the two networks' best rates both measures are smaller with BatchNorm, "
            "by more than a quarter.",
            origin="sentence",
            criteria=lambda e: _smoother(e, _shared(e)),
        ),
        corrected=Rule(
            text="At the largest rate that BatchNorm bears in all seeds both measures are smaller with it, by more "
            "than a quarter.",
            origin="theory",
            criteria=lambda e: _smoother(e, _borne(e)),
        ),
        correction="Smoother is not what BatchNorm makes the loss everywhere: over steps that the plain network bears "
        "its own loss is no rougher. Over the long steps that BatchNorm bears the plain network's loss is.",
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
                "Two panels of two curves over the learning rate: that without a norm rises steeply at large rates.",
            )
        ],
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
        measured=MEASURED + f"Every {PROBE} steps the gradient of each hidden weight is taken on one batch before and "
        "after the layers below have made their step; the cosine of the two is averaged over layers and probes. No "
        "shift is a cosine of 1.",
        study=STUDY,
        plays={"batch": "batch", "none": "none"},
        literal=Rule(
            text="At the smaller of the two networks' best rates the cosine with BatchNorm is not above that "
            "without by more than 0.03.",
            origin="sentence",
            criteria=_shift,
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
                "Two curves that fall as the learning rate grows.",
            )
        ],
        explanation=Explanation(
            text="With BatchNorm a layer's gradient also passes through the statistics of the layers below, which "
            "change with every step.",
            status="conjecture",
        ),
    ),
)
