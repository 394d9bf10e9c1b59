"""A grid as it is watched: what the lab always shows, with each running run's step and loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from normkit.lab.grid.curves import Follower
from normkit.lab.grid.study import STUDY
from normkit.lab.runs.engine import View
from normkit.lab.runs.judged import Judged
from normkit.lab.runs.pace import Progress
from normkit.lab.runs.plan import Plan


class FollowingView:
    """Passes everything on to another view; what is running is told with the curve file's last point."""

    def __init__(self, view: View, folder: Path) -> None:
        self._view, self._follower = view, Follower(folder)

    def planned(self, plan: Plan, out: Path, jobs: int) -> None:
        """Pass on."""
        self._view.planned(plan, out, jobs)

    def notice(self, text: str) -> None:
        """Pass on."""
        self._view.notice(text)

    def judged(self, judged: Judged) -> None:
        """Pass on."""
        self._view.judged(judged)

    def tick(self, progress: Progress) -> None:
        """Pass on, with steps and losses."""
        self._follower.read()
        running = tuple(
            f"{arm} seed {seed}: step {made}/{steps}" + ("" if loss is None else f", loss {loss:.3f}")
            for (arm, seed), (made, steps, loss) in self._follower.at.items()
            if f"{STUDY.id} {arm} seed {seed}" in progress.running
        )
        self._view.tick(replace(progress, running=running or progress.running))
