"""One panel of a chart, drawn by matplotlib into an SVG that serves light, dark, print and the colour-blind.

Series differ by colour, by marker and by dash; each is labelled beside its last mark. The panel is drawn at the
size it is shown at, so text stays as large as it was set.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from normkit.lab.figures import Panel, Series
from normkit.lab.report.axes import labels_of, limits, ticks_of
from normkit.lab.report.inline import inline
from normkit.lab.report.labels import spread
from normkit.lab.report.palette import SERIES, sentinel
from normkit.lab.report.text import lines, width

WIDTH = 420.0
HEIGHT = 296.0
TOP = 34.0  # room for the y label, which reads horizontally above its axis
BOTTOM = 46.0
SIZE = 12.0
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
THEORY: tuple[Any, ...] = ((0, (4, 3)), (0, (1.2, 1.8)), (0, (7, 2, 1.2, 2)))
HATCHES = ("", "///", "---", "\\\\\\", "|||", "xx", "++", "/")

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


def drawable(panel: Panel, series: Series) -> list[int]:
    """Return the indices of the marks of ``series`` that have a place on these axes."""

    def fits(value: float, scale: str) -> bool:
        return math.isfinite(value) and (scale == "linear" or value > 0)

    pairs = enumerate(zip(series.x, series.y, strict=True))
    return [i for i, (x, y) in pairs if fits(x, panel.x_scale) and fits(y, panel.y_scale)]


def _draw(panel: Panel) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
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
    out = io.StringIO()
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's own font lacks: the reader's browser has others
        column = _labels_column(panel)
        height = max(HEIGHT, TOP + BOTTOM + sum(h for _, h in column))
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, frameon=False)
        _fill(figure, panel, height, column)
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"), None))
    return _STYLE.sub("", out.getvalue())


def _ends(panel: Panel) -> list[tuple[int, Series]]:
    """Return the series that are labelled at their last mark, with their numbers."""
    return [(i, s) for i, s in enumerate(panel.series) if s.kind != "bars" and s.label and drawable(panel, s)]


def _labels_column(panel: Panel) -> list[tuple[list[str], float]]:
    texts = [lines(s.label, 116.0, SIZE - 0.5) for _, s in _ends(panel)]
    return [(text, 13.5 * len(text) + 3.0) for text in texts]


def _fill(figure: Any, panel: Panel, height: float, column: Sequence[tuple[list[str], float]]) -> None:
    axes = figure.add_axes((0.2, 0.2, 0.6, 0.6), facecolor="none")
    axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    for number, series in enumerate(panel.series):
        _marks(axes, panel, series, number)
    limits(axes, panel)
    (x_at, x_labels), (y_at, y_labels) = ticks_of(axes, panel, "x"), ticks_of(axes, panel, "y")
    left = 14.0 + max((width(t, SIZE) for t in y_labels), default=20.0)
    right = 14.0
    if column:
        right = 30.0 + max(width(t, SIZE - 0.5) for text, _ in column for t in text)
    x_labels, angle, low = labels_of(panel, x_labels, (WIDTH - left - right) / max(1, len(x_labels)), SIZE)
    key = _key_height(panel, WIDTH - left)
    bottom, top = BOTTOM + low, TOP + key
    axes.set_position((left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - bottom - top) / height))
    axes.set_xticks(x_at, labels=x_labels)
    if angle:
        axes.tick_params(axis="x", labelrotation=angle)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor", va="center")
    axes.set_yticks(y_at, labels=y_labels)
    _frame(figure, axes, panel, height)
    if not any(drawable(panel, s) for s in panel.series):
        axes.text(0.5, 0.5, "no finite value to draw", transform=axes.transAxes, ha="center", color=sentinel("muted"))
    if column:
        _label_ends(figure, axes, panel, column, (bottom, height - top))
    if key:
        _key(figure, panel, left, height - TOP)


def _look(number: int) -> dict[str, Any]:
    return {
        "color": sentinel(f"series-{number % SERIES}"),
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[(number + number // SERIES) % len(DASHES)],
    }


def _marks(axes: Any, panel: Panel, series: Series, number: int) -> None:
    keep = drawable(panel, series)
    x, y = [series.x[i] for i in keep], [series.y[i] for i in keep]
    look = _look(number)
    banded = len(series.low) == len(series.y) == len(series.high)
    low = [_edge(panel, series.low[i], series.y[i]) for i in keep] if banded else []
    high = [_edge(panel, series.high[i], series.y[i]) for i in keep] if banded else []
    if series.kind == "reference":
        axes.plot(x, y, color=sentinel("ink"), linestyle=_theory(panel, number), linewidth=1.0, zorder=4)
    elif series.kind == "bars":
        _bars(axes, panel, number, (x, y, low, high))
    else:
        if banded and series.kind == "line":
            axes.fill_between(x, low, high, color=look["color"], alpha=0.16, linewidth=0, zorder=1.5)
        elif banded and keep:
            axes.vlines(x, low, high, color=look["color"], linewidth=1.2, zorder=2.5)
        every = max(1, len(x) // 12)  # markers tell lines apart; on long curves a dozen do
        axes.plot(
            x, y, **look | ({"linestyle": "none"} if series.kind == "points" else {}),
            linewidth=1.7, markersize=7.0 if series.kind == "points" else 5.2,
            markeredgecolor=sentinel("page"), markeredgewidth=0.7,
            markevery=1 if series.kind == "points" else (number % every, every), zorder=3,
        )  # fmt: skip


def _theory(panel: Panel, number: int) -> Any:
    """Return the dash of a theory line: thin, and another one for each of a panel."""
    earlier = sum(s.kind == "reference" for s in panel.series[:number])
    return THEORY[earlier % len(THEORY)]


def _edge(panel: Panel, value: float, fallback: float) -> float:
    fits = math.isfinite(value) and (panel.y_scale == "linear" or value > 0)
    return value if fits else fallback


def _bars(axes: Any, panel: Panel, number: int, data: tuple[list[float], ...]) -> None:
    x, y, low, high = data
    grouped = [i for i, s in enumerate(panel.series) if s.kind == "bars"]
    xs = sorted({v for i in grouped for v in panel.series[i].x})
    step = min((b - a for a, b in pairwise(xs)), default=1.0)
    each = 0.72 * step / len(grouped)
    centres = [v + (grouped.index(number) - (len(grouped) - 1) / 2) * each for v in x]
    colour = sentinel(f"series-{number % SERIES}")
    hatch = HATCHES[grouped.index(number) % len(HATCHES)]
    axes.bar(
        centres, y, each * 0.92, facecolor=colour if not hatch else sentinel("page"), edgecolor=colour,
        hatch=hatch, linewidth=1.1, zorder=2,
    )  # fmt: skip
    if low and y:
        axes.vlines(centres, low, high, color=sentinel("ink"), linewidth=1.2, zorder=3)


def _frame(figure: Any, axes: Any, panel: Panel, height: float) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=sentinel("axis"), linewidth=0.9)
    axes.minorticks_off()
    axes.tick_params(length=3.5, width=0.9, color=sentinel("axis"), labelcolor=sentinel("muted"), pad=4)
    axes.grid(axis="y", color=sentinel("grid"), linewidth=0.9, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel(panel.x_label, color=sentinel("ink"), fontsize=SIZE, labelpad=5)
    figure.text(3 / WIDTH, 1 - 5 / height, panel.y_label, color=sentinel("ink"), fontsize=SIZE, va="top")


def _label_ends(
    figure: Any,
    axes: Any,
    panel: Panel,
    column: Sequence[tuple[list[str], float]],
    room: tuple[float, float],
) -> None:
    """Write each label in the right margin, level with its last mark or joined to it by a thin line."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import IdentityTransform

    ends = _ends(panel)
    marks = [axes.transData.transform((s.x[i], s.y[i])) for _, s in ends for i in [_last(panel, s)]]
    centres = spread([float(m[1]) for m in marks], [h for _, h in column], *room)
    edge = float(axes.get_window_extent().x1)
    for (number, series), mark, (text, _), y in zip(ends, marks, column, centres, strict=True):
        theory = series.kind == "reference"
        colour = sentinel("muted") if theory else sentinel(f"series-{number % SERIES}")
        plain: dict[str, Any] = {"transform": IdentityTransform(), "figure": figure}
        if abs(y - mark[1]) > 2 or edge - mark[0] > 12:
            figure.add_artist(Line2D([mark[0], edge + 8], [mark[1], y], color=colour, lw=0.7, alpha=0.65, **plain))
        if not theory:
            dot = {"marker": _look(number)["marker"], "markersize": 5.2, "color": colour, "markeredgewidth": 0}
            figure.add_artist(Line2D([edge + 14], [y], linestyle="none", **dot, **plain))
        else:
            figure.add_artist(
                Line2D([edge + 9, edge + 19], [y, y], color=colour, lw=1.1, ls=_theory(panel, number), **plain)
            )
        for i, line in enumerate(text):
            level = y + ((len(text) - 1) / 2 - i) * 13.5
            figure.text(
                edge + 23, level - 4, line, transform=IdentityTransform(), color=colour, fontsize=SIZE - 0.5,
                fontstyle="italic" if theory else "normal", va="baseline",
            )  # fmt: skip


def _last(panel: Panel, series: Series) -> int:
    return max(drawable(panel, series), key=lambda i: series.x[i])


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


def _key(figure: Any, panel: Panel, left: float, top: float) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import IdentityTransform

    bars = [i for i, s in enumerate(panel.series) if s.kind == "bars"]
    for row, names in enumerate(_key_rows(panel, WIDTH - left)):
        x, y = left, top - 18.0 * row - 11
        for place, label in names:
            colour, hatch = sentinel(f"series-{bars[place] % SERIES}"), HATCHES[place % len(HATCHES)]
            figure.add_artist(
                Rectangle(
                    (x, y),
                    15,
                    10,
                    facecolor=sentinel("page") if hatch else colour,
                    edgecolor=colour,
                    hatch=hatch,
                    linewidth=1,
                    transform=IdentityTransform(),
                    figure=figure,
                )
            )
            figure.text(x + 20, y + 1, label, transform=IdentityTransform(), color=colour, fontsize=SIZE - 0.5)
            x += width(label, SIZE - 0.5) + 34
