"""The lab's words in English and in simplified Chinese: the page's own, the verdicts', and the claims' sentences.

English is what the code says. A Chinese text is looked up by it (the page's words, ``zh/page.json``; rules, controls,
reasons and results, ``zh/texts.json``) or by a claim's id (``zh/claims.json``), where it names the English text it is a
translation of. What has no Chinese text stays English and is marked as such, so a new claim needs no translation to be
measured and read.

What a reader needs for the verdict is translated: the sentence, its correction, both rules, the control, the result and
why. What belongs to the measurement stays as the code has it, in one form for both languages: figures with their labels
and captions, whose files the two pages share, names of criteria and arms, the reasons of tolerances, and sources.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from normkit.lab.untestable import Entry

Language: TypeAlias = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

_HERE = Path(__file__).parent
_RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9.^⁻])[−-]?(?:\d+(?:\.\d+)?(?:×10[{_RAISED}]+)?|10[{_RAISED}]+|∞)(?![A-Za-z0-9{_RAISED}])"
    r"|\bNaN\b|\bnot a number\b"  # the latter in runs of an earlier day
)


@dataclass(frozen=True)
class Said:
    """A claim's own texts in one language.

    Args:
        title: a few words.
        sentence: what the article says, in our words.
        correction: the corrected sentence, empty where there is none.
        reason: why it cannot be tested, empty where it can.
        html: the language they are in, as HTML's ``lang`` names it.
    """

    title: str
    sentence: str
    correction: str
    reason: str
    html: str


@dataclass(frozen=True)
class Told:
    """A text with the language it is in, as HTML's ``lang`` names it."""

    text: str
    html: str


@dataclass(frozen=True)
class Words:
    """One language. Calling it translates a text of the page.

    Example:
        >>> Words("zh")("Contents"), Words()("Contents"), Words()("{n} seeds", n=3)
        ('目录', 'Contents', '3 seeds')
    """

    language: Language = "en"

    def __call__(self, english: str, /, **values: object) -> str:
        """Return ``english`` in this language, with ``values`` put into its braces."""
        text = english if self.language == "en" else _page().get(english, english)
        return text.format(**values) if values else text

    @property
    def html(self) -> str:
        """The language as HTML's ``lang`` names it."""
        return {"en": "en", "zh": "zh-Hans"}[self.language]

    def told(self, english: str) -> Told:
        """Return a text of the claims' own, rules and results for instance, in this language if there is one.

        A result is looked up without its numbers, which then take their places in the translation.
        """
        if self.language == "en":
            return Told(english, "en")
        if english in _texts():
            return Told(_texts()[english], self.html)
        form, numbers = without_numbers(english)
        found = _texts().get(form) if numbers else None
        return Told(found.format(*numbers), self.html) if found is not None else Told(english, "en")

    def said(self, claim: Entry) -> Said:
        """Return a claim's texts in this language, or its English ones where there are no others."""
        correction = claim.correction if claim.study is not None else ""
        reason = "" if claim.study is not None else claim.reason
        found = _claims().get((claim.id, fingerprint(claim))) if self.language == "zh" else None
        if found is None:
            return Said(claim.title, claim.sentence, correction, reason, "en")
        return Said(found["title"], found["sentence"], found.get("correction", ""), found.get("reason", ""), self.html)


def without_numbers(text: str) -> tuple[str, list[str]]:
    """Return a text with its numbers replaced by ``{0}``, ``{1}`` …, and the numbers.

    Digits inside a name (float16), an exponent (2⁻²⁴) or a decimal without its zero (.5) belong to the words.

    Example:
        >>> without_numbers("float16 is off by 1.5×10⁻³ at 2 × σ")
        ('float16 is off by {0} at {1} × σ', ['1.5×10⁻³', '2'])
    """
    numbers: list[str] = []

    def place(found: re.Match[str]) -> str:
        numbers.append(found[0])
        return f"{{{len(numbers) - 1}}}"

    return _NUMBER.sub(place, text), numbers


def fingerprint(claim: Entry) -> str:
    """Return eight digits that change with a claim's English texts, so that no translation outlives its original."""
    own = (claim.correction, "") if claim.study is not None else ("", claim.reason)
    return hashlib.sha256("\n".join((claim.title, claim.sentence, *own)).encode()).hexdigest()[:8]


def words(language: str) -> Words:
    """Return the words of ``language``.

    Raises:
        ValueError: it is none of the lab's languages.
    """
    if language not in LANGUAGES:
        raise ValueError(f"--lang {language!r}: expected {' or '.join(LANGUAGES)}")
    return Words(language)


@cache
def _page() -> dict[str, str]:
    return json.loads((_HERE / "zh" / "page.json").read_text(encoding="utf-8"))


@cache
def _texts() -> dict[str, str]:
    return json.loads((_HERE / "zh" / "texts.json").read_text(encoding="utf-8"))


@cache
def _claims() -> dict[tuple[str, str], dict[str, str]]:
    entries = json.loads((_HERE / "zh" / "claims.json").read_text(encoding="utf-8"))
    return {(entry["id"], entry["of"]): entry for entry in entries}
