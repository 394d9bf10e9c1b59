"""The page as a whole: what it says, in which order, and that it reaches for nothing outside itself."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_fakes as fakes

from normkit.lab import report
from normkit.lab.claim import Claim
from normkit.lab.language import Language, Words
from normkit.lab.report.charts import _cache
from normkit.lab.report.page import page
from normkit.lab.report.view import ClaimView, command, entry_view, flat, seeds
from normkit.lab.rule_changes import rule_changes
from normkit.lab.runs.judged import RunError, judge_claim

VOID = {"meta", "link", "img", "br", "hr", "input", "path", "rect", "circle", "use", "line"}


class Reader(HTMLParser):
    """Collects elements with their attributes and text, and checks that tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"style", "script"}:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def html() -> str:
    run = fakes.run()
    return page(run, fakes.judged(run))


@pytest.fixture(scope="module")
def read(html: str) -> Reader:
    return Reader(html)


def test_the_same_run_gives_the_same_bytes_even_when_nothing_is_cached(html: str) -> None:
    _cache.clear()
    run = fakes.run()
    assert page(run, fakes.judged(run)) == html


@pytest.mark.slow
def test_the_same_bytes_in_another_process(html: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import report_fakes as f\n"
        "from normkit.lab.report.page import page\n"
        "r = f.run(); sys.stdout.buffer.write(page(r, f.judged(r)).encode())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, check=True)
    assert done.stdout.decode() == html


def test_markup_is_balanced_and_ids_are_unique_and_references_resolve(read: Reader) -> None:
    assert read.wrong == []
    assert read.open == []
    ids = [a["id"] for _, a in read.elements if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = {a["href"][1:] for _, a in read.elements if a.get("href", "").startswith("#")}
    wanted |= {i for _, a in read.elements for i in a.get("aria-labelledby", "").split()}
    assert wanted <= set(ids)


def test_nothing_outside_the_file_is_asked_for(html: str, read: Reader) -> None:
    for tag, attributes in read.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "image", "base", "form"}
        for name in ("href", "xlink:href", "src", "srcset", "data", "action", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), (tag, attributes)
    for place in re.findall(r"url\(([^)]*)", html):
        assert place.startswith("#")
    assert "@import" not in html
    assert "http://" not in html
    assert "https://" not in html
    assert any("default-src 'none'" in a.get("content", "") for a in read.all("meta"))


def test_hostile_names_are_text(html: str, read: Reader) -> None:
    assert "<img" not in html
    assert "onerror=alert(1)>" not in html  # the bracket that would end a tag is escaped
    assert fakes.HOSTILE in read.words


def test_hostile_titles_arms_and_environments_are_text() -> None:
    attack = "\"><b onclick='x'>&amp;"
    run = fakes.run()
    run = replace(run, environment={attack: {attack: attack}}, notices=(attack,))
    first = fakes.judged(run)[0]
    control = replace(first.claim.control, plays={attack: attack})
    claim = replace(first.claim, id="A<1", title=attack, sentence=attack, plays={attack: "real"}, control=control)
    read = Reader(page(run, [replace(first, claim=claim)]))
    assert not any("onclick" in a for _, a in read.elements)
    assert read.words.count(attack) >= 6
    assert read.wrong == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_hostile_rules_controls_reasons_and_results_are_text(language: Language) -> None:
    attack = "\"><b onclick='x'>{0}&amp;7"
    run = fakes.run()
    first = fakes.judged(run)[0]
    told = replace(
        first.claim,
        measured=attack,
        literal=replace(first.claim.literal, text=attack),
        control=replace(first.claim.control, text=attack),
        explanation=replace(first.claim.explanation, text=attack),
        summary=lambda _: attack,
    )
    read = Reader(page(run, [replace(first, claim=told, control=None)], Words(language)))
    assert not any("onclick" in a for _, a in read.elements)
    assert read.words.count(attack) >= 6
    assert read.wrong == []


def test_no_clock_and_no_machine_path(html: str) -> None:
    assert str(Path(__file__).resolve().parents[3]) not in html
    assert not re.search(r"\b20\d\d-\d\d-\d\dT", html)


def test_findings_come_first_and_what_is_wrong_comes_before_what_is_right(html: str) -> None:
    html = html[html.index("<main") :]
    heads = [">The most surprising findings<", ">Also wrong, or right only with a correction<", ">Right<"]
    heads += [">Not decided<", ">Waiting<", ">Not testable here</h2>", ">All claims<", ">By the article’s sentences<"]
    heads += [">Rules changed after their first run<", '<article id="claim-A1"', ">The wirings<", ">This run<"]
    places = [html.index(head) for head in heads]
    assert places == sorted(places)
    opening, wrong = html[places[0] : places[1]], html[places[1] : places[2]]
    assert opening.index("RMSNorm 2.1 × slower") < opening.index("The toy residual stream")
    assert "Recovering the identity" in wrong  # it fails, but so does its control
    assert "Recovering the identity" not in opening
    assert "The toy residual stream" not in wrong
    assert "Gain a layer" not in opening + wrong


def test_counts_are_the_verdicts(html: str) -> None:
    judged = fakes.judged()
    found = dict(re.findall(r'<li class="(\w+)"><svg class="icon".*?</svg><b>(\d+)</b>', html))
    assert found == {"holds": "5", "corrected": "2", "fails": "2", "undecided": "1", "untestable": "1", "waiting": "2"}
    assert sum(map(int, found.values())) == len(judged)


def test_every_claim_has_a_row_a_section_and_a_command(html: str, read: Reader) -> None:
    table = html[html.index('<table class="claims">') : html.index('<article id="claim-A1"')]
    for claim in fakes.catalogue():
        assert f'href="#claim-{claim.id}"' in table
        if claim.study is None:
            continue
        section = html[html.index(f'<article id="claim-{claim.id}"') :].split("</article>")[0]
        assert f"normkit lab run {claim.id} --quick --seeds 0-4" in section
        assert claim.study.id == "half" or claim.explanation.status in section


def test_waiting_claims_say_how_far_they_are_and_draw_nothing(html: str) -> None:
    section = html[html.index('<article id="claim-Z8"') :].split("</article>")[0]
    assert "4 of 10 measurements made." in section
    assert "<figure" not in section
    assert "The slope lies within 0.1 of 0.2." in section  # the rule stands before the measurement


def left_to_a_full_run(mode: str) -> tuple[str, str]:
    """The page of a run with a claim that only a full run measures, which nobody has measured; and its section."""
    claim = next(c for c in fakes.catalogue() if c.id == "A4")
    assert isinstance(claim, Claim)
    claim = replace(claim, id="D9", sentences=(7,), study=fakes.study("long", full_only=True))
    run = fakes.run(mode=mode)
    html = page(run, [judge_claim(claim, run), *fakes.judged(run)])
    return html, html[html.index('<article id="claim-D9"') :].split("</article>")[0]


def test_what_a_quick_run_leaves_to_a_full_one_is_counted_apart_and_says_its_sentence() -> None:
    html, section = left_to_a_full_run("quick")
    assert Reader(html).wrong == []
    counts = dict(re.findall(r'<li class="(\w+)"><svg class="icon".*?</svg><b>(\d+)</b>', html))
    assert counts["unmeasured"] == "1"
    assert (counts["waiting"], counts["fails"], counts["undecided"]) == ("2", "2", "1")
    assert "Under Pre-Norm the outputs of deep sublayers shrink" in section
    words = Reader(section).words
    assert "not measured in a quick run; run --full" in words
    assert "full only" in words
    assert "normkit lab run D9 --full --seeds 0-4" in words  # the quick command would be refused
    assert "measurements made" not in words
    assert "<figure" not in section
    brief = html[html.index(">Measured in a full run only</h2>") :].split("</section>")[0]
    assert brief.count('href="#claim-') == 1
    assert "Under Pre-Norm the outputs of deep sublayers shrink" in brief
    row = next(r for r in html.split("<tr>") if '<a href="#claim-D9"><b>D9</b>' in r)
    assert "not measured in a quick run; run --full" in row
    assert 'href="#claim-D9" class="unmeasured"' in html[html.index('<h2 id="sentences">') :]


def test_a_full_run_waits_for_it_like_for_any_other() -> None:
    html, section = left_to_a_full_run("full")
    assert "0 of 10 measurements made." in section
    assert "run --full" not in html.replace("run D9 --full", "")
    assert 'class="unmeasured"' not in html


def test_what_a_quick_run_leaves_out_is_said_in_chinese() -> None:
    claim = next(c for c in fakes.catalogue() if c.id == "A4")
    assert isinstance(claim, Claim)
    run = fakes.run()
    judged = judge_claim(replace(claim, study=fakes.study("long", full_only=True)), run)
    words = Reader(page(run, [judged], Words("zh"))).words
    assert "快速运行不测量" in words
    assert "只在完整运行中测量" in words
    assert "not measured in a quick run" not in words


def test_measurements_of_an_older_quick_run_do_not_make_a_verdict_of_it() -> None:
    claim = next(c for c in fakes.catalogue() if c.id == "A4")
    assert isinstance(claim, Claim)
    assert judge_claim(claim, fakes.run()).judgement is not None
    long = replace(claim, study=replace(claim.study, full_only=True))
    assert judge_claim(long, fakes.run()).full_only
    assert judge_claim(long, fakes.run()).judgement is None
    assert judge_claim(long, fakes.run(mode="full")).judgement is not None


def test_what_cannot_be_tested_has_a_short_section_of_its_own(html: str) -> None:
    section = html[html.index('<h2 id="untestable">') :].split("</section>")[0]
    assert 'id="claim-H9"' in section
    assert html.count('id="claim-H9"') == 1
    words = Reader(section).words
    for part in fakes.catalogue():
        assert (part.title in words) == (part.study is None)
    for text in (
        "not testable here",
        "There is no agreement about why it works.",
        "Agreement cannot be measured & never will be.",
        "One reads it so: Smith 2018. Another otherwise: Jones <2020>.",
        "Article, “Beginnings”.",
    ):
        assert text in words
    for absent in ("normkit lab run", "Negative control", "The rule", "<figure"):
        assert absent not in section
    row = next(r for r in html.split("<tr>") if '<a href="#claim-H9"><b>H9</b>' in r)
    assert "not testable here" in row
    assert "Agreement cannot be measured" in row
    assert '<a href="#claim-H9" class="untestable">' in html[: html.index("<main")]


def test_without_such_sentences_there_is_no_such_section() -> None:
    run = fakes.run()
    measured = [j for j in fakes.judged(run) if j.claim.study is not None]
    assert "Not testable here" not in page(run, measured)
    assert 'id="untestable"' not in page(run, measured)


def test_a_run_without_any_measurement_opens() -> None:
    run = replace(fakes.run(), measurements=(), environment={}, notices=())
    read = Reader(page(run, fakes.judged(run)))
    assert read.words.count("0 of 10 measurements made.") >= 3
    assert "Nothing is measured yet" in read.words
    assert read.wrong == []


def test_a_control_that_does_not_flip_is_said_up_front(html: str) -> None:
    top = html[: html.index("The most surprising findings")]
    assert "Read with care" in top
    assert '<a href="#claim-D3">D3</a>' in top
    assert '<a href="#claim-L3">' not in top[top.index("Read with care") :]  # undecided: nothing to flip
    run = fakes.run()
    flipped = [j for j in fakes.judged(run) if j.claim.id not in {"D3"}]
    assert "Where a verdict was reached, the control came out the opposite way" in page(run, flipped)


def test_a_claim_that_could_not_run_says_why() -> None:
    run = fakes.run()
    broken = replace(fakes.judged(run)[-1], error="RuntimeError: <no> memory")
    words = Reader(page(run, [broken])).words
    assert "Could not be judged. RuntimeError: <no> memory" in words
    assert "could not run" in words


def test_a_figure_that_fails_costs_only_itself() -> None:
    run = fakes.run()

    def broken(e: object) -> list[object]:
        raise ZeroDivisionError("by zero")

    judged = fakes.judged(run)
    judged[0] = replace(judged[0], claim=replace(judged[0].claim, figures=broken))
    words = Reader(page(run, judged)).words
    assert "The figures could not be made: ZeroDivisionError: by zero" in words
    assert "Figure F3" in words


def test_criteria_show_interval_region_reason_and_three_outcomes(html: str) -> None:
    section = html[html.index('<article id="claim-A1"') :].split("</article>")[0]
    criteria = section[section.index('<table class="criteria">') :]
    row = next(r for r in criteria.split("<tr>") if "slope of ln" in r)
    assert re.search(r"<b>0\.\d+ ± 0\.\d+</b>", row)
    assert "0.18 … 0.22" in row
    assert "a fifth of the exponent" in row
    assert row.count('class="outcome') == 3


def test_every_figure_has_a_text_alternative_and_every_chart_its_numbers(html: str, read: Reader) -> None:
    ids = {a["id"] for tag, a in read.elements if tag in {"title", "desc"} and "id" in a}
    pictures = [a for a in read.all("svg") if "aria-hidden" not in a]
    assert len(pictures) > 20
    for picture in pictures:
        assert picture["role"] == "img"
        assert set(picture["aria-labelledby"].split()) <= ids
    for figure in re.findall(r'<figure class="figure.*?</figure>', html, re.DOTALL):
        if 'class="chart"' in figure:
            assert "<details>" in figure
            assert '<table class="numbers">' in figure
        assert re.search(r"<desc[^>]*>[^<]{10,}", figure)


def test_reading_order_for_the_keyboard(read: Reader) -> None:
    links = [a for tag, a in read.elements if tag == "a"]
    assert links[0]["href"] == "#main"
    assert all(a.get("tabindex", "0") in {"0", "-1"} for _, a in read.elements)
    regions = [a for _, a in read.elements if a.get("class", "").startswith("scroll")]
    assert regions
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in regions)


