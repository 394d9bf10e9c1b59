"""The record of rules that were changed after their first run, with what the claim came to under the old rule.

A rule that is changed once its numbers are known could have been bent to them. So each change stands in
``rule_changes.json`` and in the report, with its reason and the old verdict, for the reader to judge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from normkit.lab.verdict import Verdict


@dataclass(frozen=True)
class RuleChange:
    """One rule changed after its first run.

    Args:
        claim: the claim's id.
        before, after: the rule in words, as far as it changed.
        why: the fault of the old rule.
        verdict_before: the verdict under the old rule; None where it was not written down.
        control_before: its control's verdict under the old rule, likewise.
    """

    claim: str
    before: str
    after: str
    why: str
    verdict_before: Verdict | None
    control_before: Verdict | None


@cache
def rule_changes() -> tuple[RuleChange, ...]:
    """Return all recorded changes, in the order of the file.

    Example:
        >>> [change.verdict_before.value for change in rule_changes() if change.claim == "F3b"]
        ['fails']
    """
    entries = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    verdicts = ("verdict_before", "control_before")
    return tuple(RuleChange(**(e | {kind: e[kind] and Verdict(e[kind]) for kind in verdicts})) for e in entries)
