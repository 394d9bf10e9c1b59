"""The report: one HTML file and its figures, pure functions of a run folder. The same folder gives the same bytes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from normkit.lab.claims import catalogue
from normkit.lab.grid.verdicts import claims as grid_claims
from normkit.lab.language import Language, Words
from normkit.lab.runs.judged import REPORTS, Judged, Run, judge_claim, read_run


def render(run_dir: Path, language: Language = "en") -> str:
    """Return the report of a run folder, finished or not, as one self-contained HTML text.

    Claims whose measurements are not all there appear as waiting.

    Raises:
        RunError: when the folder or its settings cannot be read.
        ModuleNotFoundError: matplotlib or jinja2 is missing; the message names the extra to install.
    """
    with _libraries():
        return _text(*_judged(run_dir), language)


def write_report(run_dir: Path, language: Language = "en", png: bool = False) -> Path:
    """Write the report into the run folder, its figures beside it as SVG files, and return the page's path.

    With ``png`` the figures are PNG files, too. The page is ``report.html`` in English, ``report.zh.html`` in Chinese.
    A reader never sees half a file.
    """
    with _libraries():
        from normkit.lab.report.files import write, write_figures

        run, judged = _judged(run_dir)
        path = run_dir / REPORTS[language]
        text = _text(run, judged, language)
        write_figures(run_dir, judged, png)
        write(path, text)
        return path


def _judged(run_dir: Path) -> tuple[Run, list[Judged]]:
    run = read_run(run_dir)
    claims = grid_claims(run.settings) if run.settings.grid else catalogue()
    return run, [judge_claim(claim, run) for claim in claims]


def _text(run: Run, judged: list[Judged], language: Language) -> str:
    from normkit.lab.report.grid_page import grid_page
    from normkit.lab.report.page import page

    return grid_page(run, judged) if run.settings.grid else page(run, judged, Words(language))


@contextmanager
def _libraries() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in {"matplotlib", "jinja2"}:
            raise
        raise ModuleNotFoundError(
            f"the report needs {error.name}, which is not installed; `pip install normkit[lab]` brings it",
            name=error.name,
        ) from error
