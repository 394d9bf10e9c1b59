"""The page: a pure function of a run and its judged claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.coverage import COVERAGE
from normkit.lab.language import Words
from normkit.lab.numbers import number
from normkit.lab.report import drawings, palette
from normkit.lab.report.groups import by_sentence, grouped
from normkit.lab.report.surprise import OPENING, most_surprising
from normkit.lab.report.view import (
    KEYS,
    Badge,
    ClaimView,
    CriterionView,
    EntryView,
    FigureView,
    PanelView,
    badge,
    criterion_view,
    drawing_panel,
    entry_view,
    figures_of,
    flat,
    seeds,
)
from normkit.lab.rule_changes import RuleChange, rule_changes
from normkit.lab.runs.judged import FIGURES, MEASUREMENTS, Judged, Run
from normkit.lab.verdict import Verdict
from normkit.placement import WIRINGS, Wiring

_HERE = Path(__file__).parent
_DECIDED = ("holds", "corrected", "fails")  # a verdict that a control can turn round


@dataclass(frozen=True)
class WiringView:
    """A row of the wiring table with its picture and its constants at a few depths."""

    row: Wiring
    panel: PanelView
    constants: list[tuple[int, str, str]]


@dataclass(frozen=True)
class FindingView:
    """One of the findings that open the page: the claim, the number that contradicts its sentence, its picture."""

    claim: ClaimView
    number: CriterionView
    figures: tuple[FigureView, ...]


@dataclass(frozen=True)
class ChangeView:
    """A rule that was changed after its first run, with the verdicts of then and of now."""

    change: RuleChange
    before: Badge | None
    control_before: Badge | None
    entry: EntryView


def page(run: Run, judged: Sequence[Judged], words: Words | None = None) -> str:
    """Return the report of ``run`` as one HTML text that refers to nothing outside itself."""
    import jinja2
    from markupsafe import Markup

    words = words or Words()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # What stays English on a page of another language says so to screen readers and fonts.
    english = Markup(' lang="en"') if words.language != "en" else ""
    for name, shared in {"_": words, "words": words, "en": english}.items():
        environment.globals[name] = shared  # pyright: ignore[reportArgumentType]
    entries = [entry_view(j, run, words) for j in judged]
    claims = [entry for entry in entries if isinstance(entry, ClaimView)]
    counts = Counter(entry.badge.key for entry in entries)
    findings = _findings(judged, claims, words)
    opened = {id(finding.claim) for finding in findings}
    return environment.get_template("page.html.j2").render(
        style=palette.css() + (_HERE / "style.css").read_text(encoding="utf-8"),
        run=run,
        seeds=seeds(run.settings.seeds),
        entries=entries,
        claims=claims,
        groups=grouped(entries),
        sentences=by_sentence(entries),
        findings=findings,
        opening=OPENING,
        untestable=[entry for entry in entries if not isinstance(entry, ClaimView)],
        corrected=[c for key in ("fails", "corrected") for c in _of(claims, key) if id(c) not in opened],
        holding=_of(claims, "holds"),
        open=_of(claims, "undecided"),
        waiting=_of(claims, "waiting"),
        unmeasured=_of(claims, "unmeasured"),
        counts=[(k, words(verdict.value), counts[k]) for verdict, k in KEYS.items() if _shown(verdict, counts[k])],
        unflipped=[c for c in claims if c.badge.key in _DECIDED and c.judged.flipped is not True],
        changes=_changes(entries, words),
        wirings=[_wiring(row) for row in WIRINGS.values()],
        coverage=[(row, drawing_panel(drawings.coverage(row), f"coverage-{name}")) for name, row in COVERAGE.items()],
        settings=list(flat(run.settings.to_json())),
        environment=list(flat(run.environment)),
        measurements=MEASUREMENTS,
        figure_folder=FIGURES,
        spent=number(sum(m.seconds for m in run.measurements), 3),
    )


def _findings(judged: Sequence[Judged], claims: Sequence[ClaimView], words: Words) -> list[FindingView]:
    views = {id(view.judged): view for view in claims}
    return [
        FindingView(views[id(j)], criterion_view(worst, words), tuple(figures_of(j, words, prefix="top-", first=True)))
        for j, worst in most_surprising(judged)
    ]


def _changes(entries: Sequence[EntryView], words: Words) -> list[ChangeView]:
    by_id = {entry.judged.claim.id: entry for entry in entries}
    return [
        ChangeView(c, _told(c.verdict_before, words), _told(c.control_before, words), by_id[c.claim])
        for c in rule_changes()
        if c.claim in by_id
    ]


def _told(verdict: Verdict | None, words: Words) -> Badge | None:
    return None if verdict is None else badge(verdict, words)


def _of(claims: Sequence[ClaimView], key: str) -> list[ClaimView]:
    return [c for c in claims if c.badge.key == key]


def _shown(verdict: Verdict, count: int) -> bool:
    return count > 0 or verdict is not Verdict.UNTESTABLE


def _wiring(row: Wiring) -> WiringView:
    return WiringView(row, drawing_panel(drawings.wiring(row), f"wiring-{row.name}"), drawings.constants(row))
