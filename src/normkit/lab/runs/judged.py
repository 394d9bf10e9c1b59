"""A run folder read back, and its claims judged: all that the report, the comparison and the engine need.

A run folder holds ``settings.json``, ``environment.json``, ``measurements.jsonl``, ``verdicts.json``, ``run.lock``,
``report.html`` (and its other languages) and ``figures/``. Verdicts are never read back to make other verdicts:
judging starts from the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normkit.lab.claim import Claim, Control, Evidence, Measurement, Study
from normkit.lab.runs.lines import RunError, jsonable, parse
from normkit.lab.settings import Settings
from normkit.lab.untestable import Entry
from normkit.lab.verdict import Criterion, Judgement, Verdict, flips, judge

SETTINGS = "settings.json"
ENVIRONMENT = "environment.json"
MEASUREMENTS = "measurements.jsonl"
VERDICTS = "verdicts.json"
REPORTS = {"en": "report.html", "zh": "report.zh.html"}  # by language
FIGURES = "figures"

NOT_IN_QUICK = "not measured in a quick run; run --full"

CellId = tuple[str, str, int]  # study, arm, seed

_NO = Verdict.UNTESTABLE
NOT_TESTABLE = Judgement(_NO, given=_NO, at_half=_NO, at_double=_NO, literal=(), corrected=())


@dataclass(frozen=True)
class Run:
    """A run folder in memory. Where a cell was measured more than once, the last line counts.

    Args:
        path: the folder.
        settings: what was asked.
        environment: where it ran, as `normkit.environment.describe` put it; empty when the file is missing.
        measurements: one per (study, arm, seed), in the order in which they were written.
        notices: what was odd about the folder, in sentences.
        keys: the key each cell was measured under; another key today means that code or settings changed since.
        errors: claim id → the last line of the traceback, for claims that could not run.
    """

    path: Path
    settings: Settings
    environment: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    notices: tuple[str, ...] = ()
    keys: Mapping[CellId, str] = field(default_factory=dict[CellId, str])
    errors: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, its control's verdict, and the evidence of both.

    ``judgement`` is None as long as ``missing`` names measurements ("arm, seed 3"), or when judging itself raised,
    in which case ``error`` says how. ``control`` is the control that was judged. ``flipped`` says whether the
    control's verdict is the opposite one; None without both verdicts. ``error`` also carries the reason why a
    claim's measurements could not be made. A sentence that cannot be tested has its verdict from the start, with
    neither evidence nor control. ``full_only`` marks a claim that this run leaves to a full one: neither failed nor
    undecided nor waiting, it has no verdict here.
    """

    claim: Entry
    judgement: Judgement | None
    control_judgement: Judgement | None
    flipped: bool | None
    evidence: Evidence | None
    control_evidence: Evidence | None
    missing: tuple[str, ...] = ()
    error: str = ""
    control: Control | None = None
    full_only: bool = False


def read_run(folder: Path) -> Run:
    """Read a run folder, finished or not, without changing it.

    Raises:
        RunError: when the folder or its settings cannot be read.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder. `normkit lab run --out {folder}` makes one")
    settings = read_settings(folder)
    if settings is None:
        raise RunError(f"{folder}: not a run folder, it has no {SETTINGS}")
    notices: list[str] = []
    try:
        parsed = parse((folder / MEASUREMENTS).read_bytes())
    except FileNotFoundError:
        parsed = parse(b"")
    except OSError as error:
        raise RunError(f"{folder / MEASUREMENTS}: cannot be read ({error})") from error
    notices.extend(parsed.notices)
    cells: dict[CellId, Measurement] = {}
    keys: dict[CellId, str] = {}
    for line in parsed.lines:
        cell = (line.measurement.study, line.measurement.arm, line.measurement.seed)
        cells[cell], keys[cell] = line.measurement, line.key
    environment = _object(folder / ENVIRONMENT, notices)
    verdicts = read_verdicts(folder)
    errors = {str(v["id"]): str(v["error"]) for v in verdicts if v.get("error")}
    return Run(folder, settings, environment, tuple(cells.values()), tuple(notices), keys, errors)


def read_settings(folder: Path) -> Settings | None:
    """Return the folder's settings, or None when it has none yet.

    Raises:
        RunError: when the file is there and is not settings.
    """
    path = folder / SETTINGS
    try:
        return Settings.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: cannot be read as settings ({type(error).__name__}: {error})") from error


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts last written by a run; an empty list when there are none or they cannot be read."""
    try:
        data = json.loads((folder / VERDICTS).read_text())
        return [dict(entry) for entry in data if "id" in entry]
    except (OSError, ValueError, TypeError):
        return []


