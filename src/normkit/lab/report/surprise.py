"""Which findings open the page: chosen by a rule from verdicts and criteria, so that nobody can pick favourites."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.lab.runs.judged import Judged
from normkit.lab.verdict import Criterion, Outcome, Verdict

OPENING = 5
_ORDER = (Verdict.FAILS, Verdict.CORRECTED)


def distance(criterion: Criterion) -> float:
    """Return how far a criterion's measurement lies outside its region, as a share of the two numbers.

    With v measured and e the nearest value that passes: |v − e| / (|v| + |e|). 0 inside the region, 1 where the
    sentence names zero and something is there, the other way round, or where signs differ. v is the mean over seeds, or
    the farthest value where every value counts. What is not finite is infinitely far.

    Example:
        >>> distance(Criterion("exponent", [0.1], "near", 0.5, 0.1, "a fifth"))
        0.6
    """
    return _off(criterion)[0]


def _off(criterion: Criterion) -> tuple[float, float]:
    """Return `distance`, and the same gap in tolerances, which orders what is equally far."""
    low, high = criterion.region()

    def of(value: float) -> tuple[float, float]:
        if not math.isfinite(value):
            return math.inf, math.inf
        edge = min(max(value, low), high)
        gap = abs(value - edge)
        tolerances = gap / criterion.tolerance if criterion.tolerance else math.inf
        return (round(gap / (abs(value) + abs(edge)), 9), tolerances) if gap else (0.0, 0.0)

    values = list(criterion.values)
    return max(map(of, values)) if criterion.every else of(math.fsum(values) / len(values))


def farthest(criteria: Sequence[Criterion]) -> Criterion | None:
    """Return the failed criterion whose measurement lies farthest off; None when none failed."""
    failed = [c for c in criteria if c.outcome() is Outcome.FAILED]
    return max(failed, key=_off, default=None)


def most_surprising(judged: Sequence[Judged], count: int = OPENING) -> list[tuple[Judged, Criterion]]:
    """Return the most surprising findings, each with the criterion of the literal sentence that failed by most.

    Sentences that fail come before those that hold with a correction; within both, the largest `distance` first,
    equal ones by the number of tolerances, then in the catalogue's order. One study gives one finding. A verdict whose
    control did not flip is none.
    """
    found: list[tuple[int, float, float, int, Judged, Criterion]] = []
    for place, j in enumerate(judged):
        if j.judgement is None or j.judgement.verdict not in _ORDER or j.flipped is not True:
            continue
        worst = farthest(j.judgement.literal)
        if worst is not None:
            share, tolerances = _off(worst)
            found.append((_ORDER.index(j.judgement.verdict), -share, -tolerances, place, j, worst))
    chosen: list[tuple[Judged, Criterion]] = []
    studies: set[str] = set()
    for *_, j, worst in sorted(found, key=lambda entry: entry[:4]):
        assert j.claim.study is not None, "what has criteria has a study"
        if j.claim.study.id not in studies:
            studies.add(j.claim.study.id)
            chosen.append((j, worst))
    return chosen[:count]


def telling(criteria: Sequence[Criterion], count: int) -> list[Criterion]:
    """Return the criteria that say most in few lines: failed ones, the farthest first, then open, then passed ones."""
    order = (Outcome.FAILED, Outcome.OPEN, Outcome.PASSED)
    ranked = sorted(criteria, key=lambda c: (order.index(c.outcome()), *(-off for off in _off(c))))
    return ranked[:count]
