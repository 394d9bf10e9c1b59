"""Sections of the page: claims by the letter of their ids, and the article's sentences with who judges them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from normkit.lab.report.view import EntryView

TITLES = {
    "A": "Depth and the residual stream",
    "B": "Why BatchNorm helps",
    "C": "Statistics of a batch",
    "D": "LayerNorm and RMSNorm",
    "F": "Post-Norm and Pre-Norm",
    "G": "DeepNorm and initialisation",
    "H": "More wirings",
    "I": "Other ways to keep a scale",
    "J": "QK-norm",
    "K": "Models that are the same function",
    "L": "Rounding",
    "M": "Massive activations",
    "P": "Norms around a sublayer",
    "R": "Speed, and the article's own code",
    "U": "What no experiment settles",
    "X": "Beyond the numbered sentences",
}


@dataclass(frozen=True)
class Group:
    """Entries of one letter; ``title`` is English, or empty for a letter without one."""

    letter: str
    anchor: str
    title: str
    entries: tuple[EntryView, ...]


def grouped(entries: Sequence[EntryView]) -> list[Group]:
    """Return the entries by the first letter of their ids, in alphabetical order of the letters."""
    letters: dict[str, list[EntryView]] = {}
    for entry in entries:
        letters.setdefault(entry.judged.claim.id[:1].upper(), []).append(entry)
    return [
        Group(letter, f"group-{re.sub(r'[^A-Z0-9]', '-', letter)}", TITLES.get(letter, ""), tuple(found))
        for letter, found in sorted(letters.items())
    ]


def by_sentence(entries: Sequence[EntryView]) -> list[tuple[int, tuple[EntryView, ...]]]:
    """Return the article's sentences in order, each with the entries that cover it."""
    found: dict[int, list[EntryView]] = {}
    for entry in entries:
        for number in entry.judged.claim.sentences:
            found.setdefault(number, []).append(entry)
    return [(number, tuple(found[number])) for number in sorted(found)]
