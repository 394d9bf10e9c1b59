"""Sentences that no experiment can settle, and the catalogue's entry: a claim to measure or one of these.

An entry has an id, a title, a sentence with its numbers and source, and a study: who measures, or None. Whoever
plans, judges or prints asks for the study; nothing else tells the two kinds apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from normkit.lab.claim import Claim


@dataclass(frozen=True)
class Untestable:
    """A sentence of the article that stays open whatever is measured.

    Args:
        id: name in the catalogue, e.g. ``"U1"``.
        title: a few words.
        sentence: what the article says, in English and in our words.
        sentences: the numbers of the article's sentences it covers.
        source: article section, paper.
        reason: why no measurement settles it, in a line.
        record: what a reader finds instead: statements, each with its source.
    """

    id: str
    title: str
    sentence: str
    sentences: tuple[int, ...]
    source: str
    reason: str
    record: tuple[str, ...] = ()
    study: ClassVar[None] = None

    def __post_init__(self) -> None:
        assert self.reason, f"{self.id}: not testable, and no reason why"


Entry: TypeAlias = Claim | Untestable
