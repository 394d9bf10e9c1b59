"""Rules that changed after their first run are on record, and no other one did since the committed run."""

from __future__ import annotations

import json
from pathlib import Path

from normkit.lab.claims import catalogue
from normkit.lab.rule_changes import rule_changes
from normkit.lab.runs.judged import judge_claim, read_run, read_verdicts, to_json

FOLDER = Path(__file__).parents[2] / "docs" / "reference-run"


def test_every_change_names_a_claim_and_what_it_was() -> None:
    known = {claim.id for claim in catalogue() if claim.study is not None}
    assert {change.claim for change in rule_changes()} <= known
    for change in rule_changes():
        assert change.before != change.after
        assert len(change.why) > 40


def test_verdicts_keep_their_rules_in_words_so_that_a_change_shows() -> None:
    run = read_run(FOLDER)
    claim = next(c for c in catalogue() if c.id == "F1")
    assert claim.study is not None
    assert claim.corrected is not None
    kept = json.loads(json.dumps(to_json(judge_claim(claim, run))))
    assert kept["rules"] == {"literal": claim.literal.text, "corrected": claim.corrected.text}
    assert kept["seeds"] == [0, 1, 2, 3, 4]


def test_rules_are_those_of_the_committed_run_or_their_change_is_on_record() -> None:
    written = {entry["id"]: entry["rules"] for entry in read_verdicts(FOLDER) if entry.get("rules")}
    changed = {change.claim for change in rule_changes()}
    for claim in catalogue():
        if claim.study is not None and claim.id in written and claim.id not in changed:
            assert written[claim.id].get("literal") == claim.literal.text
            assert written[claim.id].get("corrected") == (claim.corrected.text if claim.corrected else None)
