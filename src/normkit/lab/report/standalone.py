"""A figure as an SVG file of its own: its panels, titles and caption, legible in either theme and in any viewer.

The page's SVGs take their colours from its style sheet. A file has none around it, and not every viewer knows CSS
variables: colours become attributes of the light theme, with a style sheet that puts the dark ones over them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from normkit.lab.figures import Drawing, Figure
from normkit.lab.report.charts import SIZE, panel_svg
from normkit.lab.report.inline import inline
from normkit.lab.report.palette import DARK, LIGHT
from normkit.lab.report.text import lines
from normkit.lab.report.view import describe

FONT = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif'
_MARGIN, _GAP, _LINE = 20.0, 30.0, 17.0
_COLUMNS = 2
_VARIABLE = re.compile(r"var\(--([a-z0-9-]+)\)")


@dataclass(frozen=True)
class _Picture:
    title: str
    element: ElementTree.Element
    width: float
    height: float


def standalone(figure: Figure, title: str, prefix: str) -> str:
    """Return ``figure`` as the text of an SVG file.

    Args:
        figure: what to draw.
        title: what the file calls itself.
        prefix: begins the ids; with the page's prefix, panels drawn for the page are not drawn again.

    Raises:
        ValueError: a drawing holds something that runs or fetches.
    """
    pictures = _pictures(figure, prefix)
    rows = [pictures[i : i + _COLUMNS] for i in range(0, len(pictures), _COLUMNS)]
    width = max(sum(p.width for p in row) + _GAP * (len(row) - 1) for row in rows) + 2 * _MARGIN
    parts, y = _rows(rows)
    caption = lines(figure.caption, width - 2 * _MARGIN, SIZE)
    parts += [_text(_MARGIN, y + _LINE * (i + 0.8), line, "muted") for i, line in enumerate(caption)]
    height = y + _LINE * len(caption) + _MARGIN
    root = ElementTree.Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}",
        "height": f"{height:g}", "role": "img", "aria-labelledby": "t d", "font-family": FONT,
    })  # fmt: skip
    for tag, identity, text in (("title", "t", title), ("desc", "d", figure.alt)):
        ElementTree.SubElement(root, tag, {"id": identity}).text = text
    style = ElementTree.SubElement(root, "style")
    root.append(ElementTree.Element("rect", {"width": "100%", "height": "100%", "fill": "var(--page)"}))
    root.extend(parts)
    style.text = _dark(_coloured(root))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _pictures(figure: Figure, prefix: str) -> list[_Picture]:
    if isinstance(figure, Drawing):
        svg = inline(figure.svg, prefix=prefix, title=figure.caption, description=figure.alt, css_class="drawing")
        return [_picture("", svg)]
    return [
        _picture(panel.title, panel_svg(panel, prefix=f"{prefix}-{i}", description=describe(figure, i)))
        for i, panel in enumerate(figure.panels, start=1)
    ]


def _picture(title: str, svg: str) -> _Picture:
    element = ElementTree.fromstring(svg)
    _, _, width, height = (float(v) for v in re.split(r"[\s,]+", element.attrib["viewBox"].strip()))
    for name in ("class", "role", "aria-labelledby", "width", "height"):
        element.attrib.pop(name, None)
    element.set("overflow", "visible")
    return _Picture(title, element, width, height)


def _rows(rows: Sequence[Sequence[_Picture]]) -> tuple[list[ElementTree.Element], float]:
    parts: list[ElementTree.Element] = []
    y = _MARGIN
    for row in rows:
        x, titled = _MARGIN, any(p.title for p in row)
        for picture in row:
            if picture.title:
                parts.append(_text(x, y + _LINE * 0.8, picture.title, "ink", weight="600"))
            size = {"width": f"{picture.width:g}", "height": f"{picture.height:g}"}
            picture.element.attrib.update({"x": f"{x:g}", "y": f"{y + 1.4 * _LINE * titled:g}"} | size)
            parts.append(picture.element)
            x += picture.width + _GAP
        y += max(p.height for p in row) + 1.4 * _LINE * titled + _MARGIN
    return parts, y


def _text(x: float, y: float, text: str, colour: str, weight: str = "400") -> ElementTree.Element:
    element = ElementTree.Element("text", {
        "x": f"{x:g}", "y": f"{y:g}", "font-size": f"{SIZE:g}", "font-weight": weight, "fill": f"var(--{colour})",
    })  # fmt: skip
    element.text = text
    return element


def _coloured(root: ElementTree.Element) -> set[tuple[str, str]]:
    """Turn every variable into the light theme's colour and a class; return the (property, variable) pairs met."""
    met: set[tuple[str, str]] = set()
    for element in root.iter():
        for declaration in element.attrib.pop("style", "").split(";"):
            name, _, value = (part.strip() for part in declaration.partition(":"))
            if name:
                element.set(name, value)
        classes: list[str] = []
        for name, value in list(element.attrib.items()):
            if name in {"fill", "stroke"} and value == "currentColor":
                value = "var(--ink)"  # noqa: PLW2901
            found = _VARIABLE.fullmatch(value)
            if found is not None:
                element.set(name, LIGHT[found[1]])
                classes.append(f"{name}-{found[1]}")
                met.add((name, found[1]))
        if classes:
            element.set("class", " ".join(classes))
    return met


def _dark(pairs: set[tuple[str, str]]) -> str:
    rules = "".join(f".{name}-{colour}{{{name}:{DARK[colour]}}}" for name, colour in sorted(pairs))
    return f"@media (prefers-color-scheme:dark){{{rules}}}"
