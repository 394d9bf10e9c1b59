"""Two runs side by side: which verdicts changed, and what the criteria's values were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit.lab.runs.folder import differences
from normkit.lab.runs.judged import Run, judge_claim, read_run, read_verdicts, to_json
from normkit.lab.untestable import Entry


def compare(a: Path, b: Path, claims: Sequence[Entry]) -> dict[str, Any]:
    """Return the differences of two run folders, JSON-ready.

    A verdict is the one its run gave, by the code of that day. Where a run gave none, because it was killed or
    asked for other claims, and has the measurements all the same, it is judged from them now.

    Raises:
        RunError: when one of the two is no run folder.
    """
    runs = read_run(a), read_run(b)
    first, second = (_verdicts(path, run, claims) for path, run in zip((a, b), runs, strict=True))
    order = [claim.id for claim in claims]
    ids = sorted(first.keys() | second.keys(), key=lambda i: (order.index(i) if i in order else len(order), i))
    return {
        "runs": [str(a), str(b)],
        "settings": differences(runs[0].settings, runs[1].settings),
        "claims": [_claim(name, first.get(name, {}), second.get(name, {})) for name in ids],
    }


def _verdicts(path: Path, run: Run, claims: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    given = {entry["id"]: entry for entry in read_verdicts(path)}
    late = {c.id: to_json(judge_claim(c, run)) for c in claims if c.id not in given}
    return {name: v for name, v in (late | given).items() if v.get("verdict") or v.get("error")}


def _claim(name: str, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    verdicts = [v.get("verdict") or ("could not run" if v.get("error") else None) for v in (a, b)]
    return {
        "id": name,
        "a": verdicts[0],
        "b": verdicts[1],
        "changed": None not in verdicts and verdicts[0] != verdicts[1],
        "criteria": _criteria(a, b),
    }


def _criteria(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    sides = [{c["name"]: c for rule in ("literal", "corrected") for c in v.get(rule, [])} for v in (a, b)]
    return [
        {
            "name": name,
            "a": sides[0].get(name, {}).get("values"),
            "b": sides[1].get(name, {}).get("values"),
            "outcomes": [side.get(name, {}).get("outcome") for side in sides],
        }
        for name in dict.fromkeys([*sides[0], *sides[1]])
    ]
