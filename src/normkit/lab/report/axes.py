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


def ticks_of(
    axes: Any, panel: Panel, which: Literal["x", "y"], room: float = math.inf, size: float = 0.0
) -> tuple[list[float], list[str]]:
    """Return tick positions within the limits, with their labels; in ``room`` pixels no two of them touch."""
    if which == "x" and panel.x_names:
        return [float(i) for i in range(len(panel.x_names))], list(panel.x_names)
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    scale = panel.x_scale if which == "x" else panel.y_scale

    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if scale == "log" else (value - low) / (high - low)
        return share * room

    if which == "x":
        own = _own(panel, low, high)
        if own and _apart([place(v) for v in own], [number(v, 3) for v in own], size):
            return own, [number(v, 3) for v in own]
    decades = _decades(low, high) if scale == "log" else []
    for most in range(7, 1, -1):
        at, labels = _chosen(decades, scale, low, high, most)
        if which == "y" or _apart([place(v) for v in at], labels, size):
            return at, labels
    return _chosen(decades, scale, low, high, 1)


def _chosen(decades: list[float], scale: str, low: float, high: float, most: int) -> tuple[list[float], list[str]]:
    at = decades[:: math.ceil(len(decades) / most)] if decades else _even(low, high, most)
    return at, _said(at) if scale == "log" else ticks(at)


def _even(low: float, high: float, most: int) -> list[float]:
    """Return round, evenly spaced values within the limits, at most one more than ``most``."""
    from matplotlib.ticker import MaxNLocator

    slack = (high - low) * 1e-9
    found = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(v) for v in found if low - slack <= v <= high + slack]


def _own(panel: Panel, low: float, high: float) -> list[float]:
    """Return the measured x values where they are few enough to be the ticks."""
    values = sorted({float(x) for s in panel.series if s.kind != "reference" for x in s.x if low <= x <= high})
    return values if len(values) <= 8 else []


def _apart(places: list[float], labels: list[str], size: float) -> bool:
    """Say whether labels centred on their places leave a gap of half their size between neighbours."""
    halves = [width(label, size) / 2 for label in labels]
    pairs = zip(pairwise(places), pairwise(halves), strict=True)
    return all(b - a >= p + q + size / 2 for (a, b), (p, q) in pairs)


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten, or a few steps between them; nothing where the range is too short for either."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**e for e in range(first, last + 1) if low <= 10.0**e <= high]
    if len(decades) >= 3:
        return decades[:: math.ceil(len(decades) / 6)]
    for steps in ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        at = [m * 10.0**e for e in range(first, last + 1) for m in steps if low <= m * 10.0**e <= high]
        if len(at) >= 3:
            return at
    return []


def _said(values: list[float]) -> list[str]:
    """Write the ticks of a logarithmic axis: all as decimals where that is short, otherwise all as powers of ten."""
    if all(1e-3 <= v < 1e5 for v in values):
        return [number(v, 3) for v in values]
    return [_power(v) for v in values]


def _power(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = value / 10.0**exponent
    power = f"10{superscript(exponent)}" if exponent != 1 else "10"
    if abs(mantissa - 1) < 1e-9:
        return power if exponent else "1"
    return f"{number(mantissa, 3)}×{power}" if exponent else number(mantissa, 3)


def reach(labels: list[str], angle: float, room: float, size: float) -> float:
    """Return how far slanted names, each ending under its place on the axis, reach out to the axis' left."""
    across, n = math.cos(math.radians(angle)), len(labels)
    return max(width(t, size) * across - room * (i + 0.6) / (n + 0.2) for i, t in enumerate(labels))


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
