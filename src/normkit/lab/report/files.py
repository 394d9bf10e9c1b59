"""What a rendering writes into a run folder: the page, and every figure of it as a file of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from normkit.lab.figures import Chart, Figure
from normkit.lab.report.picture import picture
from normkit.lab.report.standalone import standalone
from normkit.lab.report.view import anchor, file_name
from normkit.lab.runs.judged import FIGURES, Judged


def figure_files(judged: Sequence[Judged]) -> dict[str, str]:
    """Return the figures of all judged claims as SVG texts by file name. A claim whose figures fail gives none."""
    found: dict[str, str] = {}
    for j in judged:
        try:
            for i, figure in enumerate(_figures(j), start=1):
                title = f"{j.claim.id}. {j.claim.title}"
                found[file_name(j.claim.id, i)] = standalone(figure, title, f"{anchor(j.claim.id)}-{i}")
        except Exception:
            continue
    return found


def _figures(judged: Judged) -> Sequence[Figure]:
    if judged.claim.study is None or judged.evidence is None or judged.judgement is None:
        return ()
    return judged.claim.figures(judged.evidence)


def write_figures(run_dir: Path, judged: Sequence[Judged], png: bool = False) -> None:
    """Write all figures into the run folder's own folder of figures; those of other runs' claims are removed.

    With ``png`` each chart also becomes a PNG file. Without, PNG files of earlier renderings stay as long as their
    figure is the same, and go when it is not.
    """
    folder, texts = run_dir / FIGURES, figure_files(judged)
    for path in [*folder.glob("*.svg"), *folder.glob("*.png")]:
        if path.with_suffix(".svg").name not in texts:
            path.unlink()
    if texts:
        folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        if path.exists() and path.read_bytes() != _bytes(text):
            path.with_suffix(".png").unlink(missing_ok=True)
        write(path, text)
    if png:
        for name, chart in _charts(judged):
            write(folder / name, picture(chart))


def _charts(judged: Sequence[Judged]) -> Iterator[tuple[str, Chart]]:
    for j in judged:
        try:
            figures = list(_figures(j))
        except Exception:  # the page says so
            continue
        for i, figure in enumerate(figures, start=1):
            if isinstance(figure, Chart):
                yield str(Path(file_name(j.claim.id, i)).with_suffix(".png")), figure


def copy_report(page: Path, out: Path) -> Path:
    """Copy a rendered page and its folder of figures to another place, and return the page's path there.

    ``out`` is the page's new name, or a folder that is there already, where the page keeps its name. Other files beside
    it stay as they are.
    """
    target = out / page.name if out.is_dir() else out
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.resolve() == page.resolve():
        return target
    shutil.copyfile(page, target)
    figures, beside = page.parent / FIGURES, target.parent / FIGURES
    if figures.is_dir() and beside.resolve() != figures.resolve():
        beside.mkdir(exist_ok=True)
        for path in sorted([*figures.glob("*.svg"), *figures.glob("*.png")]):
            shutil.copyfile(path, beside / path.name)
    return target


def write(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of either."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(_bytes(content))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
