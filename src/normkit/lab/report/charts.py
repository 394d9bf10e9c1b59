"""One panel of a chart, drawn by matplotlib into an SVG that serves light, dark, print and the colour-blind.

Series differ by colour, by marker and by dash; each is labelled beside its last mark. The panel is drawn at the
size it is shown at, so text stays as large as it was set.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from normkit.lab.figures import Panel, Series
from normkit.lab.report.axes import labels_of, limits, reach, ticks_of
from normkit.lab.report.inline import inline
from normkit.lab.report.labels import spread
from normkit.lab.report.marks import HATCHES, Ink, draw_marks, drawable, ink_of, last_mark, marker_of, theory_dash
from normkit.lab.report.palette import sentinel
from normkit.lab.report.text import lines, width

WIDTH = 420.0
HEIGHT = 296.0
TOP = 34.0  # room for the y label, which reads horizontally above its axis
BOTTOM = 46.0
SIZE = 12.0
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)  # rules for `*`, which would reach the whole page

_cache: dict[str, str] = {}


def panel_svg(panel: Panel, *, prefix: str, description: str) -> str:
    """Return ``panel`` as an inline SVG element, from the cache where the same was drawn before."""
    key = hashlib.sha256(f"{prefix}\x1f{description}\x1f{panel!r}".encode(errors="replace")).hexdigest()
    if key not in _cache:
        _cache[key] = inline(_draw(panel), prefix=prefix, title=panel.title, description=description, css_class="chart")
    return _cache[key]


def left_out(panel: Panel) -> int:
    """Count the marks that cannot be drawn: not finite, or not positive on a logarithmic axis."""
    return sum(len(s.y) - len(drawable(panel, s)) for s in panel.series)


def _draw(panel: Panel) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    with drawn(panel, sentinel) as figure:
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"), None))
    return _STYLE.sub("", out.getvalue())


@contextmanager
def drawn(panel: Panel, ink: Ink) -> Generator[Any]:
    """Yield a matplotlib figure that holds ``panel``, at 72 dots an inch, under the settings it has to be saved in."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "normkit",
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "path.simplify": False,
        "font.size": SIZE,
        "hatch.linewidth": 1.0,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's own font lacks: the reader's browser has others
        column = _labels_column(panel)
        height = max(HEIGHT, TOP + BOTTOM + sum(h for _, h in column))
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, frameon=False)
        _fill(figure, panel, height, column, ink)
        yield figure


def _ends(panel: Panel) -> list[tuple[int, Series]]:
    """Return the series that are labelled at their last mark, with their numbers."""
    return [(i, s) for i, s in enumerate(panel.series) if s.kind != "bars" and s.label and drawable(panel, s)]


def _labels_column(panel: Panel) -> list[tuple[list[str], float]]:
    texts = [lines(s.label, 116.0, SIZE - 0.5) for _, s in _ends(panel)]
    return [(text, 13.5 * len(text) + 3.0) for text in texts]


def _fill(figure: Any, panel: Panel, height: float, column: Sequence[tuple[list[str], float]], ink: Ink) -> None:
    axes = figure.add_axes((0.2, 0.2, 0.6, 0.6), facecolor="none")
    axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    for number in range(len(panel.series)):
        draw_marks(axes, panel, number, ink)
    limits(axes, panel)
    y_at, y_labels = ticks_of(axes, panel, "y")
    left = 14.0 + max((width(t, SIZE) for t in y_labels), default=20.0)
    right = 14.0
    if column:
        right = 30.0 + max(width(t, SIZE - 0.5) for text, _ in column for t in text)
    room = WIDTH - left - right
    x_at, x_labels = ticks_of(axes, panel, "x", room, SIZE)
    x_labels, angle, low = labels_of(panel, x_labels, room / max(1, len(x_labels)), SIZE)
    if angle:
        left = max(left, 6.0 + reach(x_labels, angle, room, SIZE))
    key = _key_height(panel, WIDTH - left)
    bottom, top = BOTTOM + low, TOP + key
    axes.set_position((left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - bottom - top) / height))
    axes.set_xticks(x_at, labels=x_labels)
    if angle:
        axes.tick_params(axis="x", labelrotation=angle)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor", va="center")
    axes.set_yticks(y_at, labels=y_labels)
    _frame(figure, axes, panel, height, ink)
    if not any(drawable(panel, s) for s in panel.series):
        axes.text(0.5, 0.5, "no finite value to draw", transform=axes.transAxes, ha="center", color=ink("muted"))
    if column:
        _label_ends(figure, axes, panel, column, (bottom, height - top), ink)
    if key:
        _key(figure, panel, left, height - TOP, ink)


