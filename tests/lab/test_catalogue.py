from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from toys import MIXED, toy

from normkit.lab.claims import UnknownClaimError, catalogue, collect, find, located, select
from normkit.lab.untestable import Untestable


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return toy(tmp_path, monkeypatch)


def test_the_labs_own_catalogue_holds_together():
    assert catalogue() == find([]) == tuple(claim for claim, _ in located())
    assert all(module.startswith("normkit.lab.claims.") for _, module in located())


def test_claims_are_found_by_name_in_any_case_and_come_in_the_catalogues_order(module: ModuleType):
    found = collect([module])
    assert [claim.id for claim, _ in select(found, ["clk", "T1", "t1"])] == ["T1", "CLK"]
    assert select(found, []) == found


def test_what_cannot_be_tested_stands_among_the_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = collect([toy(tmp_path, monkeypatch, MIXED)])
    assert [claim.id for claim, _ in found] == ["T1", "OPEN", "T2", "DIV", "BAD", "CLK"]
    [(claim, _)] = select(found, ["open"])
    assert isinstance(claim, Untestable)
    twice = SimpleNamespace(__name__="a", CLAIMS=(claim, claim))
    with pytest.raises(AssertionError, match="names a claim twice"):
        collect([twice])  # type: ignore[list-item]


def test_every_unknown_name_is_answered(module: ModuleType):
    with pytest.raises(
        UnknownClaimError, match=r"no claim 'T9': did you mean T\d or T\d\?; no claim 'quux': there are"
    ):
        select(collect([module]), ["T1", "T9", "quux"])


def test_names_are_unique_and_one_study_id_is_one_study(module: ModuleType):
    first, second = module.CLAIMS[0], module.CLAIMS[1]
    with pytest.raises(AssertionError, match="claim T1 stands in a and in b"):
        collect([SimpleNamespace(__name__="a", CLAIMS=(first,)), SimpleNamespace(__name__="b", CLAIMS=(first,))])  # type: ignore[list-item]
    with pytest.raises(AssertionError, match="names a claim twice"):
        collect([SimpleNamespace(__name__="a", CLAIMS=(first, first))])  # type: ignore[list-item]
    twin = replace(second, study=replace(second.study, seeds=4))
    with pytest.raises(AssertionError, match="two studies steady"):
        collect([SimpleNamespace(__name__="a", CLAIMS=(first, twin))])  # type: ignore[list-item]


def test_a_name_without_its_letter_means_the_family():
    assert [c.id for c in find(["f3"])] == ["F3a", "F3b", "F3c", "F3d"]
    assert [c.id for c in find(["D1"])] == ["D1"]  # an id of its own is itself alone
    with pytest.raises(UnknownClaimError, match="'F'"):
        find(["F"])
