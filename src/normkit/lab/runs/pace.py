"""How far a run is and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normkit.lab.runs.judged import CellId
from normkit.lab.runs.plan import Cell, Plan


@dataclass(frozen=True)
class Progress:
    """How far the run is: measurements made and to be made, seconds gone, seconds left at the pace so far."""

    done: int
    cells: int
    elapsed: float
    left: float
    running: tuple[str, ...] = ()


class Pace:
    """Planned seconds against measured ones, for an ETA that corrects itself."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self._jobs = jobs
        self._start = self._last = time.monotonic()
        self._left: Mapping[CellId, Cell] = {cell.id: cell for cell in plan.missing}
        self._total = len(self._left)
        self._planned = self._measured = 0.0

    def made(self, cell: Cell, seconds: float) -> None:
        """Note a measurement."""
        self.drop([cell], made=True)
        self._last = time.monotonic()
        self._planned += cell.seconds
        self._measured += seconds

    def drop(self, cells: Sequence[Cell], made: bool = False) -> None:
        """Take cells off what is left."""
        gone = {cell.id for cell in cells}
        self._left = {key: cell for key, cell in self._left.items() if key not in gone}
        if not made:
            self._total -= len(gone)

    def progress(self, running: tuple[str, ...]) -> Progress:
        """Return where the run stands."""
        shared = sum(cell.seconds for cell in self._left.values() if not cell.study.timing)
        alone = sum(cell.seconds for cell in self._left.values() if cell.study.timing)
        # The plan counts as one second measured exactly as planned, so that the first measurements do not swing it.
        scale = (self._measured + 1) / (self._planned + 1)
        now = time.monotonic()
        left = max(scale * (shared / self._jobs + alone) - (now - self._last), 0.0)
        return Progress(self._total - len(self._left), self._total, now - self._start, left, running)
