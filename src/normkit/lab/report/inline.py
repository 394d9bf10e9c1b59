"""SVG texts made fit to stand inside one HTML page: unique ids, a text alternative, nothing active."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from normkit.lab.report.palette import themed

_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"font:\s*([^;]*?)(\d[\d.]*)px[^;]*")
_ACTIVE = {"script", "foreignObject", "iframe", "image", "animate", "set", "a", "style"}


def inline(svg: str, *, prefix: str, title: str, description: str, css_class: str) -> str:
    """Return ``svg`` as an element for an HTML page.

    Ids are kept only where something refers to them, and then begin with ``prefix``. ``title`` and
    ``description`` become what a screen reader says. Whatever could run or fetch is refused.

    Raises:
        ValueError: it is no well-formed SVG, or it holds an active element, a handler or an outside reference.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"expected a well-formed SVG, got {error}; mend the drawing's text") from error
    if _local(root.tag) != "svg":
        raise ValueError(f"expected an <svg> element, got <{_local(root.tag)}>")
    used = _referenced(root)
    for element in root.iter():
        _clean(element, used, prefix)
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    root.attrib.update({"role": "img", "aria-labelledby": f"{prefix}-t {prefix}-d", "class": css_class})
    _say(root, "desc", f"{prefix}-d", description)
    _say(root, "title", f"{prefix}-t", title)
    _no_tails(root)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _referenced(root: ElementTree.Element) -> set[str]:
    found: set[str] = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if _local(name) == "href":
                found.add(value.removeprefix("#"))
            found.update(_REFERENCE.findall(value))
    return found


def _clean(element: ElementTree.Element, used: set[str], prefix: str) -> None:
    element.tag = _local(element.tag)
    if element.tag in _ACTIVE:
        raise ValueError(f"expected a drawing that neither runs nor fetches, got <{element.tag}>; remove it")
    attributes: dict[str, str] = {}
    for full, value in element.attrib.items():
        name = _local(full)
        if name.startswith("on") or (name == "href" and not value.startswith("#")):
            raise ValueError(f"expected a drawing that neither runs nor fetches, got {name}={value!r}; remove it")
        if name == "id":
            if value in used:
                attributes["id"] = f"{prefix}-{value}"
        elif name == "href":
            attributes["href"] = f"#{prefix}-{value[1:]}"
        else:
            attributes[name] = themed(_FONT.sub(_size, _REFERENCE.sub(rf"url(#{prefix}-\1)", value)))
    for name, value in attributes.items():
        if "url(" in value.replace(f"url(#{prefix}-", ""):
            raise ValueError(f"expected a drawing that fetches nothing, got {name}={value!r}; remove it")
    element.attrib.clear()
    element.attrib.update(attributes)


def _size(match: re.Match[str]) -> str:
    weight = "font-weight: bold; " if "bold" in match[1] or "700" in match[1] else ""
    return f"{weight}font-size: {match[2]}px"


def _say(root: ElementTree.Element, tag: str, identity: str, text: str) -> None:
    for old in root.findall(tag):
        root.remove(old)
    element = ElementTree.Element(tag, {"id": identity})
    element.text = text
    root.insert(0, element)


def _no_tails(root: ElementTree.Element) -> None:
    """Drop the indentation between elements: it is a third of the bytes."""
    for element in root.iter():
        if element.tag in {"text", "tspan", "title", "desc"}:
            continue
        if element.text is not None and not element.text.strip():
            element.text = None
        for child in element:
            if child.tail is not None and not child.tail.strip():
                child.tail = None
