"""How wide a text is, before a browser says so: a little more than it will be, so that nothing is cut."""

from __future__ import annotations

import unicodedata

_EMS = dict.fromkeys("iljI.,:;'|!·⁻¹", 0.34) | dict.fromkeys(" tfr()[]/-", 0.41) | dict.fromkeys("mwMW@%—", 0.98)


def width(text: str, size: float) -> float:
    """Return an upper estimate, in pixels, of ``text`` set in a sans-serif of ``size``."""
    return size * sum(_ems(c) for c in text)


def _ems(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":
        return 1.0
    return _EMS.get(character, 0.76 if character.isupper() else 0.64)


def lines(text: str, room: float, size: float) -> list[str]:
    """Break ``text`` at spaces into lines that fit ``room``; a longer word is cut, after a hyphen or slash if any."""
    found: list[str] = []
    current = ""
    for whole in text.split():
        word = whole
        joined = f"{current} {word}".strip()
        if width(joined, size) <= room:
            current = joined
            continue
        if current:
            found.append(current)
        while width(word, size) > room:
            most = next(i for i in range(len(word), 0, -1) if i == 1 or width(word[:i], size) <= room)
            cut = max((i for i in range(2, most + 1) if word[i - 1] in "-/"), default=most)
            found.append(word[:cut])
            word = word[cut:]
        current = word
    return [*found, current] if current else found or [""]
