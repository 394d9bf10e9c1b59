"""From numbers to verdicts: criteria with a tolerance and its reason, judged at half, given and double tolerance.

A criterion compares an interval with a region. The interval is the 95 % t interval over seeds (a point where one
seed settles an exact statement). Inside the region: passed. Disjoint from it: failed. Otherwise it is open,
which is how too few seeds or too much noise come out as *not decided* instead of as luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; beyond, the normal's 1.96 is within 2 %.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Outcome(StrEnum):
    """What a rule comes to."""

    PASSED = "passed"
    FAILED = "failed"
    OPEN = "open"


class Verdict(StrEnum):
    """What the lab says of a sentence."""

    HOLDS = "holds"
    CORRECTED = "holds with a correction"
    FAILS = "fails"
    UNDECIDED = "not decided"
    UNTESTABLE = "not testable here"


@dataclass(frozen=True)
class Interval:
    """Mean and 95 % t interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of ``values`` with its 95 % t interval; one value is a point."""
    assert values, "a criterion without values"
    n = len(values)
    mean = math.fsum(values) / n if all(map(math.isfinite, values)) else math.nan
    if n == 1 or math.isnan(mean):
        return Interval(mean, mean, mean)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = (_T95[n - 2] if n <= 31 else 1.96) * spread / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Criterion:
    """One comparison of a rule.

    Args:
        name: what is compared, with its unit.
        values: one number per seed.
        kind: ``"near"``: |value − target| ≤ tolerance. ``"at_most"``: value ≤ target + tolerance.
            ``"at_least"``: value ≥ target − tolerance. ``"above"``: value > target + tolerance (an effect must
            exceed its tolerance). ``"below"``: value < target − tolerance.
        target: the number the sentence or theory names.
        tolerance: how far off still counts.
        reason: where the tolerance comes from.
        every: judge every value instead of the interval of the mean (rounding bounds, exact statements).
        known: judge this interval instead, where a value is known only to lie in it (a boundary that may lie beyond
            the grid); ``values`` are then what is shown.
    """

    name: str
    values: Sequence[float]
    kind: Literal["near", "at_most", "at_least", "above", "below"]
    target: float
    tolerance: float
    reason: str
    every: bool = False
    known: tuple[float, float] | None = None

    def region(self, scale: float = 1.0) -> tuple[float, float]:
        """Return the closed interval in which a value passes, at ``scale`` times the tolerance."""
        t = self.tolerance * scale
        return {
            "near": (self.target - t, self.target + t),
            "at_most": (-math.inf, self.target + t),
            "at_least": (self.target - t, math.inf),
            "above": (self.target + t, math.inf),
            "below": (-math.inf, self.target - t),
        }[self.kind]

    def outcome(self, scale: float = 1.0) -> Outcome:
        """Judge at ``scale`` times the tolerance. NaN never passes."""
        low, high = self.region(scale)
        if any(map(math.isnan, self.values)):
            return Outcome.FAILED
        if self.every:
            return Outcome.PASSED if all(low <= v <= high for v in self.values) else Outcome.FAILED
        ci = interval(self.values) if self.known is None else Interval(math.nan, *self.known)
        if low <= ci.low and ci.high <= high:
            return Outcome.PASSED
        return Outcome.FAILED if ci.high < low or ci.low > high else Outcome.OPEN


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """All must pass; one failure fails; otherwise open."""
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    return Outcome.OPEN if Outcome.OPEN in outcomes or not outcomes else Outcome.PASSED


def verdict_of(literal: Outcome, corrected: Outcome | None) -> Verdict:
    """Combine the literal rule's outcome with the corrected rule's, where there is one."""
    if literal is Outcome.PASSED:
        return Verdict.HOLDS
    if literal is Outcome.OPEN:
        return Verdict.UNDECIDED
    if corrected is None or corrected is Outcome.FAILED:
        return Verdict.FAILS
    return Verdict.CORRECTED if corrected is Outcome.PASSED else Verdict.UNDECIDED


@dataclass(frozen=True)
class Judgement:
    """A verdict with all that led to it. ``verdict`` is *not decided* when half or double tolerance flips it."""

    verdict: Verdict
    given: Verdict
    at_half: Verdict
    at_double: Verdict
    literal: tuple[Criterion, ...]
    corrected: tuple[Criterion, ...]


def judge(literal: Sequence[Criterion], corrected: Sequence[Criterion] | None) -> Judgement:
    """Judge a literal and a corrected rule at half, given and double tolerance."""

    def at(scale: float) -> Verdict:
        return verdict_of(
            combine([c.outcome(scale) for c in literal]),
            None if corrected is None else combine([c.outcome(scale) for c in corrected]),
        )

    half, given, double = at(0.5), at(1.0), at(2.0)
    final = given if half == given == double else Verdict.UNDECIDED
    return Judgement(final, given, half, double, tuple(literal), tuple(corrected or ()))


def flips(claim: Verdict, control: Verdict) -> bool:
    """Say whether the control's verdict is the opposite of the claim's: what holds must fail, what fails must hold."""
    good = {Verdict.HOLDS, Verdict.CORRECTED}
    return (claim in good and control is Verdict.FAILS) or (claim is Verdict.FAILS and control in good)
