"""A claim that fails is guarded by a control with the effect planted in it; one that holds by the one without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from normkit.lab.claim import Claim, Control, Evidence, Measurement, Rule
from normkit.lab.claims.a2_toy_residual import CLAIMS
from normkit.lab.runs.judged import Run, judge_claim
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, Verdict


def claim(effect: float) -> tuple[Claim, Run]:
    """A claim that arm "a" exceeds arm "b", with arm "far" to plant the effect."""
    study = replace(CLAIMS[0].study, arms=lambda settings: [*map(arm, ("a", "b", "far"))], seeds=3)
    rule = Rule("a exceeds b", "sentence", lambda e: [above(e)])
    made = replace(
        CLAIMS[0],
        study=study,
        plays={"a": "a", "b": "b"},
        literal=rule,
        corrected=None,
        correction="",
        control=Control("a plays both", {"a": "a", "b": "a"}),
        planted=Control("far plays a", {"a": "far", "b": "b"}),
    )
    values = {"a": effect, "b": 0.0, "far": 10.0}
    cells = [Measurement(study.id, name, seed, {"v": v}) for name, v in values.items() for seed in range(3)]
    return made, Run(Path(), Settings(seeds=(0, 1, 2)), {}, tuple(cells))


def arm(name: str):
    from normkit.lab.claim import Arm

    return Arm(name)


def above(e: Evidence) -> Criterion:
    return Criterion("a − b", e.paired("a", "b", "v"), "above", 0.0, 0.5, "a toy")


def test_a_claim_that_holds_is_guarded_by_the_effect_removed():
    judged = judge_claim(*claim(effect=5.0))
    assert judged.judgement is not None
    assert judged.judgement.verdict is Verdict.HOLDS
    assert judged.control is judged.claim.control
    assert judged.flipped


def test_a_claim_that_fails_is_guarded_by_the_effect_planted():
    judged = judge_claim(*claim(effect=0.0))
    assert judged.judgement is not None
    assert judged.control_judgement is not None
    assert judged.judgement.verdict is Verdict.FAILS
    assert judged.control is judged.claim.planted
    assert judged.control_judgement.verdict is Verdict.HOLDS
    assert judged.flipped


def test_a_whole_path_among_the_roles_stands_for_itself_alone():
    cells = [Measurement("s", name, 0, {"v": v}) for name, v in (("x/1", 1.0), ("x/2", 2.0), ("y", 3.0))]
    evidence = Evidence(cells, {"role": "x", "role/2": "y"}, Settings())
    assert evidence.numbers("role/1", "v") == [1.0]
    assert evidence.numbers("role/2", "v") == [3.0]
