"""The report kept up to date while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from normkit.lab.language import Language
from normkit.lab.runs.pool import Pool, Worker
from normkit.lab.runs.worker import Reply

_SHARE = 4  # a report that takes t seconds is made again after 4 t at the earliest: a fifth of one core


class Rendering:
    """Renders by a worker of its own, so that measuring never waits for a picture."""

    def __init__(self, pool: Pool, folder: Path, notice: Callable[[str], None], language: Language = "en") -> None:
        self.due = False
        self.worker: Worker | None = None
        self.busy = False
        self._pool, self._folder, self._notice, self._language = pool, folder, notice, language
        self._began = self._next = 0.0
        self._said: set[str] = set()

    @property
    def unfinished(self) -> bool:
        """Whether a rendering is going on or still due."""
        return self.due or self.busy

    def render_if_due(self, last: bool = False) -> None:
        """Start a rendering if there is something new and the last one was long enough ago."""
        if self.busy or not self.due or (time.monotonic() < self._next and not last):
            return
        if self.worker is None or self.worker not in self._pool.workers:
            self.worker = self._pool.start()
        self.due, self.busy, self._began = False, True, time.monotonic()
        self.worker.give(None, {"report": str(self._folder), "language": self._language})

    def answered(self, reply: Reply) -> None:
        """Take note of a rendering's end; one that failed is said once and harms nothing else."""
        now = time.monotonic()
        self.busy, self._next = False, now + _SHARE * (now - self._began)
        if "error" in reply and reply["error"] not in self._said:
            self._said.add(reply["error"])
            hint = ""
            if reply["kind"] == "ModuleNotFoundError":
                hint = "; `pip install 'normkit[lab]'` brings what it needs"
            self._notice(f"no report: {reply['error']}{hint}. Measurements and verdicts are kept")
