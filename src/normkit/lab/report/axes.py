"""Where ticks stand and what they say, decided by us so that margins are known before anything is drawn."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

from normkit.lab.figures import Panel
from normkit.lab.numbers import number, superscript
from normkit.lab.report.numbers import ticks
from normkit.lab.report.text import lines, width

SLANT = 35.0  # degrees


def limits(axes: Any, panel: Panel) -> None:
    """Leave a little air around the data; bars stand on zero; words on the x axis get equal room."""
    bars = any(s.kind == "bars" for s in panel.series)
    axes.margins(x=0.04, y=0.07)
    axes.autoscale_view()
    if bars and panel.y_scale == "linear":
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low) if low < 0 else 0.0, max(0.0, high) if high <= 0 else high)
    if panel.x_names:
        axes.set_xlim(-0.6, len(panel.x_names) - 0.4)


def ticks_of(axes: Any, panel: Panel, which: Literal["x", "y"]) -> tuple[list[float], list[str]]:
    """Return tick positions within the limits, with their labels."""
    if which == "x" and panel.x_names:
        return [float(i) for i in range(len(panel.x_names))], list(panel.x_names)
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    scale = panel.x_scale if which == "x" else panel.y_scale
    if which == "x":
        own = _own(panel, low, high)
        if own:
            return own, [number(v, 3) for v in own]
    if scale == "log":
        at = _decades(low, high)
        return at, [number(v, 3) for v in at] if low >= 1e-3 and high < 1e6 else [_power(v) for v in at]
    axis = axes.xaxis if which == "x" else axes.yaxis
    slack = (high - low) * 1e-9
    at = [float(v) for v in axis.get_major_locator().tick_values(low, high) if low - slack <= v <= high + slack]
    at = at[:: max(1, math.ceil(len(at) / (7 if which == "x" else 8)))]
    return at, ticks(at)


def _own(panel: Panel, low: float, high: float) -> list[float]:
    """Return the measured x values where they are few and far enough apart to be the ticks."""
    values = sorted({float(x) for s in panel.series if s.kind != "reference" for x in s.x if low <= x <= high})
    if not 2 <= len(values) <= 8:
        return values if len(values) == 1 else []

    def place(v: float) -> float:
        return (math.log(v / low) / math.log(high / low)) if panel.x_scale == "log" else (v - low) / (high - low)

    places = [place(v) for v in values]
    near = min(b - a for a, b in pairwise(places))
    longest = max(len(number(v, 3)) for v in values)
    return values if near > 0.026 * (longest + 1) else []


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**e for e in range(first, last + 1) if low <= 10.0**e <= high]
    if len(decades) >= 3:
        return decades[:: max(1, math.ceil(len(decades) / 6))]
    for steps in ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        at = [m * 10.0**e for e in range(first, last + 1) for m in steps if low <= m * 10.0**e <= high]
        if len(at) >= 3:
            return at
    return [low, math.sqrt(low * high), high]


def _power(value: float) -> str:
    exponent = round(math.log10(value))
    exact = abs(value / 10.0**exponent - 1) < 1e-9
    return f"10{superscript(exponent)}" if exact and abs(exponent) > 1 else number(value, 3)


def labels_of(panel: Panel, labels: list[str], room: float, size: float) -> tuple[list[str], float, float]:
    """Fit the words of an x axis into their places: broken at spaces, or slanted where a word is too wide.

    Returns the labels, the angle in degrees, and the height they need beyond one line.
    """
    if not panel.x_names:
        return labels, 0.0, 0.0
    if all(width(word, size) <= room - 5 for label in labels for word in label.split()):
        broken = [lines(label, room - 5, size) for label in labels]
        return ["\n".join(text) for text in broken], 0.0, 14.0 * (max(map(len, broken)) - 1)
    longest = max(width(label, size) for label in labels)
    return labels, SLANT, longest * math.sin(math.radians(SLANT)) - 4
