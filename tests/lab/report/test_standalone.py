"""Figures as files: they need nothing around them, read well in both themes, and hold no more than a picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_fakes as fakes

from normkit.lab.figures import Chart, Drawing, Panel, Series
from normkit.lab.report.files import figure_files, write_figures
from normkit.lab.report.page import page
from normkit.lab.report.palette import DARK, LIGHT, contrast
from normkit.lab.report.standalone import standalone

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return figure_files(fakes.judged())


def test_every_figure_is_a_file_and_every_file_is_named_on_the_page(files: dict[str, str]) -> None:
    assert {"A1-1.svg", "F3-1.svg", "C1-1.svg", "C1-2.svg"} <= files.keys()
    assert not any(name.startswith(("Z8", "Z9", "H9")) for name in files)  # nothing measured, nothing to draw
    html = page(fakes.run(), fakes.judged())
    assert set(re.findall(r"figures/([\w-]+\.svg)", html)) == files.keys()


def test_files_are_well_formed_and_say_what_they_show(files: dict[str, str]) -> None:
    for text in files.values():
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg"
        named = {e.get("id"): e.text for e in root if e.tag in {f"{SVG}title", f"{SVG}desc"}}
        assert all(named[i] for i in root.attrib["aria-labelledby"].split())
        ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert len(ids) == len(set(ids))
        used = re.findall(r"url\(#([^)]+)\)", text) + re.findall(r'href="#([^"]+)"', text)
        assert set(used) <= set(ids)


def test_files_lean_on_nothing_and_run_nothing(files: dict[str, str]) -> None:
    for text in files.values():
        assert "var(--" not in text
        assert "currentColor" not in text
        assert "@import" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        tags = {e.tag.removeprefix(SVG) for e in ElementTree.fromstring(text).iter()}
        assert not tags & {"script", "foreignObject", "image", "a"}


def test_each_colour_has_its_dark_one_and_both_stand_out_from_their_ground(files: dict[str, str]) -> None:
    text = files["A2-1.svg"]
    light = {(c, v) for c, v in re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"[^>]*class="([^"]*)"', text)}
    assert light
    dark = dict(re.findall(r"\.([a-z0-9-]+)\{(?:fill|stroke):(#[0-9a-f]{6})\}", text))
    assert dark
    for name, colour in dark.items():
        variable = name.partition("-")[2]
        assert colour == DARK[variable]
        assert f'"{LIGHT[variable]}"' in text
        if variable.startswith(("series", "axis")):
            assert contrast(colour, DARK["page"]) >= 3 <= contrast(LIGHT[variable], LIGHT["page"])
        if variable in {"ink", "muted"}:
            assert contrast(colour, DARK["page"]) >= 4.5 <= contrast(LIGHT[variable], LIGHT["page"])
    classes = {c for found in re.findall(r'class="([^"]*)"', text) for c in found.split()}
    assert classes == dark.keys()


def test_panels_stand_beside_each_other_inside_the_page_of_the_file() -> None:
    panel = Panel("one", "x", "y", [Series("a", [1, 2], [1, 2])])
    text = standalone(Chart("A caption.", "What one sees.", [panel] * 3), "T", "p")
    root = ElementTree.fromstring(text)
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    boxes = [tuple(float(e.attrib[k]) for k in ("x", "y", "width", "height")) for e in root.findall(f"{SVG}svg")]
    assert len(set(boxes)) == 3
    assert boxes[0][1] == boxes[1][1] < boxes[2][1]
    for x, y, w, h in boxes:
        assert x > 0 < y
        assert x + w < width
        assert y + h < height


def test_hostile_captions_and_ids_are_text() -> None:
    attack = '"><script>alert(1)</script>&amp;'
    panel = Panel(attack, attack, attack, [Series(attack, [1, 2], [1, 2])])
    root = ElementTree.fromstring(standalone(Chart(attack, attack, [panel]), attack, "p"))
    assert not any(e.tag.endswith("script") for e in root.iter())
    assert sum(attack in (e.text or "") for e in root.iter()) >= 4
    with pytest.raises(ValueError, match="neither runs nor fetches"):
        standalone(Drawing("c", "a", '<svg viewBox="0 0 1 1"><script/></svg>'), "T", "p")


def test_a_folder_of_figures_holds_those_of_the_last_rendering(tmp_path: Path) -> None:
    write_figures(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    judged = fakes.judged()
    write_figures(tmp_path, judged)
    folder = tmp_path / "figures"
    first = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert first.keys() == figure_files(judged).keys()
    (folder / "notes.txt").write_text("mine")
    write_figures(tmp_path, judged)
    assert {p.name: p.read_bytes() for p in folder.glob("*.svg")} == first
    write_figures(tmp_path, [j for j in judged if j.claim.id == "A1"])
    assert {p.name for p in folder.iterdir()} == {"A1-1.svg", "notes.txt"}
