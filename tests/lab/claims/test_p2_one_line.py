from dataclasses import replace

import pytest

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims.p2_one_line import CLAIMS, HIDDEN, STUDY, WIDTH
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips
from normkit.placement import WIRINGS

(P2,) = CLAIMS


def measure(**rows) -> list[Measurement]:
    """Measure all arms at three seeds, with rows of the table exchanged."""
    with pytest.MonkeyPatch.context() as patch:
        for name, row in rows.items():
            patch.setitem(WIRINGS, name, row)
        return [
            Measurement(
                STUDY.id, a.name, seed, STUDY.measure(a.params, Bench(Settings(), Draws(STUDY.id, a.name, seed)))
            )
            for a in STUDY.arms(Settings())
            for seed in (4, 5, 6)
        ]


def test_it_holds_and_the_control_flips(judge_claim, told):
    measured = measure()
    verdict = judge_claim(P2, P2.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(P2, P2.control.plays, measured).verdict)
    e = Evidence(measured, P2.plays, Settings())
    assert str(2 * WIDTH * HIDDEN + WIDTH) in told(P2, e)
    assert P2.figures(e)


@pytest.mark.parametrize(
    "rows",
    [
        {"pre": replace(WIRINGS["pre"], after=True)},
        {"pre": WIRINGS["reordered"]},  # as many norms, in a third place
        {"post": WIRINGS["pre"]},
    ],
    ids=["a norm more", "norm on the branch", "the same order twice"],
)
def test_another_wiring_is_seen(rows, judge_claim):
    assert judge_claim(P2, P2.plays, measure(**rows)).verdict is Verdict.FAILS
