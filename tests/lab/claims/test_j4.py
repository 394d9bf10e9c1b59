"""J4: sensitivity against its formula, verdicts that turn over, and a sweep cut short."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims import j4_rate_sensitivity as j4
from normkit.lab.claims.j4_rate_sensitivity import RATES, STUDY, SWEEP, UNTRAINED, largest, reached, sensitivity
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

pytestmark = pytest.mark.slow  # a full run's claim; `make test` has ten minutes for everything

(J4,) = j4.CLAIMS
FULL = Settings(mode="full")
FLAT, STEEP = [2.9, 2.7, 2.5, 2.5, 2.6], [2.9, 2.7, 2.5, 2.7, 3.0]


def invented(with_norm=FLAT, without=STEEP, logits=(10.0, 100.0), spread=0.003) -> list[Measurement]:
    """Runs with these losses, and a spread over seeds that both arms share; None diverged."""
    made: list[Measurement] = []
    for seed in range(3):
        for name, row, logit in (("with", with_norm, logits[0]), ("without", without, logits[1])):
            for i, (rate, loss) in enumerate(zip(RATES, row, strict=True)):
                values = {
                    "heldout": None if loss is None else loss + spread * seed * (i == 0),
                    "start": 5.5,
                    "outcome": "diverged" if loss is None else "trained",
                    "logit": None if loss is None else logit * (1 + 0.1 * seed),
                    "fresh logit": 4.0,
                }
                made.append(Measurement(STUDY.id, f"{name}/{rate}", seed, values))
        made.append(Measurement(STUDY.id, UNTRAINED, seed, {"heldout": 5.5, "start": 5.5, "outcome": "stuck"}))
    return made


def test_sensitivity_is_the_mean_rise_over_the_best_of_the_sweep():
    e = Evidence(invented([2.0, None, 7.0, 3.0, 2.5], spread=0.0), J4.plays, FULL)
    assert reached(e, "with")[0] == [2.0, 5.5, 5.5, 3.0, 2.5]
    assert sensitivity(e, "with")[0] == pytest.approx((0 + 3.5 + 3.5 + 1.0 + 0.5) / 5)
    assert largest(e, "without") == pytest.approx([100.0, 110.0, 120.0])


@pytest.mark.parametrize(
    ("with_norm", "without", "logits", "verdict"),
    [
        (FLAT, STEEP, (10.0, 100.0), Verdict.HOLDS),
        (FLAT, FLAT, (10.0, 100.0), Verdict.FAILS),  # alike
        (STEEP, FLAT, (10.0, 100.0), Verdict.FAILS),
        (FLAT, STEEP, (100.0, 100.0), Verdict.FAILS),  # logits as large
        (FLAT, [*STEEP[:4], None], (10.0, 100.0), Verdict.HOLDS),
        ([*FLAT[:4], None], STEEP, (10.0, 100.0), Verdict.FAILS),
    ],
)
def test_verdicts(with_norm, without, logits, verdict, judge_claim, told):
    made = invented(with_norm, without, logits)
    found = judge_claim(J4, J4.plays, made).verdict
    assert found is verdict
    if verdict is Verdict.HOLDS:
        assert flips(found, judge_claim(J4, J4.control.plays, made).verdict)
    e = Evidence(made, J4.plays, FULL)
    assert told(J4, e)
    assert len(J4.figures(e)) == 2


def test_what_was_planted_holds_where_nothing_is_to_be_found(judge_claim):
    made = invented(FLAT, FLAT)
    assert judge_claim(J4, J4.plays, made).verdict is Verdict.FAILS
    assert J4.planted is not None
    assert judge_claim(J4, J4.planted.plays, made).verdict is Verdict.HOLDS


def test_seeds_that_disagree_leave_it_open(judge_claim):
    """Labels shuffled: which run had QK-norm is forgotten in one seed of three."""
    made = invented()
    swapped = [
        replace(m, arm=m.arm.replace("without", "?").replace("with", "without").replace("?", "with"))
        if m.seed == 1
        else m
        for m in made
    ]
    assert judge_claim(J4, J4.plays, swapped).verdict is Verdict.UNDECIDED


def test_a_short_sweep_is_measured(measure_text):
    short = replace(
        STUDY,
        arms=lambda s: [
            replace(a, params=dict(a.params) | {"steps": min(10, a.params["steps"])}) for a in STUDY.arms(s)
        ],
    )
    names = [UNTRAINED, f"with/{RATES[1]}", f"without/{RATES[1]}", f"without/{RATES[-1]}"]
    runs = {m.arm: m.values for m in measure_text(short, replace(FULL, seeds=(0,)), names)}
    assert set(runs) == set(names)
    assert runs[UNTRAINED]["heldout"] > math.log(256) - 0.5
    bare, hot, normed = (runs[n] for n in (names[2], names[3], names[1]))
    assert bare["start"] == hot["start"] != normed["start"]
    assert bare["fresh logit"] == hot["fresh logit"] > normed["fresh logit"]
    assert hot["logit"] > 10 * bare["logit"], "a rate of 0.1 makes queries and keys large within ten steps"
    assert normed["logit"] < 16**0.5 * 1.1, "√D with gains near 1"


def test_the_sweep_is_for_full_runs():
    assert STUDY.full_only
    assert len(STUDY.arms(FULL)) == 2 * len(SWEEP) + 1