def _frame(figure: Any, axes: Any, panel: Panel, height: float, ink: Ink) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=ink("axis"), linewidth=0.9)
    axes.minorticks_off()
    axes.tick_params(length=3.5, width=0.9, color=ink("axis"), labelcolor=ink("muted"), pad=4)
    axes.grid(axis="y", color=ink("grid"), linewidth=0.9, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel(panel.x_label, color=ink("ink"), fontsize=SIZE, labelpad=5)
    figure.text(3 / WIDTH, 1 - 5 / height, panel.y_label, color=ink("ink"), fontsize=SIZE, va="top")


def _label_ends(
    figure: Any,
    axes: Any,
    panel: Panel,
    column: Sequence[tuple[list[str], float]],
    room: tuple[float, float],
    ink: Ink,
) -> None:
    """Write each label in the right margin, level with its last mark or joined to it by a thin line."""
    from matplotlib.lines import Line2D

    ends = _ends(panel)
    marks = [axes.transData.transform(last_mark(panel, number)) for number, _ in ends]
    centres = spread([float(m[1]) for m in marks], [h for _, h in column], *room)
    edge = float(axes.get_window_extent().x1)
    for (number, series), mark, (text, _), y in zip(ends, marks, column, centres, strict=True):
        theory = series.kind == "reference"
        colour = ink("muted") if theory else ink_of(number, ink)
        plain: dict[str, Any] = {"transform": _points(figure), "figure": figure}
        if abs(y - mark[1]) > 2 or edge - mark[0] > 12:
            figure.add_artist(Line2D([mark[0], edge + 8], [mark[1], y], color=colour, lw=0.7, alpha=0.65, **plain))
        if not theory:
            dot = {"marker": marker_of(number), "markersize": 5.2, "color": colour, "markeredgewidth": 0}
            figure.add_artist(Line2D([edge + 14], [y], linestyle="none", **dot, **plain))
        else:
            figure.add_artist(
                Line2D([edge + 9, edge + 19], [y, y], color=colour, lw=1.1, ls=theory_dash(panel, number), **plain)
            )
        for i, line in enumerate(text):
            level = y + ((len(text) - 1) / 2 - i) * 13.5
            figure.text(
                edge + 23, level - 4, line, transform=_points(figure), color=colour, fontsize=SIZE - 0.5,
                fontstyle="italic" if theory else "normal", va="baseline",
            )  # fmt: skip


def _points(figure: Any) -> Any:
    """Return the transform from points, counted from the lower left corner, whatever the resolution."""
    from matplotlib.transforms import Affine2D

    return Affine2D().scale(1 / 72) + figure.dpi_scale_trans


def _key_rows(panel: Panel, room: float) -> list[list[tuple[int, str]]]:
    """Lay the names of bar series out in rows above the plot."""
    rows: list[list[tuple[int, str]]] = [[]]
    used = 0.0
    for number, series in enumerate(s for s in panel.series if s.kind == "bars"):
        if series.label:
            need = width(series.label, SIZE - 0.5) + 34
            if used + need > room and rows[-1]:
                rows.append([])
                used = 0.0
            rows[-1].append((number, series.label))
            used += need
    return rows if rows[0] else []


def _key_height(panel: Panel, room: float) -> float:
    return 18.0 * len(_key_rows(panel, room))


def _key(figure: Any, panel: Panel, left: float, top: float, ink: Ink) -> None:
    from matplotlib.patches import Rectangle

    bars = [i for i, s in enumerate(panel.series) if s.kind == "bars"]
    for row, names in enumerate(_key_rows(panel, WIDTH - left)):
        x, y = left, top - 18.0 * row - 11
        for place, label in names:
            colour, hatch = ink_of(bars[place], ink), HATCHES[place % len(HATCHES)]
            figure.add_artist(
                Rectangle(
                    (x, y),
                    15,
                    10,
                    facecolor=ink("page") if hatch else colour,
                    edgecolor=colour,
                    hatch=hatch,
                    linewidth=1,
                    transform=_points(figure),
                    figure=figure,
                )
            )
            figure.text(x + 20, y + 1, label, transform=_points(figure), color=colour, fontsize=SIZE - 0.5)
            x += width(label, SIZE - 0.5) + 34
