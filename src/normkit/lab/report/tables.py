"""The numbers under a chart, as tables: one for all series that share their x values."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.lab.figures import Panel, Series
from normkit.lab.numbers import number


@dataclass(frozen=True)
class Table:
    """A caption, column heads, and rows of cells whose first one heads the row."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(panel: Panel) -> list[Table]:
    """Return what the panel draws, in numbers, non-finite ones included."""
    groups: dict[tuple[float, ...], list[Series]] = {}
    for series in panel.series:
        groups.setdefault(tuple(series.x), []).append(series)
    return [_table(panel, list(x), group) for x, group in groups.items()]


def _table(panel: Panel, xs: list[float], group: list[Series]) -> Table:
    heads = (panel.x_label, *(s.label or panel.y_label for s in group))
    rows = tuple((_x(panel, x), *(_y(s, i) for s in group)) for i, x in enumerate(xs))
    return Table(f"{panel.title}: {panel.y_label}", heads, rows)


def _x(panel: Panel, x: float) -> str:
    named = panel.x_names and x == int(x) and 0 <= x < len(panel.x_names)
    return panel.x_names[int(x)] if named else number(x)


def _y(series: Series, i: int) -> str:
    text = number(series.y[i])
    if len(series.low) == len(series.y) == len(series.high):
        text += f" [{number(series.low[i])}, {number(series.high[i])}]"
    return text