def test_the_table_of_all_claims_tells_rules_spread_three_verdicts_and_the_control(html: str) -> None:
    table = html[html.index('<table class="claims">') : html.index('<h2 id="sentences">')]
    row = next(r for r in table.split("<tr>") if 'href="#claim-A2"' in r)
    words = Reader(row).words
    assert "The sentence as it stands. The slope lies within 0.1 of 0.5. rule from the sentence" in words
    assert "The corrected sentence. The slope lies within 0.1 of 0.2. rule from the theory" in words
    assert re.search(r"0\.\d+ ± 0\.\d+ ✕ failed slope of ln", words)
    assert re.search(r"0\.\d+ ± 0\.\d+ ✓ passed slope of ln", words)
    assert row.count('href="#shape-corrected"') == 1 + 3
    assert "fails ✓ flipped" in words
    undecided = next(r for r in table.split("<tr>") if 'href="#claim-L3"' in r)
    shapes = re.findall(r'href="#shape-(\w+)"', undecided[undecided.index('class="three"') :])
    assert len(set(shapes[:3])) > 1  # it is not decided because these differ


def test_rules_changed_after_their_first_run_stand_with_their_old_verdict(html: str) -> None:
    section = html[html.index('<h2 id="changes">') :].split("</section>")[0]
    words = Reader(section).words
    for change in rule_changes():
        if change.claim in {c.id for c in fakes.catalogue()}:
            verdict = change.verdict_before.value if change.verdict_before else "verdict not written down"
            control = f" control: {change.control_before.value}" if change.control_before else ""
            assert f"{change.before} {verdict}{control}" in words
            assert change.why in words
    assert "F1" in words
    article = html[html.index('<article id="claim-F1"') :].split("</article>")[0]
    assert "The rule, changed after its first run" in article
    assert html.count("The rule, changed after its first run") == 1


