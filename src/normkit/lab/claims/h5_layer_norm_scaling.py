"""H5: LayerNorm Scaling divides what block l reads by √l; a scaled init divides what every block adds by √(2L).

Both keep Pre-Norm's stream from growing. Whoever has the one has little use for the other, and what reads 1/√l of what
it read and adds 1/√(2L) of what it added starts with next to nothing to say.
"""

from __future__ import annotations

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.h5_twelve_blocks import CONTENDERS, LAYERS, STUDY
from normkit.lab.claims.h7_compromises import ENDS, MEASURED, best_losses, compared, side
from normkit.lab.figures import Chart, Figure, Panel, band
from normkit.lab.grid.figures import curves_chart, outcome_map
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

_ROLES = ("pre", "lns", "pre-scaled", "lns-scaled")


def _gained(e: Evidence, scaled: str) -> list[float]:
    """Return held-out loss of Pre-Norm minus LayerNorm Scaling's, each at its better rate, paired."""
    pairs = zip(best_losses(e, f"pre{scaled}"), best_losses(e, f"lns{scaled}"), strict=True)
    return [a - b for a, b in pairs]


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        compared("loss under Pre-Norm minus under LayerNorm Scaling, plain init", _gained(e, ""), "above"),
        compared("the same, both with a scaled init", _gained(e, "-scaled"), "at_most"),
    ]


def _summary(e: Evidence) -> str:
    plain, scaled = (estimate(_gained(e, kind)) for kind in ("", "-scaled"))
    return f"what LayerNorm Scaling takes off Pre-Norm's loss: {plain} with a plain init, {scaled} with a scaled one"


def _figures(e: Evidence) -> list[Figure]:
    blocks = list(range(LAYERS + 1))
    panels = [
        Panel(
            title,
            "blocks passed",
            "rms of the stream",
            [band(CONTENDERS[role].label, blocks, e.values(f"{role}/{ENDS[-1]}", key)) for role in _ROLES],
            y_scale="log",
        )
        for title, key in (("fresh", "fresh stream"),)
    ]
    sides = {CONTENDERS[role].label: side(role) for role in _ROLES}
    stream = Chart(
        caption="Root mean square of the residual stream in the fresh networks. Bands: min–max over seeds.",
        alt="Pre-Norm's stream grows with depth, LayerNorm Scaling's less; with a scaled init both stay near level.",
        panels=panels,
    )
    return [outcome_map(e, sides), stream, curves_chart(e, sides)]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H5",
        title="LayerNorm Scaling and a scaled init",
        sentence="Under Pre-Norm deep sublayers count for less as the stream grows. Dividing what block l reads by √l "
        "is said to cure that, and not to help where the initial weights already do.",
        sentences=(40, 42),
        source="Article, “Pre-Norm”, of the dilution; Sun et al. 2025 (LayerNorm Scaling), arXiv 2502.05795.",
        measured=MEASURED,
        study=STUDY,
        plays={role: role for role in _ROLES},
        literal=Rule(
            text="With a plain init LayerNorm Scaling's held-out loss is below Pre-Norm's by more than 0.01 nats; with "
            "a scaled init it is not below it.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The two wirings swapped under the plain init: what was better must now be worse.",
            plays={"pre": "lns", "lns": "pre", "pre-scaled": "pre-scaled", "lns-scaled": "lns-scaled"},
        ),
        planted=Control(
            text="Post-Norm plays Pre-Norm and Pre-Norm plays LayerNorm Scaling under the plain init, and one network "
            "plays both under the scaled one: a difference that is there, and one that is not.",
            plays={"pre": "post", "lns": "pre", "pre-scaled": "pre-scaled", "lns-scaled": "pre-scaled"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text=f"The paper's gains are of networks of 130 million parameters and more after billions of bytes. In "
            f"{LAYERS} small blocks that have just begun to learn, smaller inputs may slow the deep ones as much as "
            "they keep the stream down.",
            status="conjecture",
        ),
    ),
)
