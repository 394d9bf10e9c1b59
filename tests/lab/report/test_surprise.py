"""Which findings open the page: the rule, on made-up judgements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import report_fakes as fakes

from normkit.lab.report.surprise import distance, farthest, most_surprising, telling
from normkit.lab.runs.judged import Judged
from normkit.lab.verdict import Criterion, Judgement, Verdict


def criterion(kind: str, target: float, values: list[float], tolerance: float = 0.1, **more: object) -> Criterion:
    return Criterion("it", values, kind, target, tolerance, "because", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "far"),
    [
        (criterion("near", 0.5, [0.45, 0.55]), 0.0),
        (criterion("near", 0.5, [0.2, 0.0]), 0.3 / 0.5),  # the mean, 0.1, against the nearer edge, 0.4
        (criterion("near", 0.5, [0.2, 0.0], every=True), 1.0),  # the farthest value
        (criterion("at_most", 0.0, [3.0], 0.0), 1.0),
        (criterion("above", 0.0, [-2.0]), 1.0),  # the other sign
        (criterion("at_least", 1.0, [0.3]), 0.6 / 1.2),
        (criterion("near", 0.0, [math.nan, 1.0], every=True), math.inf),
    ],
)
def test_distance_is_a_share_of_the_two_numbers(of: Criterion, far: float) -> None:
    assert distance(of) == pytest.approx(far)


def judged(name: str, verdict: Verdict, measured: float, study: str = "", flipped: bool = True) -> Judged:
    claim = fakes.claim(
        name,
        name,
        target=0.0,
        tolerance=0.1,
        summary="",
        figures=lambda e: [],
        sentence="",
        study=fakes.study(study or name),
    )
    literal = (criterion("near", 1.0, [measured]), criterion("near", 1.0, [1.0]))
    judgement = Judgement(verdict, verdict, verdict, verdict, literal, ())
    return Judged(claim, judgement, None, flipped, None, None)


def test_failures_come_first_then_the_farthest_one_a_study_and_none_whose_control_did_not_flip() -> None:
    given = [
        judged("near", Verdict.CORRECTED, 0.8),
        judged("far", Verdict.CORRECTED, 0.1),
        judged("sister", Verdict.CORRECTED, 0.05, study="far"),
        judged("fails", Verdict.FAILS, 0.7),
        judged("held", Verdict.HOLDS, 0.0),
        judged("open", Verdict.UNDECIDED, 0.0),
        judged("unproven", Verdict.FAILS, 0.0, flipped=False),
    ]
    assert [j.claim.id for j, _ in most_surprising(given)] == ["fails", "sister", "near"]
    assert [j.claim.id for j, _ in most_surprising(given, 2)] == ["fails", "sister"]
    assert [j.claim.id for j, _ in most_surprising(given[::-1])] == ["fails", "sister", "near"]
    assert all(worst.values != [1.0] for _, worst in most_surprising(given))
    assert most_surprising([]) == []


def test_equally_far_is_ordered_by_tolerances_then_by_the_catalogue() -> None:
    exact = judged("exact", Verdict.FAILS, -1.0)
    assert exact.judgement is not None
    tight = replace(exact.judgement, literal=(criterion("near", 1.0, [-1.0], 1e-9),))
    given = [judged("a", Verdict.FAILS, -1.0), judged("b", Verdict.FAILS, -1.0), replace(exact, judgement=tight)]
    assert [j.claim.id for j, _ in most_surprising(given)] == ["exact", "a", "b"]


def test_the_number_shown_is_the_failed_criterion_that_is_farthest_off() -> None:
    far, near, passed = (criterion("near", 1.0, [v]) for v in (0.1, 0.8, 1.0))
    undecided = criterion("near", 1.0, [0.5, 1.5])
    assert farthest([near, passed, far]) is far
    assert farthest([passed, undecided]) is None
    assert telling([passed, undecided, near, far], 3) == [far, near, undecided]
