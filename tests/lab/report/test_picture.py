"""Figures as PNG files: the same panels, in the light theme, small; and a report copied elsewhere with its figures."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import pytest
import report_fakes as fakes
from PIL import Image

from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.report.files import copy_report, figure_files, write_figures
from normkit.lab.report.palette import LIGHT
from normkit.lab.report.picture import DPI, picture

PANEL = Panel("one", "x", "y", [Series("a", [1, 2], [1, 2]), Series("b", [1, 2], [2, 1], kind="bars")])


def pixels(chart: Chart) -> numpy.ndarray:
    image = Image.open(io.BytesIO(picture(chart)))
    assert image.format == "PNG"
    return numpy.asarray(image.convert("RGB")).astype(int)


def near(found: numpy.ndarray, colour: str) -> int:
    wanted = [int(LIGHT[colour][i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(found - wanted).max(axis=-1) <= 12).sum())


def test_a_picture_has_its_panels_colours_and_size() -> None:
    one, three = pixels(Chart("A caption.", "What one sees.", [PANEL])), pixels(Chart("c", "a", [PANEL] * 3))
    assert near(one, "page") > 0.6 * one.shape[0] * one.shape[1]
    for colour in ("series-0", "series-1", "axis"):
        assert near(one, colour) > 50, colour
        assert near(three, colour) > 2 * near(one, colour), "a panel is missing"
    assert one.shape[1] == pytest.approx((420 + 40) * DPI / 72, abs=2)
    assert three.shape[1] == pytest.approx((2 * 420 + 30 + 40) * DPI / 72, abs=2)


def test_thin_lines_keep_their_own_colours() -> None:
    series = [Series(f"s{i}", [1, 2, 3], [i + 1, 2 * i + 1, i + 2]) for i in range(8)]
    found = pixels(Chart("A caption.", "What one sees.", [Panel("one", "x", "y", series)]))
    assert all(near(found, f"series-{i}") > 30 for i in range(8))


def test_nothing_is_cut_at_the_edge_of_a_picture() -> None:
    whole = pixels(Chart("words " * 40, "a", [PANEL] * 2))
    page = [int(LIGHT["page"][i : i + 2], 16) for i in (1, 3, 5)]
    edges = (whole[:4], whole[-4:], whole[:, :4], whole[:, -4:])
    assert all(abs(edge - page).max() <= 12 for edge in edges)


def test_dollars_in_a_picture_are_text() -> None:
    panel = Panel("$t_1^$", "$x", "y$^", [Series("$\\frac$", [1, 2], [1, 2])], x_names=["$a^", "b"])
    assert picture(Chart("costs $5 and $\\oops", "a", [panel]))


def test_pictures_are_made_when_asked_and_go_when_their_figure_changes(tmp_path: Path) -> None:
    judged = [j for j in fakes.judged() if j.claim.id in {"A1", "F1"}]
    folder = tmp_path / "figures"
    write_figures(tmp_path, judged)
    assert not list(folder.glob("*.png"))
    write_figures(tmp_path, judged, png=True)
    names = {Path(name).with_suffix(".png").name for name in figure_files(judged)}
    assert names
    assert {p.name for p in folder.glob("*.png")} == names
    write_figures(tmp_path, judged)
    assert {p.name for p in folder.glob("*.png")} == names
    (folder / "A1-1.svg").write_text("another figure")
    write_figures(tmp_path, judged)
    assert {p.name for p in folder.glob("*.png")} == names - {"A1-1.png"}
    write_figures(tmp_path, [])
    assert not list(folder.glob("*.*"))


def test_a_copied_report_takes_its_figures_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_figures(run, fakes.judged())
    page = run / "report.html"
    page.write_text("the page")
    out = copy_report(page, tmp_path / "new" / "paper" / "lab.html")
    assert out.read_text() == "the page"
    assert {p.name for p in (out.parent / "figures").iterdir()} == figure_files(fakes.judged()).keys()
    beside = tmp_path / "there"
    (beside / "figures").mkdir(parents=True)
    (beside / "figures" / "mine.svg").write_text("mine")
    assert copy_report(page, beside) == beside / "report.html"
    assert (beside / "figures" / "mine.svg").read_text() == "mine"
    assert (beside / "figures" / "A1-1.svg").exists()
    assert copy_report(page, page) == page, "onto itself"
    assert copy_report(page, run / "again.html").read_text() == "the page"
    assert {p.name for p in (run / "figures").iterdir()} == figure_files(fakes.judged()).keys()
