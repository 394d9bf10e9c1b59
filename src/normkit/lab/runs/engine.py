"""The run: measurements handed to workers in the plan's order, kept as they come, judged as soon as they suffice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from normkit.lab.claim import Measurement
from normkit.lab.language import Language
from normkit.lab.runs.folder import Folder, opened
from normkit.lab.runs.interrupts import Interrupts
from normkit.lab.runs.judged import CellId, Judged, Run, judge_claim, to_json
from normkit.lab.runs.lines import Line
from normkit.lab.runs.pace import Pace, Progress
from normkit.lab.runs.plan import Cell, Plan, Step, make_plan
from normkit.lab.runs.pool import Pool, Worker
from normkit.lab.runs.rendering import Rendering
from normkit.lab.runs.worker import Reply
from normkit.lab.settings import Settings
from normkit.lab.untestable import Entry

LOG = "workers.log"
_TICK = 0.5  # seconds between two looks at the clock while nothing happens


@dataclass(frozen=True)
class Result:
    """What a run came to. ``could_not_run`` names the claims whose measurements or judging raised."""

    judged: tuple[Judged, ...]
    interrupted: bool

    @property
    def could_not_run(self) -> tuple[str, ...]:
        """The claims without a verdict because something raised."""
        return tuple(j.claim.id for j in self.judged if j.error)


class View(Protocol):
    """Who watches a run."""

    def planned(self, plan: Plan, out: Path, jobs: int) -> None:
        """The plan stands and work is about to begin."""
        ...

    def notice(self, text: str) -> None:
        """Something the user should know."""
        ...

    def judged(self, judged: Judged) -> None:
        """A claim has its verdict, or the reason why it has none."""
        ...

    def tick(self, progress: Progress) -> None:
        """Called at least twice a second."""
        ...


@dataclass(frozen=True)
class Order:
    """What a run is asked for: claims with their modules, settings, folder, workers, language of the report."""

    claims: Sequence[tuple[Entry, str]]
    settings: Settings
    out: Path
    jobs: int
    force: bool = False
    language: Language = "en"


def run(order: Order, view: View, interrupts: Interrupts) -> Result:
    """Measure what is missing in the run folder and judge every claim of the order.

    Raises:
        RunError: the folder is in use, is of other settings, or cannot be written any more.
    """
    with opened(order.out, order.settings, order.force, view.notice) as folder:
        for text in folder.lines.parsed.notices:
            view.notice(text)
        stored = {(_cell_of(line), line.key) for line in folder.lines.parsed.lines}
        claims, modules = [claim for claim, _ in order.claims], [module for _, module in order.claims]
        plan = make_plan(claims, modules, order.settings, stored)
        with (order.out / LOG).open("ab") as log:
            pool = Pool(order.settings, log, interrupts.wake)
            try:
                for _ in range(min(order.jobs, sum(not cell.study.timing for cell in plan.missing))):
                    pool.start()
                view.planned(plan, order.out, order.jobs)
                return _Going(order, plan, folder, pool, view).until_done(interrupts)
            finally:
                pool.stop()
                if os.fstat(log.fileno()).st_size == 0:
                    (order.out / LOG).unlink()


def _cell_of(line: Line) -> CellId:
    return (line.measurement.study, line.measurement.arm, line.measurement.seed)


class _Going:
    """The state of a run between its first and its last measurement."""

    def __init__(self, order: Order, plan: Plan, folder: Folder, pool: Pool, view: View) -> None:
        self._order, self._plan, self._folder, self._view = order, plan, folder, view
        self._pool = pool
        self._measured: dict[CellId, Measurement] = {}
        self._errors: dict[str, str] = {}
        self._verdicts: list[Judged] = []
        self._shared = deque(cell for cell in plan.missing if not cell.study.timing)
        self._timing = deque(cell for cell in plan.missing if cell.study.timing)
        self._pace = Pace(plan, order.jobs)
        self._report = Rendering(pool, folder.path, view.notice, order.language)
        self._restore()

    def until_done(self, interrupts: Interrupts) -> Result:
        """Work until nothing is left or somebody interrupts."""
        for claim in (*self._plan.untestable, *self._plan.full_only):
            self._announce(claim)
        for step in self._plan.steps:
            self._judge(step)
        while not interrupts.asked and self._busy():
            self._dispatch()
            for worker, cell, reply in self._pool.wait(_TICK):
                if worker is self._report.worker:
                    self._report.answered(reply)
                elif cell is not None:
                    self._take(cell, reply)
            self._view.tick(self._pace.progress(self._running()))
        return Result(tuple(self._verdicts), interrupts.asked)

    def _restore(self) -> None:
        """Take the valid lines of an earlier run; the last line of a cell counts, so a valid older one is repeated."""
        lines = self._folder.lines.parsed.lines
        last = {_cell_of(line): line.key for line in lines}
        valid = {(cell.id, cell.key) for step in self._plan.steps for cell in step.cells}
        for line in lines:
            cell = _cell_of(line)
            if (cell, line.key) in valid:
                self._measured[cell] = line.measurement
                if last[cell] != line.key:
                    self._folder.lines.append(line)
                    last[cell] = line.key

    def _busy(self) -> bool:
        return bool(self._shared or self._timing or self._running() or self._report.unfinished)

    def _running(self) -> tuple[str, ...]:
        cells = [worker.task for worker in self._pool.workers if worker.task is not None]
        return tuple(f"{cell.study.id} {cell.arm.name} seed {cell.seed}" for cell in cells)

    def _dispatch(self) -> None:
        measuring = [w for w in self._pool.workers if not w.timing and w is not self._report.worker]
        if self._shared and not measuring:  # all of them died
            measuring = [self._pool.start()]
        for worker in measuring:
            if worker.task is None and self._shared:
                self._give(worker, self._shared.popleft())
        if self._shared or self._running():
            if not any(worker.timing for worker in self._pool.workers):
                self._report.render_if_due()
        elif self._timing:
            if not self._report.busy:
                self._give(self._timing_worker(), self._timing.popleft())
        else:
            self._report.render_if_due(last=True)

    def _timing_worker(self) -> Worker:
        return next((w for w in self._pool.workers if w.timing), None) or self._pool.start(timing=True)

    def _give(self, worker: Worker, cell: Cell) -> None:
        what = {"module": cell.module, "study": cell.study.id, "arm": cell.arm.name, "seed": cell.seed}
        worker.give(cell, what | {"folder": str(self._folder.path)})

    def _take(self, cell: Cell, reply: Reply) -> None:
        """Keep a measurement, or give up the study whose measurement raised."""
        step = next(step for step in self._plan.steps if step.study.id == cell.study.id)
        if "error" in reply:
            self._give_up(step, cell, str(reply["error"]))
            return
        measurement = Measurement(*cell.id, values=reply["values"], seconds=reply["seconds"])
        self._folder.lines.append(Line(cell.key, measurement))
        self._measured[cell.id] = measurement
        self._pace.made(cell, measurement.seconds)
        self._judge(step)

    def _give_up(self, step: Step, cell: Cell, error: str) -> None:
        if step.claims[0].id in self._errors:
            return
        dropped = [c for c in (*self._shared, *self._timing) if c.study.id == step.study.id]
        self._pace.drop([cell, *dropped])
        self._shared = deque(c for c in self._shared if c.study.id != step.study.id)
        self._timing = deque(c for c in self._timing if c.study.id != step.study.id)
        for claim in step.claims:
            self._errors[claim.id] = f"{cell.arm.name}, seed {cell.seed}: {error}"
            self._announce(claim)

    def _judge(self, step: Step) -> None:
        """Judge the claims of a step if its last measurement is in."""
        if all(cell.id in self._measured for cell in step.cells):
            for claim in step.claims:
                self._announce(claim)

    def _announce(self, claim: Entry) -> None:
        run = Run(
            self._folder.path,
            self._order.settings,
            self._folder.environment,
            tuple(self._measured.values()),
            errors=self._errors,
        )
        judged = judge_claim(claim, run)
        self._verdicts.append(judged)
        self._folder.write_verdicts([to_json(entry) for entry in self._verdicts])
        self._view.judged(judged)
        self._report.due = True