def _object(path: Path, notices: list[str]) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        notices.append(f"{path.name}: cannot be read ({error}), ignored")
        return {}


def seeds_of(study: Study, settings: Settings) -> tuple[int, ...]:
    """Return the seeds this study uses: the first of the settings' seeds, as many as it asks for."""
    return settings.seeds[: study.seeds]


def judge_claim(claim: Entry, run: Run) -> Judged:
    """Judge a claim and its control on what the run measured; never raises.

    Measurements of arms or seeds that the study no longer has are left out, and in a quick run those of a study that
    only a full one measures.
    """
    if claim.study is None:
        return Judged(claim, NOT_TESTABLE, None, None, None, None)
    if claim.study.skipped(run.settings):
        return Judged(claim, None, None, None, None, None, full_only=True)
    try:
        wanted = [
            (claim.study.id, arm.name, seed)
            for arm in claim.study.arms(run.settings)
            for seed in seeds_of(claim.study, run.settings)
        ]
    except Exception as error:
        return Judged(claim, None, None, None, None, None, error=last_line(error))
    measured = {(m.study, m.arm, m.seed): m for m in run.measurements}
    missing = tuple(f"{arm}, seed {seed}" for study, arm, seed in wanted if (study, arm, seed) not in measured)
    if missing:
        error = run.errors.get(claim.id, "")
        return Judged(claim, None, None, None, None, None, missing=missing, error=error)
    ours = [measured[cell] for cell in wanted]
    evidence, judgement, error = _judge(claim, ours, claim.plays, run.settings)
    chosen = claim.control
    if claim.planted is not None and judgement is not None and judgement.verdict is Verdict.FAILS:
        chosen = claim.planted
    control_evidence, control, control_error = _judge(claim, ours, chosen.plays, run.settings)
    flipped = flips(judgement.verdict, control.verdict) if judgement and control else None
    if not error and control_error:
        error = f"in the control: {control_error}"
    return Judged(claim, judgement, control, flipped, evidence, control_evidence, error=error, control=chosen)


def _judge(
    claim: Claim, measurements: Iterable[Measurement], plays: Mapping[str, str], settings: Settings
) -> tuple[Evidence, Judgement | None, str]:
    evidence = Evidence(measurements, plays, settings)
    try:
        literal = claim.literal.criteria(evidence)
        corrected = None if claim.corrected is None else claim.corrected.criteria(evidence)
        return evidence, judge(literal, corrected), ""
    except Exception as error:
        return evidence, None, last_line(error)


def summary_of(judged: Judged) -> str:
    """Return the claim's one-line summary, or why there is none."""
    if judged.claim.study is None:
        return judged.claim.reason
    if judged.full_only:
        return NOT_IN_QUICK
    if judged.judgement is None or judged.evidence is None:
        return judged.error or f"{len(judged.missing)} measurements missing"
    try:
        return judged.claim.summary(judged.evidence)
    except Exception as error:
        return f"no summary: {last_line(error)}"


def last_line(error: BaseException) -> str:
    """Return the last line of the error's traceback: its type and message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__


def to_json(judged: Judged) -> dict[str, Any]:
    """Return what verdicts.json and ``--json`` say of a claim."""
    judgement, control, study = judged.judgement, judged.control_judgement, judged.claim.study
    return {
        "id": judged.claim.id,
        "title": judged.claim.title,
        "sentences": list(judged.claim.sentences),
        "study": study.id if study else None,
        "seeds": list(judged.evidence.seeds) if judged.evidence else [],
        "rules": _rules(judged.claim),
        "verdict": judgement.verdict.value if judgement else None,
        "given": judgement.given.value if judgement else None,
        "at_half": judgement.at_half.value if judgement else None,
        "at_double": judgement.at_double.value if judgement else None,
        "summary": summary_of(judged),
        "control": control.verdict.value if control else None,
        "flipped": judged.flipped,
        "literal": [_criterion(c) for c in judgement.literal] if judgement else [],
        "corrected": [_criterion(c) for c in judgement.corrected] if judgement else [],
        "missing": list(judged.missing),
        "full_only": judged.full_only,
        "error": judged.error,
    }


def _rules(claim: Entry) -> dict[str, str]:
    if claim.study is None:
        return {}
    corrected = {} if claim.corrected is None else {"corrected": claim.corrected.text}
    return {"literal": claim.literal.text} | corrected


def _criterion(c: Criterion) -> dict[str, Any]:
    return {
        "name": c.name,
        "values": jsonable([float(v) for v in c.values]),
        "kind": c.kind,
        "target": jsonable(float(c.target)),
        "tolerance": jsonable(float(c.tolerance)),
        "outcome": c.outcome().value,
    }
