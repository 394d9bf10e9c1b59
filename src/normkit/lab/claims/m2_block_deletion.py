"""M2 and A4b: what blocks are worth after training, by what their absence costs and by how far they move the stream.

A4 finds in fresh Pre-Norm networks that later blocks add less beside what they add to. Training may change that: it is
asked again of networks that have trained, and of every block what held-out loss would be without it.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.h5_twelve_blocks import CONTENDERS, JUDGED_BY, LAYERS, SHORTENED, STUDY
from normkit.lab.claims.h6_mix_ln import inside_chart
from normkit.lab.claims.h7_compromises import MEASURED, side
from normkit.lab.figures import Chart, Figure, Panel, band
from normkit.lab.fit import log_log_slope
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

THIRD = LAYERS // 3


def _costs(e: Evidence, role: str) -> list[list[float]]:
    """Return what leaving out each block costs at the better rate, a list a seed."""
    return e.values(side(role).best(e), "deletion")


def early(row: list[float]) -> float:
    """Return the mean cost of the first third of the blocks, the very first apart: it alone reads bare bytes."""
    return sum(row[1:THIRD]) / (THIRD - 1)


def late(row: list[float]) -> float:
    """Return the mean cost of the last third of the blocks."""
    return sum(row[-THIRD:]) / THIRD


def _deletion_criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="cost of a block of the last third minus that of one of the first, the very first apart (nats/byte)",
            values=[late(row) - early(row) for row in _costs(e, "deep")],
            kind="below",
            target=0.0,
            tolerance=0.02 / math.sqrt(THIRD - 1),
            reason=f"what {JUDGED_BY} windows can tell of one block, .16/√{JUDGED_BY} = {0.16 / JUDGED_BY**0.5:g}, "
            f"over the root of the {THIRD - 1} blocks averaged",
        )
    ]


def _deletion_summary(e: Evidence) -> str:
    rows = _costs(e, "deep")
    return (
        f"leaving out a block costs {estimate([early(row) for row in rows])} nats/byte early, "
        f"{estimate([late(row) for row in rows])} late; the very first {estimate([row[0] for row in rows])}"
    )


def _deletion_figures(e: Evidence) -> list[Figure]:
    blocks = list(range(2, LAYERS + 1))  # the first costs tens of times as much and is told in the summary
    lines = [
        band(CONTENDERS[e.arm(role)].label, blocks, [row[1:] for row in _costs(e, role)])
        for role in ("deep", *SHORTENED[1:])
    ]
    return [
        Chart(
            caption=f"By how much held-out loss rises when one of {LAYERS} blocks is left out of the trained network "
            f"({JUDGED_BY} windows); the first, which costs far more, is not drawn. Bands: min–max over seeds.",
            alt="; ".join(f"{line.label}: from {line.y[0]:.2g} at the second to {line.y[-1]:.2g}" for line in lines),
            panels=[Panel("what a block is worth", "block left out", "rise of held-out loss (nats/byte)", lines)],
        )
    ]


def _slopes(e: Evidence, when: str) -> list[float]:
    return [log_log_slope(range(1, LAYERS + 1), row) for row in e.values(side("deep").best(e), f"{when} moved")]


def _growths(e: Evidence, when: str) -> list[float]:
    """Return ln of the stream's mean square after the last block over that after the first."""
    return [2 * math.log(row[-1] / row[1]) for row in e.values(side("deep").best(e), f"{when} stream")]


def _dilution_criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="ln of the trained stream's mean square after the last block over that after the first",
            values=_growths(e, "trained"),
            kind="above",
            target=math.log(2),
            tolerance=math.log(2) / 2,
            reason="“grows” as doubled: half of what tells that from a stream that stays as it is",
        ),
        Criterion(
            name="slope over ln l of ln(what block l adds / stream it is added to), after training",
            values=_slopes(e, "trained"),
            kind="below",
            target=0.0,
            tolerance=0.15,
            reason=f"told from level: a factor of {LAYERS**0.15:.2f} over {LAYERS} blocks; theory's −1/2, in fresh "
            "networks, is a factor of 3.5",
        ),
    ]


def _dilution_summary(e: Evidence) -> str:
    power = ", ".join(f"{estimate(_slopes(e, when))} {when}" for when in ("fresh", "trained"))
    growth = ", ".join(f"{estimate([math.exp(v) for v in _growths(e, when)])} {when}" for when in ("fresh", "trained"))
    return f"block l adds ∝ l^p of the stream, p {power}; the stream's mean square grows × {growth} behind the first"


def _dilution_figures(e: Evidence) -> list[Figure]:
    roles = ("deep", "lns", "deepnorm")
    return [
        inside_chart(e, roles, "moved", "what a block adds / stream (rms)"),
        inside_chart(e, roles, "stream", "rms of the stream", start=0),
    ]


_PLAYS = {"deep": "pre", **{name: name for name in SHORTENED[1:]}}
_CONTROL = {**_PLAYS, "deep": "deepnorm"}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="M2",
        title="What late blocks are worth",
        sentence="Under Pre-Norm deep sublayers' outputs get smaller and smaller beside the stream: what deep modules "
        "contribute is diluted, so that a late block can be left out at less cost than an early one.",
        sentences=(40,),
        source="Article, “Pre-Norm”; Sun et al. 2025 (The Curse of Depth), arXiv 2502.05795.",
        measured=MEASURED + f"Every block in turn is left out of the trained network; by how much its loss on "
        f"{JUDGED_BY} held-out windows rises. The first block is not counted: it alone reads bare bytes.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text=f"Under Pre-Norm a block of the last third costs less than one of the first (blocks 2 to {THIRD}), by "
            "more than the held-out windows leave uncertain.",
            origin="theory",
            criteria=_deletion_criteria,
        ),
        control=Control(
            text="DeepNorm, whose stream is normed after every block and does not grow: its late blocks must not be "
            "the cheaper ones.",
            plays=_CONTROL,
        ),
        summary=_deletion_summary,
        figures=_deletion_figures,
        explanation=Explanation(
            text="What a block adds is smaller beside the larger stream that later blocks add to (A4b).",
            status="conjecture",
        ),
    ),
    Claim(
        id="A4b",
        title="Growth and dilution after training",
        sentence="Under Pre-Norm the stream's scale keeps growing with depth, and deep sublayers' outputs get smaller "
        "and smaller beside it.",
        sentences=(40,),
        source="Article, “Pre-Norm”. A3 and A4 ask it of fresh networks.",
        measured=MEASURED + "How far each block moves the stream, √mean((x′ − x)²)/√mean(x²), and the stream's mean "
        "square, on the same windows before the first step and after the last; judged after training.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text="After training the stream's mean square more than doubles between the first block and the last, and "
            "what block l adds beside it falls with l: log-log slope below −0.15.",
            origin="sentence",
            criteria=_dilution_criteria,
        ),
        control=Control(
            text="DeepNorm, whose stream is normed after every block: it must not grow.",
            plays=_CONTROL,
        ),
        summary=_dilution_summary,
        figures=_dilution_figures,
        explanation=Explanation(
            text="Nothing on the way divides the stream, and what is added points in directions of its own.",
            status="conjecture",
        ),
    ),
)
