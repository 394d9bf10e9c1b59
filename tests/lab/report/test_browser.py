"""The page in a real browser, from disk: layout, contrast, keyboard; nothing leaves the file. Needs Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import report_fakes as fakes
from chromium import CHROMIUM, Browser

from normkit.lab.language import Words
from normkit.lab.report.files import write_figures
from normkit.lab.report.page import page
from normkit.lab.report.palette import contrast

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; layout is not checked here")

LOOKS = pytest.mark.parametrize(
    ("width", "dark"), [(390, False), (390, True), (1440, False), (1440, True)],
    ids=["phone, light", "phone, dark", "desk, light", "desk, dark"],
)  # fmt: skip

OPEN_ALL = 'document.querySelectorAll("details").forEach(d => d.open = true)'

# What stands on what: for each text and each mark its colour, with its opacity, and the colour behind it.
COLOURS = """(() => {
  const paint = c => { const m = c.match(/[\\d.]+/g).map(Number); return {rgb: m.slice(0, 3), a: m[3] ?? 1}; };
  const over = (top, a, under) => top.map((v, i) => a * v + (1 - a) * under[i]);
  const opacity = e => { let o = 1; for (; e; e = e.parentElement) o *= getComputedStyle(e).opacity; return o; };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const b = paint(getComputedStyle(e).backgroundColor);
      if (!(e instanceof SVGElement) && b.a === 1) return b.rgb;
    }
    return [255, 255, 255];
  };
  const shapes = "rect, path, circle, polygon";
  const behind = text => {  // the shapes of the same picture that were painted before and lie under the text's middle
    const box = text.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
    let colour = ground(text);
    for (const shape of text.ownerSVGElement.querySelectorAll(shapes)) {
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) break;
      const style = getComputedStyle(shape), b = shape.getBoundingClientRect();
      if (style.fill === "none" || style.fill.startsWith("url") || shape.closest("defs")) continue;
      if (b.left > x || b.right < x || b.top > y || b.bottom < y) continue;
      colour = over(paint(style.fill).rgb, style.fillOpacity * opacity(shape), colour);
    }
    return colour;
  };
  const found = new Map();
  const note = (kind, e, top, a, under) => {
    const fore = over(top, a, under).map(Math.round), key = [kind, fore, under].join("|");
    const name = e.closest("[class]")?.getAttribute("class") ?? "";
    if (!found.has(key)) found.set(key, {kind, fore, under: under.map(Math.round), what: `${e.tagName}.${name}`});
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || e.closest("style, title, desc")) continue;
    const svg = e.closest("svg"), style = getComputedStyle(e), colour = paint(svg ? style.fill : style.color);
    const a = colour.a * opacity(e) * (svg ? style.fillOpacity : 1);
    note("text", e, colour.rgb, a, svg ? behind(e.closest("text")) : ground(e));
  }
  const root = getComputedStyle(document.documentElement);
  const hex = n => root.getPropertyValue(n).trim().match(/[0-9a-f]{2}/g).map(h => parseInt(h, 16)).join();
  const quiet = new Set(["--grid", "--page", "--raised", "--rule"].map(hex));  // rules and grounds carry no meaning
  for (const e of document.querySelectorAll(["svg"].flatMap(s => shapes.split(", ").map(t => `${s} ${t}`)).join())) {
    if (e.closest(".shapes, defs, clipPath")) continue;
    const style = getComputedStyle(e);
    for (const part of ["fill", "stroke"]) {
      if (style[part] === "none" || style[part].startsWith("url")) continue;
      const colour = paint(style[part]), a = style[`${part}Opacity`] * opacity(e);
      if (quiet.has(colour.rgb.join()) || a < 0.7) continue;  // bands and leaders repeat what a mark or a label says
      note("mark", e, colour.rgb, a, ground(e));
    }
  }
  for (const icon of document.querySelectorAll(".icon"))
    note("mark", icon, paint(getComputedStyle(icon).color).rgb, 1, ground(icon));
  return [...found.values()];
})()"""

FOCUSABLE = """[...document.querySelectorAll('a[href], summary, [tabindex="0"]')].filter(e => e.checkVisibility())"""

FOCUSED = """(() => {
  const e = document.activeElement, r = e.getBoundingClientRect(), s = getComputedStyle(e);
  return {
    place: FOCUSABLE.indexOf(e), text: e.textContent.slice(0, 40), top: r.top + scrollY, left: r.left,
    inMain: !!e.closest("main"), skip: e.matches(".skip"),
    seen: r.width > 0 && r.height > 0 && r.right > 0 && r.left < innerWidth && r.bottom > 0 && r.top < innerHeight,
    ring: s.outlineStyle !== "none" ? parseFloat(s.outlineWidth) : 0,
  };
})()""".replace("FOCUSABLE", FOCUSABLE)


def hex_of(rgb: list[int]) -> str:
    return "#" + "".join(f"{v:02x}" for v in rgb)


def ratio(found: dict[str, Any]) -> float:
    return contrast(hex_of(found["fore"]), hex_of(found["under"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = fakes.run()
    judged = fakes.judged(run)
    (folder / "report.html").write_text(page(run, judged), encoding="utf-8")
    (folder / "report.zh.html").write_text(page(run, judged, Words("zh")), encoding="utf-8")
    write_figures(folder, judged)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def troubles(browser: Browser) -> list[str]:
    """Return console messages, errors, and requests for anything but the file that was opened."""
    browser.run("new Promise(done => setTimeout(done, 50))")  # what is reported late
    said = [str(e["params"]) for e in browser.events if e["method"] in {"Runtime.consoleAPICalled", "Log.entryAdded"}]
    said += [str(e["params"]) for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    sent = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    return said + [url for url in sent[1:] if not url.startswith("data:,")]


@LOOKS
@pytest.mark.parametrize("file", ["report.html", pytest.param("report.zh.html", marks=pytest.mark.slow)])
def test_no_sideways_scrolling_no_message_no_request(
    browser: Browser, folder: Path, file: str, width: int, dark: bool
) -> None:
    browser.open(folder / file, width, dark)
    browser.run(OPEN_ALL)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert 0 < browser.run('document.querySelector(".chart").getBoundingClientRect().right') <= width
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 23, 27)" if dark else "rgb(252, 251, 248)")
    assert troubles(browser) == []


@pytest.mark.parametrize("file", ["report.html", "report.zh.html"])
def test_the_table_of_all_claims_fits_a_desk(browser: Browser, folder: Path, file: str) -> None:
    browser.open(folder / file, 1440)
    assert browser.run('(e => e.scrollWidth <= e.clientWidth)(document.querySelector("table.claims").parentElement)')


def test_the_watch_on_messages_and_requests_sees_them(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="missing.png"><script>console.log("hello"); undefined.x</script>')
    browser.open(bad, 390)
    found = " ".join(troubles(browser))
    assert "missing.png" in found
    assert "hello" in found
    assert "TypeError" in found


@LOOKS
def test_text_and_marks_stand_out_from_what_is_behind_them(
    browser: Browser, folder: Path, width: int, dark: bool
) -> None:
    browser.open(folder / "report.html", width, dark)
    browser.run(OPEN_ALL)
    found = browser.run(COLOURS)
    texts, marks = ([f for f in found if f["kind"] == kind] for kind in ("text", "mark"))
    assert len(texts) > 15
    assert len(marks) > 10
    assert [(f, ratio(f)) for f in texts if ratio(f) < 4.5] == []
    assert [(f, ratio(f)) for f in marks if ratio(f) < 3.0] == []


def test_the_measure_of_contrast_sees_pale_text_and_pale_marks(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", 1440)
    browser.run(
        'document.querySelector(".lede").style.color = "#a0a0a0";'
        'document.querySelector(".chart text").style.fill = "#b0b0b0";'
        'document.querySelector(".chart path[style*=series]").style.stroke = "#c0c0c0"'
    )
    pale = [f for f in browser.run(COLOURS) if ratio(f) < (4.5 if f["kind"] == "text" else 3.0)]
    assert {(f["kind"], tuple(f["fore"])) for f in pale} == {
        ("text", (160, 160, 160)),
        ("text", (176, 176, 176)),
        ("mark", (192, 192, 192)),
    }


@pytest.mark.parametrize("width", [390, 1440])
def test_the_keyboard_goes_through_the_page_in_reading_order(browser: Browser, folder: Path, width: int) -> None:
    browser.open(folder / "report.html", width)
    stops = browser.run(f"{FOCUSABLE}.length")
    assert stops > 40
    seen: list[dict[str, Any]] = []
    for _ in range(stops):
        browser.press("Tab")
        seen.append(browser.run(FOCUSED))
    assert [s["place"] for s in seen] == list(range(stops))
    assert seen[0]["skip"]
    assert all(s["seen"] for s in seen)
    assert all(s["ring"] >= 2 for s in seen)
    inside = [s for s in seen if s["inMain"]]
    back = [(a["text"], b["text"]) for a, b in pairwise(inside) if b["top"] < a["top"] - 2 and b["left"] <= a["left"]]
    assert back == [], "the focus goes on, the eye goes back: up, and not into the next column"


def test_headings_go_down_one_level_at_a_time(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", 1440)
    levels = browser.run('[...document.querySelectorAll("h1,h2,h3,h4,h5")].map(h => Number(h.tagName[1]))')
    assert levels.count(1) == 1 == levels[0]
    assert all(b <= a + 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("dark", [False, True])
def test_a_figures_file_follows_the_theme(browser: Browser, folder: Path, dark: bool) -> None:
    browser.open(folder / "figures" / "F1-1.svg", 1440, dark)
    ground = browser.run('getComputedStyle(document.querySelector("rect")).fill')
    assert ground == ("rgb(21, 23, 27)" if dark else "rgb(252, 251, 248)")
    inks = browser.run('[...document.querySelectorAll("text")].map(t => getComputedStyle(t).fill)')
    under = hex_of([int(v) for v in re.findall(r"\d+", ground)])
    assert inks
    assert all(contrast(hex_of([int(v) for v in re.findall(r"\d+", ink)]), under) >= 4.5 for ink in inks)
    assert troubles(browser) == []


def test_hostile_names_stay_text_in_the_browser(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.zh.html", 1440)
    assert browser.run("document.images.length + document.scripts.length") == 0
    assert fakes.HOSTILE in browser.run("document.body.textContent")
