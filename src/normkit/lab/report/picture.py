"""A figure as a PNG file, for places that show no SVG: the light theme, drawn by matplotlib, no browser needed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from normkit.lab.figures import Chart, Panel
from normkit.lab.report.charts import SIZE, drawn
from normkit.lab.report.palette import LIGHT, SERIES
from normkit.lab.report.text import lines

DPI = 96
_POINTS = 72  # an inch has so many, and a panel is laid out in them
_MARGIN, _GAP, _LINE = 20.0, 30.0, 17.0
_COLUMNS = 2
_SHADES = (1.0, 0.75, 0.5, 0.25, 0.16)  # of a colour over the page: smooth edges, and the bands of charts


class _Picture(NamedTuple):
    title: str
    pixels: Any

    @property
    def width(self) -> float:
        return self.pixels.shape[1] * _POINTS / DPI

    @property
    def height(self) -> float:
        return self.pixels.shape[0] * _POINTS / DPI


def picture(chart: Chart) -> bytes:
    """Return ``chart`` as the bytes of a PNG file: its panels two in a row, their titles, the caption below."""
    pictures = [_Picture(panel.title, _pixels(panel)) for panel in chart.panels]
    rows = [pictures[i : i + _COLUMNS] for i in range(0, len(pictures), _COLUMNS)]
    width = max(sum(p.width for p in row) + _GAP * (len(row) - 1) for row in rows) + 2 * _MARGIN
    caption = lines(chart.caption, width - 2 * _MARGIN, SIZE)
    heights = [max(p.height for p in row) + _title(row) + _MARGIN for row in rows]
    return _png(_composed(rows, heights, caption, (width, _MARGIN + sum(heights) + _LINE * len(caption) + _MARGIN)))


def _pixels(panel: Panel) -> Any:
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with drawn(panel, LIGHT.__getitem__) as figure:
        figure.set(facecolor=LIGHT["page"], frameon=True)
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(DPI)
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba()).copy()


def _title(row: Sequence[_Picture]) -> float:
    return 1.4 * _LINE * any(p.title for p in row)


def _composed(
    rows: Sequence[Sequence[_Picture]], heights: Sequence[float], caption: Sequence[str], size: tuple[float, float]
) -> Any:
    """Return the whole as an array of pixels."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = size
    figure = Figure(figsize=(width / _POINTS, height / _POINTS), dpi=DPI, facecolor=LIGHT["page"])
    canvas = FigureCanvasAgg(figure)

    def write(x: float, y: float, text: str, colour: str, weight: str = "normal") -> None:
        figure.text(
            x / width, 1 - y / height, text, color=LIGHT[colour], fontsize=SIZE, fontweight=weight, parse_math=False
        )

    y = _MARGIN
    for row, tall in zip(rows, heights, strict=True):
        for i, p in enumerate(row):
            write(_MARGIN + i * (row[0].width + _GAP), y + _LINE * 0.8, p.title, "ink", "bold")
        y += tall
    for i, line in enumerate(caption):
        write(_MARGIN, y + _LINE * (i + 0.8), line, "muted")
    canvas.draw()
    whole = numpy.asarray(canvas.buffer_rgba()).copy()
    y = _MARGIN
    for row, tall in zip(rows, heights, strict=True):
        for i, p in enumerate(row):
            top, left = _dots(y + _title(row)), _dots(_MARGIN + i * (row[0].width + _GAP))
            whole[top : top + p.pixels.shape[0], left : left + p.pixels.shape[1]] = p.pixels
        y += tall
    return whole


def _dots(points: float) -> int:
    return round(points * DPI / _POINTS)


def _png(pixels: Any) -> bytes:
    from PIL import Image  # matplotlib needs it, so it is there

    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in _colours() for part in colour])
    # A palette found in the picture itself would give thin lines, which are few pixels, the colour of something else.
    image = Image.fromarray(pixels).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True, dpi=(DPI, DPI))
    return out.getvalue()


def _colours() -> list[tuple[int, ...]]:
    """Return all that a chart is drawn in, in shades over the page."""

    def parts(name: str) -> list[int]:
        return [int(LIGHT[name][i : i + 2], 16) for i in (1, 3, 5)]

    page = parts("page")
    names = ["ink", "muted", "axis", "grid", *(f"series-{i}" for i in range(SERIES))]
    shades = [[round(a * c + (1 - a) * p) for c, p in zip(parts(n), page, strict=True)] for n in names for a in _SHADES]
    return [tuple(colour) for colour in (page, *shades)]
