"""The report: one HTML file, a pure function of a run folder. The same folder gives the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

from normkit.lab.claims import catalogue
from normkit.lab.grid.verdicts import claims as grid_claims
from normkit.lab.runs.judged import judge_claim, read_run

REPORT = "report.html"


def render(run_dir: Path) -> str:
    """Return the report of a run folder, finished or not, as one self-contained HTML text.

    Claims whose measurements are not all there appear as waiting.

    Raises:
        RunError: when the folder or its settings cannot be read.
        ModuleNotFoundError: matplotlib or jinja2 is missing; the message names the extra to install.
    """
    try:
        from normkit.lab.report.grid_page import grid_page
        from normkit.lab.report.page import page

        run = read_run(run_dir)
        if run.settings.grid:
            return grid_page(run, [judge_claim(claim, run) for claim in grid_claims(run.settings)])
        return page(run, [judge_claim(claim, run) for claim in catalogue()])
    except ModuleNotFoundError as error:
        if error.name not in {"matplotlib", "jinja2"}:
            raise
        raise ModuleNotFoundError(
            f"the report needs {error.name}, which is not installed; `pip install normkit[lab]` brings it",
            name=error.name,
        ) from error


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder and return its path; a reader never sees half a file."""
    path = run_dir / REPORT
    text = render(run_dir).encode("utf-8", errors="replace")
    beside = path.with_name(f".{REPORT}.{os.getpid()}")
    try:
        beside.write_bytes(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
