from dataclasses import replace

import pytest

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import g1_deepnorm_constants as module
from normkit.lab.claims.g1_deepnorm_constants import CLAIMS, DEPTHS, STUDY
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips
from normkit.placement import WIRINGS, Constants, InitRule, deepnorm_constants

(G1,) = CLAIMS


def measure(row=None) -> list[Measurement]:
    """Measure both arms, with another row in DeepNorm's place if one is given."""
    with pytest.MonkeyPatch.context() as patch:
        if row is not None:
            patch.setitem(WIRINGS, "deepnorm", row)
        return [
            Measurement(STUDY.id, a.name, 0, STUDY.measure(a.params, Bench(Settings(), Draws(STUDY.id, a.name, 0))))
            for a in STUDY.arms(Settings())
        ]


def test_it_holds_and_the_control_flips(judge_claim, told):
    measured = measure()
    verdict = judge_claim(G1, G1.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(G1, G1.control.plays, measured).verdict)
    e = Evidence(measured, G1.plays, Settings())
    assert "6.69" in told(G1, e)
    assert len(G1.figures(e)[0].panels) == 3


def wrong(alpha=lambda c: c.alpha, beta=lambda c: c.beta):
    def constants(depth, architecture="decoder-only", *, other_depth=None):
        c = deepnorm_constants(depth, architecture, other_depth=other_depth)
        return Constants(alpha(c), beta(c))

    return constants


@pytest.mark.parametrize(
    "row",
    [
        replace(WIRINGS["deepnorm"], constants=wrong(alpha=lambda c: 8**0.5)),
        replace(WIRINGS["deepnorm"], constants=wrong(beta=lambda c: c.beta * 1.001)),
        replace(WIRINGS["deepnorm"], constants=wrong(lambda c: 2 * c.alpha, lambda c: 2 * c.beta)),
        replace(WIRINGS["deepnorm"], init=InitRule("", frozenset({"query", "value", "output", "up", "down"}))),
        replace(WIRINGS["deepnorm"], init=InitRule("", frozenset({"value", "output", "down"}))),
    ],
    ids=["one α for all", "β off by a thousandth", "both doubled, same bound", "β on queries too", "β missing on up"],
)
def test_a_wrong_copy_is_seen(row, judge_claim):
    assert judge_claim(G1, G1.plays, measure(row)).verdict is Verdict.FAILS


def test_the_bound_is_the_sum_over_sublayers():
    e = Evidence(measure(), G1.plays, Settings())
    for part, sublayers in module.PARTS.items():
        for depth, value in zip(DEPTHS, module.bound(e, "deepnorm", part), strict=True):
            if depth > 24:
                continue
            c = deepnorm_constants(depth, part)
            by_hand = sum((c.beta / c.alpha) ** 2 + (c.beta / c.alpha) ** 2 for _ in range(sublayers * depth))
            assert value == pytest.approx(by_hand, rel=1e-12)
