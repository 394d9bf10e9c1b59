"""A run as it is watched on stderr: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from normkit.lab.language import Words
from normkit.lab.runs.judged import Judged
from normkit.lab.runs.pace import Progress
from normkit.lab.runs.plan import Plan
from normkit.lab.terminal.tables import plan_line, plan_table, seconds, told, verdict

_HEARTBEAT = 10.0  # seconds of silence on a pipe after which somebody would wonder
_STYLES = {
    "holds": "bold green",
    "holds with a correction": "bold yellow",
    "fails": "bold red",
    "could not run": "bold red reverse",
}


class LineView:
    """Plain lines: the plan, a line a verdict, a line every ten seconds in between."""

    def __init__(self, write: Callable[[str], object], words: Words | None = None) -> None:
        self._write, self._words = write, words or Words()
        self._last = time.monotonic()

    def planned(self, plan: Plan, out: Path, jobs: int) -> None:
        """Print the plan."""
        for line in [*plan_table(plan), plan_line(plan, jobs), f"run folder: {out}"]:
            self._say(line)

    def notice(self, text: str) -> None:
        """Print a notice."""
        self._say(f"note: {text}")

    def judged(self, judged: Judged) -> None:
        """Print a verdict."""
        words, title = self._words, self._words.said(judged.claim).title
        self._say(f"{judged.claim.id}: {words(verdict(judged))}. {title}: {told(judged, words)}")

    def tick(self, progress: Progress) -> None:
        """Print how far it is, if nothing was printed for a while."""
        if time.monotonic() - self._last >= _HEARTBEAT:
            self._say(f"{position(progress)}{', now ' + '; '.join(progress.running) if progress.running else ''}")

    def close(self) -> None:
        """Nothing to take down."""

    def _say(self, line: str) -> None:
        self._write(line)
        self._last = time.monotonic()


class BarView:
    """A live bar with the verdicts above it. Colours follow NO_COLOR."""

    def __init__(self, console: Console, words: Words | None = None) -> None:
        self._console, self._words = console, words or Words()
        self._bar = Bar(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(),
            TextColumn("{task.fields[where]}", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._task = self._bar.add_task("measuring", total=None, where="")

    def planned(self, plan: Plan, out: Path, jobs: int) -> None:
        """Print the plan and put up the bar."""
        for line in [*plan_table(plan), plan_line(plan, jobs), f"run folder: {out}"]:
            self._console.print(Text(line), soft_wrap=True)
        self._bar.update(self._task, total=len(plan.missing))
        self._bar.start()

    def notice(self, text: str) -> None:
        """Print a notice above the bar."""
        self._console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def judged(self, judged: Judged) -> None:
        """Print a verdict above the bar."""
        word = verdict(judged)
        line = Text.assemble(
            (f"{judged.claim.id:<4} ", "bold"),
            (self._words(word), _STYLES.get(word, "bold")),
            f"  {self._words.said(judged.claim).title}: {told(judged, self._words)}",
        )
        self._console.print(line, soft_wrap=True)

    def tick(self, progress: Progress) -> None:
        """Move the bar."""
        what = progress.running[0] if progress.running else "report"
        self._bar.update(
            self._task, completed=progress.done, total=progress.cells, description=what, where=position(progress)
        )

    def close(self) -> None:
        """Take the bar down."""
        self._bar.stop()


def position(progress: Progress) -> str:
    """Return how far a run is, with its ETA."""
    left = f", about {seconds(progress.left)} left" if progress.left else ""
    return f"{progress.done}/{progress.cells} measured after {seconds(progress.elapsed)}{left}"
