"""What a rendering writes into a run folder: the page, and every figure of it as a file of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from normkit.lab.report.standalone import standalone
from normkit.lab.report.view import anchor, file_name
from normkit.lab.runs.judged import FIGURES, Judged


def figure_files(judged: Sequence[Judged]) -> dict[str, str]:
    """Return the figures of all judged claims as SVG texts by file name. A claim whose figures fail gives none."""
    found: dict[str, str] = {}
    for j in judged:
        if j.claim.study is None or j.evidence is None or j.judgement is None:
            continue
        try:
            for i, figure in enumerate(j.claim.figures(j.evidence), start=1):
                title = f"{j.claim.id}. {j.claim.title}"
                found[file_name(j.claim.id, i)] = standalone(figure, title, f"{anchor(j.claim.id)}-{i}")
        except Exception:
            continue
    return found


def write_figures(run_dir: Path, judged: Sequence[Judged]) -> None:
    """Write all figures into the run folder's own folder of figures; those of other runs' claims are removed."""
    folder, texts = run_dir / FIGURES, figure_files(judged)
    old = {path.name for path in folder.glob("*.svg")}
    for name in old - texts.keys():
        (folder / name).unlink()
    if texts:
        folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        write(folder / name, text)


def write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of either."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode("utf-8", errors="replace"))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
