"""Figures as data: claims say what to draw, the report decides how it looks. Nothing here draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Series:
    """One labelled set of marks.

    Args:
        label: written beside the marks, not only in a legend.
        x, y: positions.
        low, high: a band (min–max over seeds, unless the caption says otherwise).
        kind: ``"line"`` (with markers), ``"points"``, ``"bars"`` or ``"reference"`` (a thin dashed theory line).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    kind: Literal["line", "points", "bars", "reference"] = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Labels carry units; ``x_names`` replaces numbers by words on a categorical axis."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    x_names: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """One to four panels side by side, with a caption and a text that says what one would see."""

    caption: str
    alt: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Drawing:
    """A hand-made SVG (``currentColor`` and the report's CSS variables only), e.g. a wiring or a covered cube."""

    caption: str
    alt: str
    svg: str = field(repr=False)


Figure = Chart | Drawing


def band(label: str, x: Sequence[float], rows: Sequence[Sequence[float]]) -> Series:
    """Return the mean over seeds of ``rows`` (one per seed) as a line, with their min–max as its band."""
    columns = list(zip(*rows, strict=True))
    return Series(
        label,
        list(x),
        [sum(c) / len(c) for c in columns],
        [min(c) for c in columns],
        [max(c) for c in columns],
    )
