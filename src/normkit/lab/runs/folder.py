"""A run folder open for writing: locked, of the right settings, every file whole at every moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.environment import describe
from normkit.lab.runs.judged import (
    ENVIRONMENT,
    FIGURES,
    MEASUREMENTS,
    REPORTS,
    SETTINGS,
    VERDICTS,
    read_settings,
    read_verdicts,
)
from normkit.lab.runs.lines import Appender, RunError
from normkit.lab.runs.lock import locked
from normkit.lab.settings import Settings

_FILES = (SETTINGS, ENVIRONMENT, MEASUREMENTS, VERDICTS, *REPORTS.values(), FIGURES)
_MACHINE = ("python", "torch", "cpu", "cores")  # what makes one machine's measurements another's


@dataclass(frozen=True)
class Folder:
    """What the engine writes through."""

    path: Path
    lines: Appender
    environment: dict[str, Any]

    def write_verdicts(self, verdicts: list[dict[str, Any]]) -> None:
        """Replace verdicts.json as a whole; verdicts of claims that are not among these stay."""
        ours = {entry["id"] for entry in verdicts}
        others = [entry for entry in read_verdicts(self.path) if entry["id"] not in ours]
        replace(self.path / VERDICTS, verdicts + others)


@contextmanager
def opened(path: Path, settings: Settings, force: bool, notice: Callable[[str], None]) -> Generator[Folder]:
    """Open or make a run folder and hold it until the end of the block.

    Args:
        path: the folder.
        settings: must be the folder's, if it has any.
        force: start afresh; what the folder holds is moved into a folder of its own inside.
        notice: told what the user should know.

    Raises:
        RunError: another process holds it, its settings differ, or it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be made a run folder ({error.strerror}). Choose another --out") from error
    with locked(path):
        if force:
            _move_aside(path, notice)
        _same_settings(path, settings)
        before = _environment(path)
        replace(path / SETTINGS, settings.to_json())
        now = describe()
        changed = [name for name in _MACHINE if before and before.get(name) != now.get(name)]
        for name in changed:
            notice(f"{path} was begun with {name} {before.get(name)}; this is {name} {now.get(name)}")
        replace(path / ENVIRONMENT, now)
        try:
            lines = Appender(path / MEASUREMENTS)
        except OSError as error:
            raise RunError(f"{path / MEASUREMENTS}: cannot be written ({error.strerror})") from error
        try:
            yield Folder(path, lines, now)
        finally:
            lines.close()


def replace(path: Path, data: Any) -> None:
    """Write ``data`` as JSON so that the file is the old one or the new one, never half of either."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("w") as file:
            json.dump(data, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(
            f"{path}: cannot be written ({error.strerror}). What was measured is kept: make room, then run again"
        ) from error


def differences(old: Settings, new: Settings, words: str = "{} is {}, asked for {}") -> list[str]:
    """Return the fields in which two settings differ, with both values. A corpus is its bytes, not its path."""
    before, after = ({"grid": ""} | settings.to_json() for settings in (old, new))
    same_text = before["corpus_sha256"] == after["corpus_sha256"]
    skipped = {"corpus"} if same_text else set[str]()
    return [words.format(f, before[f], after[f]) for f in before if before[f] != after[f] and f not in skipped]


def _same_settings(path: Path, settings: Settings) -> None:
    there = read_settings(path)
    if there is None:
        return
    different = differences(there, settings)
    if different:
        raise RunError(
            f"{path}: a run with other settings ({'; '.join(different)}). Choose another --out, or start this folder "
            "afresh with --force: its files are then moved aside, not deleted"
        )


def _environment(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / ENVIRONMENT).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _move_aside(path: Path, notice: Callable[[str], None]) -> None:
    present = [path / name for name in _FILES if (path / name).exists()]
    if not present:
        return
    number = 1
    while (aside := path / f"replaced-{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for file in present:
            file.rename(aside / file.name)
    except OSError as error:
        raise RunError(f"{path}: cannot move its files to {aside} ({error.strerror})") from error
    notice(f"started afresh; what {path} held is in {aside}")
