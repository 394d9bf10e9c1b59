"""Charts: what is drawn, what tells series apart, and where labels go."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from normkit.lab.figures import Panel, Series, band
from normkit.lab.report import palette
from normkit.lab.report.axes import SLANT, labels_of
from normkit.lab.report.charts import _cache, left_out, panel_svg
from normkit.lab.report.inline import inline
from normkit.lab.report.labels import spread
from normkit.lab.report.marks import DASHES, MARKERS, drawable
from normkit.lab.report.numbers import ticks
from normkit.lab.report.tables import tables_of
from normkit.lab.report.text import lines, width


def draw(panel: Panel) -> str:
    return panel_svg(panel, prefix="p", description="what one would see")


def line(label: str, y: list[float], **more: object) -> Series:
    return Series(label, [1.0, 2.0, 4.0], y, **more)  # type: ignore[arg-type]


def test_colours_are_variables_of_the_page() -> None:
    svg = draw(Panel("t", "x", "y", [line("a", [1, 2, 3]), line("b", [3, 2, 1])]))
    assert "var(--series-0)" in svg
    assert "var(--series-1)" in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)


def test_bands_lines_and_theory_are_drawn() -> None:
    rows = [[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]]
    plain = draw(Panel("t", "x", "y", [Series("a", [1, 2, 4], [1.25, 2.25, 3.25])]))
    banded = draw(Panel("t", "x", "y", [band("a", [1, 2, 4], rows)]))
    theory = draw(Panel("t", "x", "y", [line("law", [1, 2, 3], kind="reference")]))
    assert "fill-opacity" not in plain
    assert "fill-opacity: 0.16" in banded
    assert "stroke-dasharray" in theory
    assert "font-style: italic" in theory or "italic" in theory


@pytest.mark.parametrize("kind", ["line", "points", "bars", "reference"])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_kind_on_every_scale_survives_what_cannot_be_drawn(kind: str, scale: str) -> None:
    y = [1.0, math.nan, math.inf, -1.0, 0.0]
    series = Series("a", [1, 2, 3, 4, 5], y, y, y, kind)  # type: ignore[arg-type]
    panel = Panel("t", "x", "y", [series], "linear", scale)  # type: ignore[arg-type]
    assert "<svg" in draw(panel)
    assert left_out(panel) == (2 if scale == "linear" else 4)
    assert drawable(panel, series) == ([0, 3, 4] if scale == "linear" else [0])


def test_a_panel_without_a_finite_value_says_so() -> None:
    assert "no finite value to draw" in draw(Panel("t", "x", "y", [line("a", [math.nan] * 3)]))
    assert "no finite value to draw" in draw(Panel("t", "x", "y", []))


def test_series_differ_without_colour() -> None:
    looks = {(MARKERS[i % len(MARKERS)], str(DASHES[(i + i // 8) % len(DASHES)])) for i in range(16)}
    assert len(looks) == 16
    bars = [Series(str(i), [0, 1], [1, 2], kind="bars") for i in range(4)]
    svg = draw(Panel("t", "x", "y", bars, x_names=["a", "b"]))
    assert len(set(re.findall(r"<pattern id=\"([^\"]+)", svg))) == 3  # the first is solid


def test_slanted_names_stay_inside_the_picture() -> None:
    names = ["reordered-without-norm", *"bcdefghijk"]
    y = [float(i) for i in range(len(names))]
    svg = draw(Panel("t", "", "y", [Series("a", y, y, kind="points")], x_names=names))
    found = re.search(r'x="([\d.]+)" y="[\d.]+" transform="rotate\(-35 [^>]*>reordered-without-norm', svg)
    assert found is not None
    assert float(found[1]) - width(names[0], 12.0) * math.cos(math.radians(SLANT)) > 0


def test_dollars_and_angle_brackets_in_labels_are_text() -> None:
    svg = draw(Panel("t", "$x^2$", "<y> & z", [line("a<b>$1$", [1, 2, 3])]))
    assert "$x^2$" in svg
    assert "&lt;y&gt; &amp; z" in svg
    assert "a&lt;b&gt;$1$" in svg


def test_words_on_an_axis_are_broken_where_they_fit_and_slanted_where_they_do_not() -> None:
    few = Panel("t", "x", "y", [line("", [1, 2, 3])], x_names=["layer norm", "batch norm", "group norm"])
    assert labels_of(few, list(few.x_names), 60.0, 12.0) == (["layer\nnorm", "batch\nnorm", "group\nnorm"], 0.0, 14.0)
    labels, angle, height = labels_of(few, ["normalization", "b"], 60.0, 12.0)
    assert (labels, angle) == (["normalization", "b"], SLANT)
    assert height > 20
    assert "rotate(-35" in draw(replace(few, x_names=["averylongsinglewordindeed"] * 3))


def test_theory_lines_of_one_panel_differ() -> None:
    panel = Panel("t", "x", "y", [line(n, [1, 2, 3], kind="reference") for n in "ab"])
    dashes = set(re.findall(r"stroke-dasharray: ([\d.]+,[\d.]+)", draw(panel)))
    assert {"4,3", "1.2,1.8"} <= dashes


def test_decades_far_from_one_are_all_written_as_powers() -> None:
    svg = draw(Panel("t", "x", "y", [line("a", [1e-12, 1e-6, 1.0])], y_scale="log"))
    assert re.findall(r">(10[^<]+)</text>", svg) == ["10⁻¹²", "10⁻⁹", "10⁻⁶", "10⁻³"]


def test_labels_at_line_ends_do_not_overlap_in_the_drawing() -> None:
    svg = draw(Panel("t", "x", "y", [line(f"name{i}", [1, 2, 3 + i * 1e-3]) for i in range(8)]))
    at = [float(y) for y in re.findall(r"translate\([\d.]+ ([\d.]+)\)[^>]*>name\d", svg)]
    at = at or [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>name\d', svg)]
    assert len(at) == 8
    assert min(b - a for a, b in pairwise(sorted(at))) > 11


def test_many_labels_make_the_panel_taller_instead_of_covering_one_another() -> None:
    few = draw(Panel("t", "x", "y", [line("one", [1, 2, 3])]))
    many = draw(Panel("t", "x", "y", [line(f"a label of several words, number {i}", [1, 2, 3]) for i in range(9)]))

    def height(svg: str) -> float:
        return float(re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[0])

    assert height(many) > height(few)


@pytest.mark.parametrize(
    "wanted",
    [
        [5.0, 5.0, 5.0],
        [0.0, 100.0],
        [99.0, 98.0, 97.0, 3.0],
        [50.0],
        [],
        [-40.0, 200.0, 200.0],
        [10.0, 9.0, 60.0, 61.0],
    ],
)
def test_spread_keeps_order_and_distance_and_stays_inside(wanted: list[float]) -> None:
    heights = [10.0 + i for i in range(len(wanted))]
    placed = spread(wanted, heights, 0.0, 100.0)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for a, b in pairwise(order):
        assert placed[b] - placed[a] >= (heights[a] + heights[b]) / 2 - 1e-9
    for y, h in zip(placed, heights, strict=True):
        assert h / 2 - 1e-9 <= y <= 100 - h / 2 + 1e-9


def test_spread_moves_nothing_that_has_room_and_shares_the_way_otherwise() -> None:
    assert spread([20.0, 60.0], [10.0, 10.0], 0.0, 100.0) == [20.0, 60.0]
    assert spread([50.0, 50.0], [10.0, 10.0], 0.0, 100.0) == [45.0, 55.0]


def test_labels_that_fit_nowhere_still_do_not_overlap() -> None:
    placed = spread([1.0, 2.0, 3.0], [10.0] * 3, 0.0, 20.0)
    assert placed == [5.0, 15.0, 25.0]


def test_a_drawn_panel_is_taken_from_the_cache_and_another_is_not() -> None:
    panel = Panel("cached", "x", "y", [line("a", [1, 2, 3])])
    draw(panel)
    before = len(_cache)
    draw(Panel("cached", "x", "y", [line("a", [1, 2, 3])]))
    assert len(_cache) == before
    draw(Panel("cached", "x", "y", [line("a", [1, 2, 4])]))
    assert len(_cache) == before + 1


def test_tables_hold_every_number_bands_and_names_included() -> None:
    series = [
        Series("a", [0, 1], [1.5, math.nan], [1, 1], [2, 2]),
        Series("b", [0, 1], [3, math.inf]),
        Series("limit", [-0.5, 1.5], [4, 4], kind="reference"),
    ]
    first, second = tables_of(Panel("t", "norm", "error", series, x_names=["layer", "batch"]))
    assert first.heads == ("norm", "a", "b")
    assert first.rows == (("layer", "1.5 [1, 2]", "3"), ("batch", "NaN [1, 2]", "∞"))
    assert second.rows == (("−0.5", "4"), ("1.5", "4"))


def test_ticks_tell_neighbours_apart() -> None:
    assert ticks([0.0, 0.5, 1.0]) == ["0", "0.5", "1.0"]
    assert ticks([1.0, 1.025, 1.05]) == ["1.000", "1.025", "1.050"]
    assert ticks([0.5, 1.5, 2.5]) == ["0.5", "1.5", "2.5"]
    assert ticks([0.0, 2.5, 5.0]) == ["0", "2.5", "5.0"]
    assert ticks([0.0, 10.0, 20.0]) == ["0", "10", "20"]
    assert ticks([0.0, 1e-16, 2e-16]) == ["0", "10⁻¹⁶", "2×10⁻¹⁶"]


def test_lines_fit_their_room_and_lose_nothing() -> None:
    text = "a label that is long and a verylongwordwithoutanyspace"
    broken = lines(text, 60.0, 12.0)
    assert all(width(part, 12.0) <= 60.0 for part in broken)
    assert "".join(broken).replace(" ", "") == text.replace(" ", "")
    assert lines("", 60.0, 12.0) == [""]


@pytest.mark.parametrize(
    ("svg", "message"),
    [
        ("<svg><script>1</script></svg>", "neither runs nor fetches"),
        ('<svg onload="x()"/>', "neither runs nor fetches"),
        ('<svg><use href="http://x.org/a.svg"/></svg>', "neither runs nor fetches"),
        ('<svg><rect style="fill:url(http://x.org)"/></svg>', "fetches nothing"),
        ("<svg>", "well-formed"),
        ("<p/>", "expected an <svg>"),
    ],
)
def test_drawings_that_run_or_fetch_are_refused(svg: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inline(svg, prefix="p", title="t", description="d", css_class="c")


def test_inline_keeps_referenced_ids_apart_and_drops_the_others() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><g id="a"/><g id="b"/><use href="#a"/><rect fill="url(#a)"/></svg>'
    out = inline(svg, prefix="q", title="<t>", description="d", css_class="c")
    assert 'id="q-a"' in out
    assert 'href="#q-a"' in out
    assert 'fill="url(#q-a)"' in out
    assert "q-b" not in out
    assert "&lt;t&gt;" in out


TEXTS = ["ink", "muted", *(f"series-{i}" for i in range(palette.SERIES)), "accent"]
VERDICTS = ["holds", "corrected", "fails", "undecided", "untestable", "waiting"]


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_contrast(theme: dict[str, str]) -> None:
    for ground in ("page", "raised"):
        for name in (*TEXTS, *VERDICTS):
            assert palette.contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
    assert palette.contrast(theme["axis"], theme["page"]) >= 3
    assert palette.contrast(theme["accent"], theme["raised"]) >= 3  # marked against unmarked cells


def test_contrast_is_the_known_ratio() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_sentinels_are_no_colour_of_the_page() -> None:
    used = {*palette.LIGHT.values(), *palette.DARK.values()}
    assert not used & {palette.sentinel(name) for name in palette.LIGHT}
    assert palette.themed(f"fill: {palette.sentinel('series-1')}") == "fill: var(--series-1)"
    assert palette.LIGHT.keys() == palette.DARK.keys()
