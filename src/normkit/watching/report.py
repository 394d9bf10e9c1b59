"""What `watch` has seen, as a table and as a figure."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from normkit.surgery.auditing.finding import Finding
from normkit.watching.reading import Reading


def text(readings: list[Reading], flags: list[Finding], width: int, color: bool) -> str:
    """Return flags, then the newest forward's norms; ``×`` columns compare with the first forward."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=io.StringIO(), width=width, force_terminal=color, highlight=False)
    if not readings:
        return "no forward has been watched yet"
    for flag in flags:
        console.print(f"{flag.severity}, {flag.code}: {', '.join(flag.where) or 'the model'}", markup=False)
        console.print(f"  {flag.what}\n  so {flag.consequence}\n  do {flag.remedy}", markup=False)
    first, last = _of(readings, readings[0].step), _of(readings, readings[-1].step)
    before = {(r.name, r.position): r for r in first}
    table = Table(
        title=f"forward {last[0].step} ({len({r.step for r in readings})} read)", box=None, title_justify="left"
    )
    table.add_column("norm", overflow="fold")
    for column in ("place", "stream", "share", "x", "y", "|x| max", "gradient", "×", "logit"):
        table.add_column(column, justify="left" if column == "place" else "right")
    for r in last:
        was = before.get((r.name, r.position))
        grown = r.gradient / was.gradient if was is not None and was.gradient and r.gradient else None
        table.add_row(
            r.name, r.position, _number(r.stream_rms), _percent(r.share), _number(r.x_rms), _number(r.y_rms),
            _number(r.x_max), _number(r.gradient), _number(grown), _number(r.largest_logit),
        )  # fmt: skip
    console.print(table)
    console.print("stream, x, y: √mean of squares. share: what the sublayer before added, of the stream.")
    console.print("gradient: ‖∂loss/∂y‖, × against the first forward. logit: largest attention score.")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _of(readings: list[Reading], step: int) -> list[Reading]:
    return [r for r in readings if r.step == step]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


_PANELS = (
    ("stream_rms", "residual stream, √mean(s²)"),
    ("share", "sublayer's share of the stream"),
    ("gradient", "‖∂loss/∂y‖₂"),
    ("largest_logit", "largest attention logit"),
)


def draw(readings: list[Reading], path: Path) -> None:
    """Draw each number by depth: hollow circles for the first forward, filled squares for the newest."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not readings:
        raise ValueError("watch: no forward has been watched yet, there is nothing to draw")
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    for ax, (key, label) in zip(axes.flat, _PANELS, strict=True):
        for step, marks in ((readings[0].step, "o--"), (readings[-1].step, "s-")):
            values = [v for r in _of(readings, step) if (v := getattr(r, key)) is not None]
            if values and (step != readings[0].step or marks == "o--"):
                ax.plot(
                    range(1, len(values) + 1), values, marks, color="black" if marks == "s-" else "#0072b2",
                    markerfacecolor="none" if marks == "o--" else "black", label=f"forward {step}",
                )  # fmt: skip
        ax.set_xlabel("norm or attention, in the order in which they run")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylabel(label)
        if ax.lines and all(v > 0 for line in ax.lines for v in line.get_ydata()) and key != "share":
            ax.set_yscale("log")
        if ax.lines:
            ax.legend(frameon=False)
        else:
            ax.text(0.5, 0.5, "none here", ha="center", transform=ax.transAxes)
    figure.savefig(path)
