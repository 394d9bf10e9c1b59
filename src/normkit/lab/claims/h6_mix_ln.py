"""H6: whether Post-Norm in the first quarter of the blocks evens out the gradients that Pre-Norm tilts.

Under Pre-Norm gradients fall towards the output as the stream grows (F2). Post-Norm's first blocks leave the stream at
1, so that it grows over fewer blocks. Looked at in fresh networks and again after training.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.h5_twelve_blocks import CONTENDERS, LAYERS, STUDY
from normkit.lab.claims.h7_compromises import MEASURED, side
from normkit.lab.figures import Chart, Figure, Panel, band
from normkit.lab.grid.figures import outcome_map
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

TIMES = ("fresh", "trained")
DRAWN = ("mix", "pre", "post", "deepnorm")


def unevenness(e: Evidence, role: str, when: str) -> list[float]:
    """Return ln of the largest over the smallest gradient of the blocks, one a seed; NaN after a divergence."""
    rows = _rows(e, role, f"{when} gradients")
    return [math.log(max(row) / min(row)) if row else math.nan for row in rows]


def _rows(e: Evidence, role: str, key: str) -> list[list[float]]:
    """Return a list a block of every seed at the better rate, empty where the run diverged."""
    path = side(role).best(e)
    outcomes = e.values(path, "outcome")
    if key.startswith("trained") and "diverged" in outcomes:
        return [[] for _ in outcomes]
    return e.values(path, key)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"ln of largest over smallest gradient, Mix-LN's minus Pre-Norm's, {when}",
            values=[a - b for a, b in zip(unevenness(e, "mix", when), unevenness(e, "pre", when), strict=True)],
            kind="below",
            target=0.0,
            tolerance=0.1,
            reason="a tenth of a factor; in theory a stream that grows as √l over 9 blocks in place of 12 evens out "
            f"ln √(12/9) = {math.log(12 / 9) / 2:.2f}",
        )
        for when in TIMES
    ]


def _summary(e: Evidence) -> str:
    parts = [
        f"{when}: Mix-LN {estimate([math.exp(v) for v in unevenness(e, 'mix', when)])}, "
        f"Pre {estimate([math.exp(v) for v in unevenness(e, 'pre', when)])}"
        for when in TIMES
    ]
    return f"largest over smallest gradient, {'; '.join(parts)}"


def inside_chart(e: Evidence, roles: tuple[str, ...], what: str, unit: str, start: int = 1) -> Chart:
    """Draw a number of every block over the block, fresh networks beside trained ones, a line for each role."""
    panels = [
        Panel(
            when,
            "block" if start else "blocks passed",
            unit,
            [
                band(_label(e, role), range(start, start + len(rows[0])), rows)
                for role in roles
                if (rows := _rows(e, role, f"{when} {what}"))[0]
            ],
            y_scale="log",
        )
        for when in TIMES
    ]
    ends = [
        f"{_label(e, role)} {when}: from {rows[0][0]:.3g} to {rows[0][-1]:.3g}"
        for when in TIMES
        for role in roles
        if (rows := _rows(e, role, f"{when} {what}"))[0]
    ]
    return Chart(
        caption=f"Block by block: {unit}, before training and after it, at the better rate of each. Bands: min–max "
        "over seeds.",
        alt="; ".join(ends) + " (first seed).",
        panels=panels,
    )


def _label(e: Evidence, role: str) -> str:
    return CONTENDERS[e.arm(role)].label


def _figures(e: Evidence) -> list[Figure]:
    return [
        inside_chart(e, DRAWN, "gradients", "norm of the gradient"),
        inside_chart(e, DRAWN, "stream", "rms of the stream", start=0),
        inside_chart(e, DRAWN, "logits", "largest attention logit"),
        outcome_map(e, {_label(e, role): side(role) for role in DRAWN}),
    ]


_PLAYS = {"mix": "mix-ln", "pre": "pre", "post": "post", "deepnorm": "deepnorm"}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H6",
        title="Mix-LN and even gradients",
        sentence="Post-Norm and Pre-Norm both have their price: Post-Norm in the first quarter of the blocks and "
        "Pre-Norm in the others is said to make gradients more even over the layers than Pre-Norm does.",
        sentences=(42, 43),
        source="Article, “Compromises”; Li et al. 2024 (Mix-LN), arXiv 2412.13795.",
        measured=MEASURED
        + f"Norm of the loss's gradient on each of the {LAYERS} blocks' down-projection, largest over smallest, on "
        "the same windows of training text before the first step and after the last.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text="The largest gradient over the smallest is smaller under Mix-LN than under Pre-Norm by a tenth, in "
            "the fresh network and in the trained one.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Mix-LN and Pre-Norm swapped.",
            plays={**_PLAYS, "mix": "pre", "pre": "mix-ln"},
        ),
        planted=Control(
            text="DeepNorm, whose gradients are level in a fresh network (F2), in Mix-LN's place.",
            plays={**_PLAYS, "mix": "deepnorm"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Post-Norm's first blocks stay at one scale; the quotient of gradients is that of the stream's sizes "
            "where nothing else differs.",
            status="conjecture",
        ),
    ),
)
