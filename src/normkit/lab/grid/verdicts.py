"""The claims of a grid: one for every contender against the first, one for every warm-up against the first.

Each side stands at its own best learning rate (and warm-up, where that is not what is compared), chosen on the
held-out loss that it is judged by, which favours all sides alike. Differences are paired over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.corpus import CONTEXT
from normkit.lab.grid.figures import curves_chart, loss_chart, outcome_map
from normkit.lab.grid.options import Grid
from normkit.lab.grid.reading import FREQUENCIES, Side, trained_range
from normkit.lab.grid.study import STUDY, grid_of
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

_UNKNOWN = (-math.inf, math.inf)  # what one seed says of the spread over seeds

_WHY_MARGIN = (
    "a tenth of what the previous byte tells about a byte in this text: a run that has gained less has learnt little "
    "beyond the bytes' frequencies"
)


@dataclass(frozen=True)
class _Pair:
    """Two sides of a comparison: what they are called, and the arms' names up to the points that are chosen among."""

    one: str
    other: str
    plays: tuple[str, str]
    ends: tuple[str, ...]

    def side(self, role: str) -> Side:
        return Side(role, self.ends)


def claims(settings: Settings) -> tuple[Claim, ...]:
    """Return what the settings' grid asks, as claims named T1, T2, …; the first is whether the reference trains."""
    grid = grid_of(settings)
    first = grid.contenders[0]
    every = tuple(point.name for point in grid.points)
    pairs = [_Pair(label(name), label(first), (name, first), every) for name in grid.contenders[1:]]
    rates = tuple(f"lr-{lr!r}" for lr in sorted(grid.lrs))
    pairs += [
        _Pair(
            f"{label(name)}, warm-up {warmup}",
            f"{label(name)}, {_without(grid.warmups[0])}",
            (f"{name}/warmup-{warmup}", f"{name}/warmup-{grid.warmups[0]}"),
            rates,
        )
        for name in grid.contenders
        for warmup in grid.warmups[1:]
    ]
    return (
        _trains("T1", grid, first, every),
        *(_better(f"T{i}", grid, pair) for i, pair in enumerate(pairs, start=2)),
    )


def label(contender: str) -> str:
    """Return a contender as people read it: ``pre/rms`` is "pre rms", a model its module and function."""
    first, _, rest = contender.partition("/")
    return rest if first == "model" else f"{first} {rest}"


def _without(warmup: int) -> str:
    return f"warm-up {warmup}" if warmup else "no warm-up"


def _trains(name: str, grid: Grid, contender: str, ends: tuple[str, ...]) -> Claim:
    side, called = Side("reference", ends), label(contender)

    def criteria(e: Evidence) -> Sequence[Criterion]:
        return [_gain(e, side, called)]

    def summary(e: Evidence) -> str:
        return f"{called}: {_told(e, side)}; unigram plateau {number(side.unigram(e), 3)} nats/byte"

    return Claim(
        id=name,
        title=f"{called} trains",
        sentence=f"{called[0].upper()}{called[1:]} leaves the unigram plateau at its best learning rate.",
        sentences=(),
        source="Asked on the command line.",
        measured=_measured(grid),
        study=STUDY,
        plays={"reference": contender},
        literal=Rule(
            text="At the point of the grid where it gains most, its held-out loss is below the entropy of the judged "
            "bytes' frequencies by the margin.",
            origin="theory",
            criteria=criteria,
        ),
        control=Control(
            text="The bytes' frequencies in its place: they know no order of bytes, and must not pass as trained.",
            plays={"reference": FREQUENCIES},
        ),
        summary=summary,
        figures=lambda e: [outcome_map(e, {called: side}), curves_chart(e, {called: side})],
        explanation=Explanation(
            text="Whether a network trains is measured here, not why; a stuck or diverged neighbour on the map shows "
            "how near the limits are.",
            status="conjecture",
        ),
    )