def test_every_sentence_of_the_article_leads_to_its_claims(html: str) -> None:
    section = html[html.index('<h2 id="sentences">') :].split("</section>")[0]
    for claim in fakes.catalogue():
        assert section.count(f'href="#claim-{claim.id}"') == len(set(claim.sentences))
    numbers = [int(n) for n in re.findall(r'<span class="n">(\d+)', section)]
    assert numbers == sorted({n for c in fakes.catalogue() for n in c.sentences})


def test_in_chinese_what_is_not_translated_is_english_and_says_so() -> None:
    run = fakes.run()
    html = page(run, fakes.judged(run), Words("zh"))
    read = Reader(html)
    assert ("html", {"lang": "zh-Hans"}) in read.elements
    assert read.wrong == []
    assert "最出人意料的结论" in read.words
    assert "修正后成立" in read.words
    sentence = "Adding 64 layers of noise of size 0.1 to a unit stream"
    assert all(
        html[: m.start()].endswith('<span lang="en">') for m in re.finditer(sentence, html)
    )  # these made-up claims have no translation
    assert read.words.count("未译") > 20
    assert html.count('lang="en"') > 100
    assert "<img" not in html
    assert fakes.HOSTILE in read.words


def test_command_quotes_and_names_what_differs_from_the_defaults() -> None:
    run = fakes.run(seeds=(100, 101, 102), mode="full", device="cuda")
    judged = {j.claim.id: j for j in fakes.judged(run)}
    expected = "normkit lab run A2 --full --seeds 100-102 --out runs/A2 --device cuda"
    assert command(judged["A2"].claim, run.settings) == expected
    assert "--corpus '</script>" in command(judged["F3"].claim, run.settings)
    view = entry_view(judged["Z9"], run, Words())
    assert isinstance(view, ClaimView)
    assert view.command.startswith("normkit lab run Z9")


def test_seeds_and_settings_as_text() -> None:
    assert seeds((0, 1, 2)) == "0-2"
    assert seeds((3,)) == "3"
    assert seeds((0, 2, 5)) == "0,2,5"
    found = dict(flat({"a": {"b": 1, "c": "x"}, "d": [1], "e": {}}))
    assert found == {"a.b": "1", "a.c": "x", "d": "[1]", "e": "{}"}


def test_importing_the_report_loads_no_plotting_and_no_templates() -> None:
    code = "import normkit.lab.report, sys; print({'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_write_report_replaces_the_page_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "catalogue", fakes.catalogue)
    fakes.write(tmp_path)
    path = report.write_report(tmp_path)
    first = path.read_bytes()
    assert path == tmp_path / "report.html"
    assert first.decode() == report.render(tmp_path)
    assert report.write_report(tmp_path).read_bytes() == first
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"environment.json", "figures", "measurements.jsonl", "report.html", "settings.json"}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        report.write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.write(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"report needs jinja2.*pip install normkit\[lab\]"):
        report.render(tmp_path)
