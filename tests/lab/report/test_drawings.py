"""Pictures of tables: another row, another picture; and nothing drawn that the row does not say."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from normkit.coverage import COVERAGE, Coverage
from normkit.lab.language import Words
from normkit.lab.report import drawings
from normkit.lab.report.gauge import gauge
from normkit.lab.report.inline import inline
from normkit.lab.report.numbers import judged_on, measured, region
from normkit.lab.verdict import Criterion
from normkit.placement import WIRINGS, Constants

PRE = WIRINGS["pre"]


@pytest.mark.parametrize("name", sorted(WIRINGS))
def test_every_row_draws_and_says_what_it_draws(name: str) -> None:
    row = WIRINGS[name]
    drawing = drawings.wiring(row)
    assert drawing.caption == row.formula
    assert drawing.svg.count(">N<") == row.before + row.branch + row.after + row.final_norm
    assert (">α<" in drawing.svg) == row.scaled_residual == ("α times" in drawing.alt)
    assert (">F₂<" in drawing.svg) == row.parallel == ("two sublayers" in drawing.alt)
    inline(drawing.svg, prefix="p", title="t", description=drawing.alt, css_class="drawing")


def test_all_rows_look_and_read_differently() -> None:
    pictures = [drawings.wiring(row) for row in WIRINGS.values()]
    assert len({p.svg for p in pictures}) == len({p.alt for p in pictures}) == len(WIRINGS)


@pytest.mark.parametrize("flag", ["before", "branch", "after", "parallel", "final_norm", "scaled_residual"])
def test_changing_one_flag_of_a_row_changes_its_picture_and_its_words(flag: str) -> None:
    other = replace(PRE, **{flag: not getattr(PRE, flag)})
    assert drawings.wiring(other).svg != drawings.wiring(PRE).svg
    assert drawings.wiring(other).alt != drawings.wiring(PRE).alt


def test_a_name_or_source_alone_draws_nothing_new() -> None:
    assert drawings.wiring(replace(PRE, name="zzz", source="nowhere")).svg == drawings.wiring(PRE).svg


def test_constants_come_from_the_row() -> None:
    assert drawings.constants(PRE) == []
    row = replace(PRE, constants=lambda depth, architecture: Constants(float(depth), 0.5))
    assert drawings.constants(row)[0] == (6, "6.000", "0.500")
    depth, alpha, beta = drawings.constants(WIRINGS["deepnorm"])[1]
    assert (depth, alpha, beta) == (24, f"{48**0.25:.3f}", f"{192**-0.25:.3f}")


def marked(row: Coverage) -> int:
    return drawings.coverage(row).svg.count('fill="var(--accent)"')


@pytest.mark.parametrize("name", sorted(COVERAGE))
def test_marked_faces_are_those_that_share_the_statistic(name: str) -> None:
    row = COVERAGE[name]
    chosen = (0, 3, 3)
    faces = [element for _, element in drawings._faces()]
    assert marked(row) == sum(row.covers(chosen, e, 2) for e in faces)
    assert 0 < marked(row) < len(faces)


def test_every_visible_face_is_drawn_once() -> None:
    faces = list(drawings._faces())
    assert len(faces) == len({outline for outline, _ in faces}) == 3 * 4 + 3 * 4 + 4 * 4


def test_coverage_pictures_differ_and_follow_the_row() -> None:
    for a, b in itertools.combinations(COVERAGE.values(), 2):
        assert drawings.coverage(a).svg != drawings.coverage(b).svg
    layer = COVERAGE["layer"]
    assert marked(replace(layer, axes=("L", "C"))) > marked(layer)
    assert "(L, C)" in drawings.coverage(replace(layer, axes=("L", "C"))).alt


def criterion(kind: str, values: list[float], *, tolerance: float = 0.1, every: bool = False) -> Criterion:
    return Criterion("c", values, kind, 0.5, tolerance, "why", every)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["near", "at_most", "at_least", "above", "below"])
@pytest.mark.parametrize("values", [[0.5, 0.52], [9e9, 9.1e9], [float("nan")], [0.5], [float("inf"), 1.0]])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("tolerance", [0.0, 1e-12, 0.1])
def test_gauges_stay_inside_and_never_hold_a_nan(kind: str, values: list[float], every: bool, tolerance: float) -> None:
    svg = gauge(criterion(kind, values, every=every, tolerance=tolerance))
    assert "nan" not in svg
    assert "inf" not in svg
    numbers = [float(x) for x in re.findall(r'(?:c?x|width)="(-?[\d.]+)"', svg)]
    assert all(0 <= x <= 190 for x in numbers)


def test_gauge_places_the_value_against_the_region() -> None:
    def at(value: float) -> tuple[float, float, float]:
        svg = gauge(criterion("near", [value]))
        edges = [float(x) for x in re.findall(r"M([\d.]+) 2V24", svg)]
        return edges[0], float(re.findall(r'cx="([\d.]+)"', svg)[0]), edges[1]

    low, x, high = at(0.5)
    assert low < x < high
    low, x, high = at(0.9)
    assert low < high < x


def test_measured_and_region_in_words() -> None:
    assert measured(criterion("near", [0.5])) == "0.5"
    assert measured(criterion("near", [0.4, 0.6])) == "0.5 ± 1.3"
    assert measured(criterion("near", [0.4, 0.6], every=True)) == "0.4 … 0.6"
    assert measured(criterion("near", [0.4, float("nan")])) == "NaN"
    assert measured(criterion("near", [0.4, float("nan")], every=True)) == "NaN among the values"
    assert judged_on(criterion("near", [0.5]), Words()) == "one value"
    assert judged_on(criterion("near", [0.5, 0.6]), Words()) == "mean of 2, 95 % interval"
    assert judged_on(criterion("near", [0.5, 0.6], every=True), Words()) == "every one of 2 values"
    assert region(criterion("near", [0.5])) == "0.4 … 0.6"
    assert region(criterion("at_most", [0.5])) == "≤ 0.6"
    assert region(criterion("above", [0.5])) == "> 0.6"
    assert region(criterion("below", [0.5])) == "< 0.4"
