"""Where marks stand and what ticks say: nothing hidden, nothing overlapping, round numbers."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from normkit.lab.figures import Panel, Series
from normkit.lab.report.charts import drawn
from normkit.lab.report.marks import MARKERS
from normkit.lab.report.palette import LIGHT


def points(*ys: list[float], **more: Any) -> Panel:
    series = [Series(f"s{i}", range(len(y)), y, kind="points") for i, y in enumerate(ys)]
    return Panel("t", "x", "y", series, **more)


def axes_of(panel: Panel) -> Any:
    with drawn(panel, LIGHT.__getitem__) as figure:
        figure.canvas.draw()
        return figure.axes[0]


def boxes(texts: Any) -> list[Any]:
    return [t.get_window_extent() for t in texts if t.get_text()]


def test_equal_points_stand_side_by_side_between_words() -> None:
    panel = points(*[[0.0, 1.0]] * 4, x_names=["a", "b"])
    lines = axes_of(panel).get_lines()
    xs = [list(line.get_xdata()) for line in lines]
    assert all(abs(p - q) > 0.1 for a, b in combinations(xs, 2) for p, q in zip(a, b, strict=True))
    assert max(abs(x - round(x)) for each in xs for x in each) < 0.5, "nearer to another word"
    assert sum(x[0] for x in xs) == pytest.approx(0.0), "around their word"


def test_equal_points_between_numbers_keep_their_place_and_show_as_rings() -> None:
    lines = axes_of(points([0.0, 1.0], [0.0, 1.0], [0.0, 1.0])).get_lines()
    assert all(list(line.get_xdata()) == [0, 1] for line in lines)
    assert all(a.get_markersize() > b.get_markersize() + 1 for a, b in pairwise(lines))
    assert [line.get_marker() for line in lines] == list(MARKERS[:3])


@pytest.mark.parametrize("shared", [False, True], ids=["one bar a word", "two bars a word"])
def test_a_bar_alone_stands_over_its_word(shared: bool) -> None:
    places = [[0, 1], [0, 1]] if shared else [[0], [1]]
    series = [Series(f"s{i}", x, [1.0] * len(x), kind="bars") for i, x in enumerate(places)]
    axes = axes_of(Panel("t", "x", "y", series, x_names=["a", "b"]))
    bars = [p for p in axes.patches if isinstance(p, Rectangle)]
    middles = sorted(p.get_x() + p.get_width() / 2 for p in bars)
    assert middles == pytest.approx([-0.18, 0.18, 0.82, 1.18] if shared else [0.0, 1.0])


@pytest.mark.parametrize("top", [3, 4, 5, 6, 9])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_ticks_of_the_x_axis_never_touch(scale: Any, top: int) -> None:
    xs = [10.0**e for e in range(top + 1)]
    axes = axes_of(Panel("t", "x", "y", [Series("a long label of it", xs, xs)], x_scale=scale, y_scale="log"))
    labels = boxes(axes.get_xticklabels())
    assert len(labels) >= 2
    assert all(b.x0 - a.x1 > 2 for a, b in pairwise(labels))


def test_a_short_logarithmic_axis_has_round_ticks() -> None:
    panel = Panel("t", "x", "y", [Series("a", [1, 2, 4], [0.17, 0.21, 0.27])], y_scale="log")
    said = [t.get_text() for t in axes_of(panel).get_yticklabels()]
    assert len(said) >= 3
    assert all(re.fullmatch(r"0\.\d\d?", text) for text in said), said


def test_a_logarithmic_axis_writes_all_its_ticks_in_one_way() -> None:
    panel = Panel("t", "x", "y", [Series("a", [1, 2, 4], [3e-5, 1e-4, 2e-3])], y_scale="log")
    said = [t.get_text() for t in axes_of(panel).get_yticklabels()]
    assert said == ["3×10⁻⁵", "10⁻⁴", "3×10⁻⁴", "10⁻³"]
    wide = Panel("t", "x", "y", [Series("a", [1, 2, 4], [1e-9, 1e-4, 1.0])], y_scale="log")
    assert [t.get_text() for t in axes_of(wide).get_yticklabels()] == ["10⁻⁹", "10⁻⁷", "10⁻⁵", "10⁻³", "10⁻¹"]


def test_linear_ticks_are_true_to_their_last_digit() -> None:
    for low, high in ((0.01, 0.23), (-0.3, 4.2), (2.4, 6.5), (0.0, 7.0), (99.7, 101.2)):
        axes = axes_of(Panel("t", "x", "y", [Series("a", [0, 1, 2], [low, high, low])]))
        for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
            assert float(label.get_text().replace("−", "-")) == pytest.approx(at, abs=1e-9)
