"""The lab in Chinese: nothing of the page is left out, and no translation has lost sight of its original."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from normkit.lab import language
from normkit.lab.claim import Claim
from normkit.lab.claims import catalogue
from normkit.lab.language import Words, fingerprint, words
from normkit.lab.report.groups import TITLES
from normkit.lab.runs.judged import Run, judge_claim, read_run, read_verdicts, summary_of
from normkit.lab.untestable import Entry
from normkit.lab.verdict import Outcome, Verdict

TEXTS: dict[str, str] = json.loads((Path(language.__file__).parent / "zh" / "texts.json").read_text(encoding="utf-8"))
LAB = Path(language.__file__).parents[1]
PAGE: dict[str, str] = json.loads((LAB / "language" / "zh" / "page.json").read_text(encoding="utf-8"))
CLAIMS: list[dict[str, str]] = json.loads((LAB / "language" / "zh" / "claims.json").read_text(encoding="utf-8"))
COMMITTED = LAB.parents[2] / "docs" / "reference-run" / "verdicts.json"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*|[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def texts_of_the_page() -> set[str]:
    """Collect what templates pass to `_` and code passes to `words`, and the words that data bring."""
    found = {v.value for v in Verdict} | {o.value for o in Outcome} | set(TITLES.values()) | {"tested", "conjecture"}
    found |= {"not measured", "claim", "verdict", "control", "title", "measured"}  # heads and states of the terminal
    for file in (LAB / "report" / "templates").glob("*.j2"):
        found |= set(re.findall(r'_\("((?:[^"\\]|\\.)*)"', file.read_text(encoding="utf-8")))
    for file in LAB.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "words" and call.args:
                constants = [c.value for c in ast.walk(call.args[0]) if isinstance(c, ast.Constant)]
                found |= {c for c in constants if isinstance(c, str)}
    return found


def test_every_text_of_the_page_has_its_chinese_one_and_no_other_is_kept() -> None:
    assert texts_of_the_page() == PAGE.keys()


def test_templates_hold_no_words_of_their_own() -> None:
    for file in (LAB / "report" / "templates").glob("*.j2"):
        text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|<!doctype html>|<[^>]*>", " ", file.read_text(encoding="utf-8"))
        left = set(re.findall(r"[A-Za-z]{2,}", text)) - {"normkit", "lab"}
        assert left == set(), file.name


@pytest.mark.parametrize("english", PAGE)
def test_a_translation_takes_the_same_values(english: str) -> None:
    holes = re.findall(r"\{(\w+)\}", english)
    assert sorted(holes) == sorted(re.findall(r"\{(\w+)\}", PAGE[english]))
    values = {name: f"<{name}>" for name in holes}
    assert all(value in Words("zh")(english, **values) for value in values.values())


def test_every_claim_of_the_committed_run_says_its_sentence_in_chinese() -> None:
    published = {entry["id"] for entry in json.loads(COMMITTED.read_text())}
    english = [c for c in catalogue() if c.id in published and Words("zh").said(c).html == "en"]
    assert [(c.id, fingerprint(c)) for c in english] == [], "add these to zh/claims.json, or translate them anew"


def texts_of(claim: Claim, run: Run) -> list[str]:
    """Return what the page tells of a claim in words that the claim itself has."""
    rules = [claim.literal.text] + ([claim.corrected.text] if claim.corrected else [])
    controls = [claim.control.text] + ([claim.planted.text] if claim.planted else [])
    judged = judge_claim(claim, run)
    results = [summary_of(judged)] if judged.judgement is not None else []
    return [claim.measured, *rules, *controls, claim.explanation.text, *results]


def test_rules_controls_reasons_and_results_of_the_committed_run_are_told_in_chinese() -> None:
    run = read_run(COMMITTED.parent)
    published = {entry["id"] for entry in read_verdicts(COMMITTED.parent)}
    claims = [c for c in catalogue() if isinstance(c, Claim) and c.id in published]
    missing = {c.id: [t for t in texts_of(c, run) if Words("zh").told(t).html == "en"] for c in claims}
    assert {name: texts for name, texts in missing.items() if texts} == {}, "translate these in zh/texts.json"


@pytest.mark.parametrize("english", TEXTS)
def test_a_told_text_keeps_the_numbers_of_its_original(english: str) -> None:
    holes = re.findall(r"\{\d+\}", english)
    assert sorted(holes) == sorted(re.findall(r"\{\d+\}", TEXTS[english])), "each number once"
    if not holes:
        assert set(NUMBER.findall(english)) == set(NUMBER.findall(TEXTS[english]))
    assert re.search("[一-鿿]", TEXTS[english])


def test_numbers_of_a_result_take_their_places_in_its_translation() -> None:
    english = next(text for text in TEXTS if text.startswith("slope of ln rms per layer"))
    said = Words("zh").told(english.format("0.02", "0.8", "1", "1.2×10⁻³"))
    assert said.html == "zh-Hans"
    assert said.text == TEXTS[english].format("0.02", "0.8", "1", "1.2×10⁻³")
    assert Words("zh").told(english.format("0.02", "0.8", "1", "many")).html == "en", "another sentence"
    assert Words().told(english).text == english


TRANSLATED = [c for c in catalogue() if Words("zh").said(c).html != "en"]


@pytest.mark.parametrize("claim", TRANSLATED, ids=lambda c: c.id)
def test_a_translation_has_the_numbers_of_its_original(claim: Entry) -> None:
    said = Words("zh").said(claim)
    for part in ("sentence", "correction"):
        english = str(getattr(claim, part, ""))
        assert set(NUMBER.findall(english)) == set(NUMBER.findall(getattr(said, part))), part
        assert bool(english) == bool(re.search("[一-鿿]", getattr(said, part)))
    assert re.search("[一-鿿]", said.title)


def test_a_claim_without_a_translation_stays_english_and_says_so() -> None:
    known = next(c for c in catalogue() if c.id == "A1")
    assert Words("zh").said(known).html == "zh-Hans"
    said = Words("zh").said(replace(known, id="A1z"))
    assert (said.sentence, said.html) == (known.sentence, "en")
    edited = replace(known, sentence=known.sentence.replace("a little", "a lot"))
    assert Words("zh").said(edited).html == "en", "a translation of what the sentence no longer says"
    assert Words().said(known).sentence == known.sentence


def test_a_language_that_the_lab_does_not_speak_is_refused() -> None:
    with pytest.raises(ValueError, match="--lang 'tlh': expected en or zh"):
        words("tlh")


def test_values_are_never_read_as_a_pattern() -> None:
    assert Words("zh")("Figure {n}", n="{0.__class__}") == "图 {0.__class__}"
