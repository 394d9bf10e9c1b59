"""Two runs side by side: which verdicts changed, and by how much the criteria's values, seed by seed where they can be.

A criterion differs when its outcome does, or when the paired interval of its values leaves out zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit.lab.runs.folder import differences
from normkit.lab.runs.judged import Run, judge_claim, read_run, read_verdicts, seeds_of, to_json
from normkit.lab.untestable import Entry
from normkit.lab.verdict import interval


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
        "settings": differences(runs[0].settings, runs[1].settings, "{} is {} in a, {} in b"),
        "claims": [_claim(name, first.get(name, {}), second.get(name, {})) for name in ids],
    }


def _verdicts(path: Path, run: Run, claims: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    given = {entry["id"]: _with_seeds(entry, run, claims) for entry in read_verdicts(path)}
    late = {c.id: to_json(judge_claim(c, run)) for c in claims if c.id not in given}
    return {name: v for name, v in (late | given).items() if v.get("verdict") or v.get("error")}


def _with_seeds(entry: dict[str, Any], run: Run, claims: Sequence[Entry]) -> dict[str, Any]:
    """Return a verdict with its seeds, which runs of an earlier day did not write down: those of its study."""
    if "seeds" in entry or not entry.get("verdict"):
        return entry
    study = next((c.study for c in claims if c.id == entry["id"]), None)
    return entry | ({"seeds": list(seeds_of(study, run.settings))} if study is not None else {})


def _claim(name: str, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    verdicts = [v.get("verdict") or ("could not run" if v.get("error") else None) for v in (a, b)]
    changed = None not in verdicts and verdicts[0] != verdicts[1]
    rules = [v.get("rules") for v in (a, b)]
    criteria = _criteria(a, b)
    return {
        "id": name,
        "a": verdicts[0],
        "b": verdicts[1],
        "changed": changed,
        "rule_changed": None not in rules and rules[0] != rules[1],
        "differs": changed or any(c["differs"] for c in criteria),
        "criteria": criteria,
    }


def _criteria(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    # Both rules of a claim may have a criterion of one name, with other regions and so other outcomes.
    sides = [{(rule, c["name"]): c for rule in ("literal", "corrected") for c in v.get(rule, [])} for v in (a, b)]
    keys = sorted({**sides[0], **sides[1]}, key=lambda key: key[0] == "corrected")
    return [
        {"rule": rule}
        | _criterion(name, sides[0].get((rule, name), {}), sides[1].get((rule, name), {}), _seeds(a), _seeds(b))
        for rule, name in keys
    ]


def _seeds(verdict: dict[str, Any]) -> list[int]:
    return verdict.get("seeds") or []


def _criterion(
    name: str, a: dict[str, Any], b: dict[str, Any], seeds_a: Sequence[int], seeds_b: Sequence[int]
) -> dict[str, Any]:
    outcomes = [side.get("outcome") for side in (a, b)]
    difference = paired(a.get("values"), seeds_a, b.get("values"), seeds_b)
    moved = difference is not None and not difference["low"] <= 0.0 <= difference["high"]
    both = None not in outcomes
    return {
        "name": name,
        "a": a.get("values"),
        "b": b.get("values"),
        "outcomes": outcomes,
        "difference": difference,
        "differs": (both and outcomes[0] != outcomes[1]) or moved,
    }


def paired(
    a: Sequence[float | None] | None, seeds_a: Sequence[int], b: Sequence[float | None] | None, seeds_b: Sequence[int]
) -> dict[str, Any] | None:
    """Return b − a over the seeds that both runs have: its mean and 95 % t interval.

    Two runs draw the same random numbers at the same seed, so their difference there is free of the spread between
    seeds. None where that cannot be said: no seed shared, values that are not one per seed, or one not finite. With a
    single seed shared, the interval is the difference itself.

    Example:
        >>> found = paired([1.0, 2.0, 3.0], [0, 1, 2], [2.5, 3.5], [1, 2])
        >>> found["seeds"], found["mean"], found["low"], found["high"]
        ([1, 2], 0.5, 0.5, 0.5)
    """
    if a is None or b is None or len(a) != len(seeds_a) or len(b) != len(seeds_b):
        return None
    before, after = dict(zip(seeds_a, a, strict=True)), dict(zip(seeds_b, b, strict=True))
    shared = [seed for seed in seeds_a if seed in after]
    pairs = [(before[seed], after[seed]) for seed in shared]
    differences = [q - p for p, q in pairs if p is not None and q is not None]
    if not shared or len(differences) < len(shared):
        return None
    found = interval(differences)
    return {"seeds": shared, "mean": found.mean, "low": found.low, "high": found.high}
