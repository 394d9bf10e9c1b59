"""The live curve file of a training run: JSON lines, appended while runs train, to be followed with ``tail -f``.

A run opens with a line that has ``steps``, and closes with one that has ``outcome``; lines between them are points.
Runs of several workers alternate in the file, which is why every line names its arm and seed. A run that was killed and
made again opens again: its earlier points are then void.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

CURVES = "curves.jsonl"


class Curve:
    """One run's lines, each written whole by one ``write``, so that lines of several workers never mix.

    Args:
        folder: the run folder; None writes nothing.
        arm, seed: which run.
        steps: how many it will make.
    """

    def __init__(self, folder: Path | None, arm: str, seed: int, steps: int) -> None:
        self._who = {"arm": arm, "seed": seed}
        self._start = time.perf_counter()
        self._fd = None if folder is None else os.open(folder / CURVES, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if self._fd is not None and not _ends_whole(self._fd):
            os.write(self._fd, b"\n")
        self._write({"steps": steps})

    def point(self, step: int, losses: Sequence[float], lr: float) -> None:
        """Append the mean of the last losses after ``step`` steps; not finite, it stands as null."""
        mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else None
        seconds = round(time.perf_counter() - self._start, 3)
        self._write({"step": step, "loss": mean, "lr": lr, "seconds": seconds})

    def close(self, outcome: str, heldout: float | None) -> None:
        """Append what the run came to and close the file."""
        self._write({"outcome": outcome, "heldout": heldout})
        if self._fd is not None:
            os.close(self._fd)

    def _write(self, record: dict[str, Any]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(self._who | record, allow_nan=False).encode() + b"\n")


def _ends_whole(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


class Follower:
    """Reads the file as it grows: where each run stands.

    Attributes:
        at: (arm, seed) → (steps made, steps in all, loss of the last point or None).
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._offset = folder / CURVES, 0
        self.at: dict[tuple[str, int], tuple[int, int, float | None]] = {}

    def read(self) -> None:
        """Take in what was written since; a line that is not whole yet, or is none of ours, is left alone."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for raw in data[:whole].splitlines():
            try:
                self._take(json.loads(raw))
            except (ValueError, KeyError, TypeError):
                continue

    def _take(self, record: Any) -> None:
        entry = cast("dict[str, Any]", record)
        run = (str(entry["arm"]), int(entry["seed"]))
        if "steps" in entry:
            self.at[run] = (0, int(entry["steps"]), None)
        elif "step" in entry and run in self.at:
            self.at[run] = (int(entry["step"]), self.at[run][1], entry["loss"])
