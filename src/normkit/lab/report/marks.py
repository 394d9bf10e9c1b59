"""How a series looks on its axes: colour, marker, dash and hatch, and where its marks stand so that none is hidden.

Series differ in more than colour. On an axis of words, points of several series stand side by side; on an axis of
numbers, where they may not move, later ones are smaller, so that equal ones show as rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

from normkit.lab.figures import Panel, Series
from normkit.lab.report.palette import SERIES

MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
THEORY: tuple[Any, ...] = ((0, (4, 3)), (0, (1.2, 1.8)), (0, (7, 2, 1.2, 2)))
HATCHES = ("", "///", "---", "\\\\\\", "|||", "xx", "++", "/")
POINT, RING, LEAST = 7.0, 1.2, 5.0  # sizes of points: alone, by how much a later one is smaller, and the smallest
APART = 0.22  # of the way from one word to the next: between the points of two series

Ink: TypeAlias = Callable[[str], str]  # what a colour of the palette is drawn with


def ink_of(number: int, ink: Ink) -> str:
    """Return the colour of series ``number``."""
    return ink(f"series-{number % SERIES}")


def marker_of(number: int) -> str:
    """Return the marker of series ``number``."""
    return MARKERS[number % len(MARKERS)]


def theory_dash(panel: Panel, number: int) -> Any:
    """Return the dash of a theory line: thin, and another one for each of a panel."""
    earlier = sum(s.kind == "reference" for s in panel.series[:number])
    return THEORY[earlier % len(THEORY)]


def drawable(panel: Panel, series: Series) -> list[int]:
    """Return the indices of the marks of ``series`` that have a place on these axes."""

    def fits(value: float, scale: str) -> bool:
        return math.isfinite(value) and (scale == "linear" or value > 0)

    pairs = enumerate(zip(series.x, series.y, strict=True))
    return [i for i, (x, y) in pairs if fits(x, panel.x_scale) and fits(y, panel.y_scale)]


def last_mark(panel: Panel, number: int) -> tuple[float, float]:
    """Return where the rightmost mark of series ``number`` is drawn."""
    series = panel.series[number]
    last = max(drawable(panel, series), key=lambda i: series.x[i])
    return series.x[last] + _aside(panel, number), series.y[last]


def draw_marks(axes: Any, panel: Panel, number: int, ink: Ink) -> None:
    """Draw series ``number`` of ``panel``."""
    series = panel.series[number]
    keep = drawable(panel, series)
    x, y = [series.x[i] + _aside(panel, number) for i in keep], [series.y[i] for i in keep]
    colour = ink_of(number, ink)
    banded = len(series.low) == len(series.y) == len(series.high)
    low = [_edge(panel, series.low[i], series.y[i]) for i in keep] if banded else []
    high = [_edge(panel, series.high[i], series.y[i]) for i in keep] if banded else []
    if series.kind == "reference":
        axes.plot(x, y, color=ink("ink"), linestyle=theory_dash(panel, number), linewidth=1.0, zorder=4)
        return
    if series.kind == "bars":
        _bars(axes, panel, number, (x, y, low, high), ink)
        return
    points = series.kind == "points"
    if banded and not points:
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=1.5)
    elif banded and keep:
        axes.vlines(x, low, high, color=colour, linewidth=1.2, zorder=2.5)
    every = max(1, len(x) // 12)  # markers tell lines apart; on long curves a dozen do
    dash = DASHES[(number + number // SERIES) % len(DASHES)]
    axes.plot(
        x, y, color=colour, marker=marker_of(number), linestyle="none" if points else dash,
        linewidth=1.7, markersize=_size(panel, number) if points else 5.2,
        markeredgecolor=ink("page"), markeredgewidth=0.7,
        markevery=1 if points else (number % every, every), zorder=3,
    )  # fmt: skip


def _points(panel: Panel) -> list[int]:
    return [i for i, s in enumerate(panel.series) if s.kind == "points"]


def _aside(panel: Panel, number: int) -> float:
    """Return how far beside its word a point stands, so that equal values of several series are all seen."""
    points = _points(panel)
    if not panel.x_names or number not in points:
        return 0.0
    return (points.index(number) - (len(points) - 1) / 2) * min(APART, 0.66 / len(points))


def _size(panel: Panel, number: int) -> float:
    place = 0 if panel.x_names else _points(panel).index(number)
    return max(LEAST, POINT + RING * (len(_points(panel)) > 1 and not panel.x_names) - RING * place)


def _edge(panel: Panel, value: float, fallback: float) -> float:
    fits = math.isfinite(value) and (panel.y_scale == "linear" or value > 0)
    return value if fits else fallback


def _bars(axes: Any, panel: Panel, number: int, data: tuple[list[float], ...], ink: Ink) -> None:
    x, y, low, high = data
    grouped = [i for i, s in enumerate(panel.series) if s.kind == "bars"]
    every = [v for i in grouped for v in panel.series[i].x]
    xs = sorted(set(every))
    step = min((b - a for a, b in pairwise(xs)), default=1.0)
    side_by_side = len(xs) < len(every)  # where each place has one bar, that bar stands in its middle
    each = 0.72 * step / (len(grouped) if side_by_side else 1)
    aside = (grouped.index(number) - (len(grouped) - 1) / 2) * each if side_by_side else 0.0
    centres = [v + aside for v in x]
    colour = ink_of(number, ink)
    hatch = HATCHES[grouped.index(number) % len(HATCHES)]
    axes.bar(
        centres, y, each * 0.92, facecolor=colour if not hatch else ink("page"), edgecolor=colour,
        hatch=hatch, linewidth=1.1, zorder=2,
    )  # fmt: skip
    if low and y:
        axes.vlines(centres, low, high, color=ink("ink"), linewidth=1.2, zorder=3)
