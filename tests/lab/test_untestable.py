import re

import pytest

from normkit.lab.claims import catalogue
from normkit.lab.untestable import Untestable

SOURCED = re.compile(r"(arXiv \d{4}\.\d{5}|PMLR \d+)")
OURS = [claim for claim in catalogue() if isinstance(claim, Untestable)]


def test_the_article_s_sentences_about_the_literature_are_answered():
    assert {number for claim in OURS for number in claim.sentences} >= {3, 6}
    measured = {number for claim in catalogue() if claim.study is not None for number in claim.sentences}
    assert not measured & {3, 6}, "a sentence that can be measured is no sentence that cannot"


@pytest.mark.parametrize("claim", OURS, ids=lambda claim: claim.id)
def test_every_statement_on_record_names_its_source(claim: Untestable):
    assert claim.record
    for statement in claim.record:
        assert SOURCED.search(statement), statement


def test_rivals_are_rivals():
    (rivals,) = [claim.record for claim in OURS if claim.sentences == (6,)]
    sources = [SOURCED.findall(rival)[0] for rival in rivals]
    assert len(sources) == len(set(sources)) >= 3


def test_there_is_a_reason_or_there_is_no_such_entry():
    with pytest.raises(AssertionError, match="X1: not testable, and no reason why"):
        Untestable("X1", "title", "sentence", (1,), "source", reason="")