def _better(name: str, grid: Grid, pair: _Pair) -> Claim:
    candidate, reference, learner = (pair.side(role) for role in ("candidate", "reference", "learner"))

    def difference(e: Evidence) -> list[float]:
        gains = [e.numbers(side.best(e), "gain") for side in (reference, candidate)]
        return [theirs - ours for theirs, ours in zip(*gains, strict=True)]

    def compared(e: Evidence, better: bool) -> Criterion:
        values = difference(e)
        return Criterion(
            name=f"held-out loss of {pair.one} minus that of {pair.other}, each at its best, paired (nats/byte)",
            values=values,
            kind="below" if better else "near",
            target=0.0,
            tolerance=grid.tolerance,
            reason=f"--tolerance: {100 * math.expm1(grid.tolerance):.2g} % of a byte's perplexity, the least "
            "difference asked for",
            known=_UNKNOWN if len(values) < 2 else None,
        )

    def as_good(e: Evidence) -> Sequence[Criterion]:
        return [compared(e, better=False), _gain(e, learner, pair.one)]

    def summary(e: Evidence) -> str:
        return (
            f"{pair.one}: {_told(e, candidate)}; {pair.other}: {_told(e, reference)}; "
            f"difference {estimate(difference(e))} nats/byte"
        )

    one, other = pair.plays
    return Claim(
        id=name,
        title=f"{pair.one} against {pair.other}",
        sentence=f"{pair.one[0].upper()}{pair.one[1:]} comes to a lower held-out loss than {pair.other}, each at its "
        "own best learning rate.",
        sentences=(),
        source="Asked on the command line.",
        measured=_measured(grid),
        study=STUDY,
        plays={"candidate": one, "reference": other, "learner": one},
        literal=Rule(
            text=f"The paired difference of held-out losses is below zero by more than {grid.tolerance:g} nats/byte.",
            origin="sentence",
            criteria=lambda e: [compared(e, better=True)],
        ),
        corrected=Rule(
            text=f"The paired difference is within {grid.tolerance:g} nats/byte of zero, and {pair.one} has trained.",
            origin="sentence",
            criteria=as_good,
        ),
        correction=f"{pair.one[0].upper()}{pair.one[1:]} comes to the same held-out loss as {pair.other}, each at its "
        "own best learning rate.",
        control=Control(
            text="The two swapped, and in place of the one that must have trained the bytes' frequencies, which never "
            "did: what was better must become worse, and two equals must no longer pass.",
            plays={"candidate": other, "reference": one, "learner": FREQUENCIES},
        ),
        summary=summary,
        figures=lambda e: [
            outcome_map(e, {pair.one: candidate, pair.other: reference}),
            loss_chart(e, {pair.one: candidate, pair.other: reference}),
            curves_chart(e, {pair.one: candidate, pair.other: reference}),
        ],
        explanation=Explanation(
            text="The two differ in what their names say and in nothing else that was chosen; by which mechanism that "
            "acts is not isolated here.",
            status="conjecture",
        ),
    )


def _gain(e: Evidence, side: Side, called: str) -> Criterion:
    values = e.numbers(side.best(e), "gain")
    return Criterion(
        name=f"{called}: held-out gain over the unigram plateau at its best (nats/byte)",
        values=values,
        kind="above",
        target=0.0,
        tolerance=float(e.first(side.best(e), "margin")),
        reason=_WHY_MARGIN,
        known=_UNKNOWN if len(values) < 2 else None,
    )


def _told(e: Evidence, side: Side) -> str:
    losses = [side.unigram(e) - gain for gain in e.numbers(side.best(e), "gain")]
    return f"{estimate(losses)} at {side.told(e)}, {trained_range(e, side)}"


def _measured(grid: Grid) -> str:
    heads = f"{grid.heads_used} head{'s' if grid.heads_used > 1 else ''}"
    size = f"The lab's Transformer ({grid.depth} blocks, width {grid.width}, {heads}, SwiGLU, RoPE)"
    what = " and ".join(
        part for part in (size if grid.wirings else "", "models of one's own" if grid.models else "") if part
    )
    cast = "" if grid.precision == "float32" else f", autocast to {grid.precision}"
    return (
        f"{what}, trained on bytes{cast}, {grid.steps} steps of {grid.rows} × {CONTEXT} bytes, Adam(.9, .98), no "
        "decay, no clipping; all arms of a seed share batches and, where shapes agree, initial weights. A run has "
        "trained when its loss on text it never saw is below the entropy of that text's byte frequencies by a tenth of "
        "what one byte of context is worth; else it is stuck at the unigram plateau, or diverged if a loss was not "
        "finite. One that diverged counts as one that has gained nothing. With one seed no difference is decided."
    )
