from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from toys import LONG, MIXED, toy

from normkit.lab.claim import Arm, Study
from normkit.lab.claims import located
from normkit.lab.runs.plan import Plan, make_plan
from normkit.lab.settings import Settings

SETTINGS = Settings(seeds=(7, 8, 9, 10, 11), corpus_sha256="text")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return toy(tmp_path, monkeypatch)


def plan(module: ModuleType, settings: Settings = SETTINGS, stored: object = (), **changes: object) -> Plan:
    claims = [replace(c, study=replace(c.study, **changes)) if changes else c for c in module.CLAIMS]
    return make_plan(claims, [module.__name__] * len(claims), settings, stored)  # type: ignore[arg-type]


def keys(plan: Plan) -> dict[object, str]:
    return {cell.id: cell.key for step in plan.steps for cell in step.cells}


def test_cheap_studies_first_timing_last_and_claims_share_their_study(module: ModuleType):
    steps = plan(module).steps
    assert [step.study.id for step in steps] == ["diverged", "steady", "broken", "clock"]
    assert [[c.id for c in step.claims] for step in steps] == [["DIV"], ["T1", "T2"], ["BAD"], ["CLK"]]


def test_what_cannot_be_tested_needs_no_step_and_its_verdict_is_due_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = toy(tmp_path, monkeypatch, MIXED)
    mixed = make_plan(module.CLAIMS, [module.__name__] * len(module.CLAIMS), SETTINGS)
    assert [claim.id for claim in mixed.claims] == ["OPEN", "DIV", "T1", "T2", "BAD", "CLK"]
    assert mixed.cells == 14
    alone = make_plan(module.CLAIMS[1:2], [module.__name__], SETTINGS)
    assert (alone.steps, alone.cells, alone.seconds(2)) == ((), 0, 0.0)


def test_a_quick_run_plans_no_cell_of_what_only_a_full_run_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = toy(tmp_path, monkeypatch, LONG)
    modules = [module.__name__] * len(module.CLAIMS)
    quick = make_plan(module.CLAIMS, modules, SETTINGS)
    assert [claim.id for claim in quick.full_only] == ["L1", "L2"]
    assert [claim.id for claim in quick.claims] == ["OPEN", "L1", "L2", "T1"]
    assert {cell.study.id for step in quick.steps for cell in step.cells} == {"steady"}
    assert quick.seconds(1) == pytest.approx(0.06)
    full = make_plan(module.CLAIMS, modules, replace(SETTINGS, mode="full"))
    assert full.full_only == ()
    assert [claim.id for claim in full.claims] == ["OPEN", "T1", "L1", "L2"]
    assert full.cells == quick.cells + 2


def test_the_quick_plan_of_the_lab_stays_short_and_judges_most_of_the_article():
    """`make lab` is minutes on two cores, and still has something to say of 40 of the 46 sentences."""
    found = located()
    quick = make_plan([claim for claim, _ in found], [module for _, module in found], Settings())
    assert quick.seconds(jobs=2) <= 7 * 60
    assert {"B1", "B2", "B3", "B4", "C7", "C7b", "D9", "G3", "G5", "I1b"} <= {claim.id for claim in quick.full_only}
    judged = {number for step in quick.steps for claim in step.claims for number in claim.sentences}
    assert len(judged) >= 40


def test_a_study_takes_the_first_of_the_seeds_as_many_as_it_asks_for(module: ModuleType):
    steps = {step.study.id: step for step in plan(module).steps}
    assert {cell.seed for cell in steps["steady"].cells} == {7, 8, 9}
    assert {cell.seed for cell in steps["clock"].cells} == {7}
    few = plan(module, replace(SETTINGS, seeds=(4,)))
    assert {cell.seed for step in few.steps for cell in step.cells} == {4}


def test_what_is_stored_under_its_key_is_cached_and_costs_nothing(module: ModuleType):
    first = plan(module)
    assert len(first.missing) == first.cells == 14
    # 6 × 0.01, 2 × 0.02, 4 × 0.03 shared by two workers; 2 × 0.001 alone.
    assert first.seconds(2) == pytest.approx(0.22 / 2 + 0.002)
    stored = {(cell.id, cell.key) for step in first.steps for cell in step.cells if cell.study.id != "broken"}
    again = plan(module, stored=stored)
    assert {cell.study.id for cell in again.missing} == {"broken"}
    assert again.seconds(1) == pytest.approx(0.12)
    assert again.seconds(100) == pytest.approx(0.03)  # no shorter than its longest measurement
    assert [step.study.id for step in again.steps] == [step.study.id for step in first.steps]
    assert len(plan(module, stored={(cell, "other key") for cell, _ in stored}).missing) == 14


def test_the_key_holds_what_may_change_a_measurement_and_nothing_else(module: ModuleType):
    base = keys(plan(module))
    assert len(set(base.values())) == len(base)
    for change in ({"mode": "full"}, {"device": "meta"}):
        assert not set(base.values()) & set(keys(plan(module, replace(SETTINGS, **change))).values())
    assert keys(plan(module, replace(SETTINGS, corpus_sha256="other", corpus="elsewhere"))) == base
    reading = keys(plan(module, corpus=True))
    assert not set(reading.values()) & set(
        keys(plan(module, replace(SETTINGS, corpus_sha256="other"), corpus=True)).values()
    )
    more = keys(plan(module, replace(SETTINGS, seeds=(7, 8, 9, 10, 11, 12))))
    assert more == base


def test_parameters_enter_the_key_by_value(module: ModuleType):
    def key(params: dict[str, object]) -> str:
        study = replace(module.STEADY, arms=lambda settings: [Arm("only", params)])
        claim = replace(module.CLAIMS[0], study=study, plays={"a": "only", "b": "x"}, control=module.CLAIMS[0].control)
        return make_plan([claim], [module.__name__], SETTINGS).steps[0].cells[0].key

    assert key({"x": 1.0, "f": len}) == key({"f": len, "x": 1.0})
    assert key({"x": 1.0, "f": len}) != key({"x": 1.0, "f": max})
    assert key({"x": 1.0}) != key({"x": 2.0})
    with pytest.raises(AssertionError, match="no stable name"):
        key({"x": object()})


def test_two_arms_of_one_name_are_a_mistake(module: ModuleType):
    study: Study = replace(module.STEADY, arms=lambda settings: [Arm("a"), Arm("a")], seconds=lambda params: 1.0)
    with pytest.raises(AssertionError, match="two arms of one name"):
        make_plan([replace(module.CLAIMS[0], study=study)], [module.__name__], SETTINGS)
