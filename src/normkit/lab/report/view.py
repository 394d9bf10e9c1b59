"""What the page says, worked out before the template sees it: plain values, nothing left to compute or to trust."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.claim import Claim, Rule
from normkit.lab.figures import Chart, Drawing, Figure
from normkit.lab.language import Said, Words
from normkit.lab.numbers import estimate, number
from normkit.lab.report.charts import left_out, panel_svg
from normkit.lab.report.gauge import gauge
from normkit.lab.report.inline import inline
from normkit.lab.report.numbers import judged_on, measured, region
from normkit.lab.report.surprise import telling
from normkit.lab.report.tables import Table, tables_of
from normkit.lab.runs.judged import NOT_IN_QUICK, Judged, Run, last_line, summary_of
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, Judgement, Verdict, combine

KEYS = {
    Verdict.HOLDS: "holds",
    Verdict.CORRECTED: "corrected",
    Verdict.FAILS: "fails",
    Verdict.UNDECIDED: "undecided",
    Verdict.UNTESTABLE: "untestable",
}
_FEW = 2  # criteria that a line of the table of all claims shows


@dataclass(frozen=True)
class Badge:
    """A verdict's words with the key of its shape and colour."""

    key: str
    text: str


@dataclass(frozen=True)
class CriterionView:
    """A row of a criteria table; ``spread`` is mean ± interval, outcomes are at half, given and double tolerance."""

    name: str
    measured: str
    spread: str
    judged_on: str
    region: str
    tolerance: str
    reason: str
    gauge: str
    outcomes: tuple[str, str, str]


@dataclass(frozen=True)
class RuleView:
    """A rule, what it came to, and the criteria behind that; ``telling`` are the few for a line of a table."""

    title: str
    text: str
    origin: str
    outcome: str
    criteria: tuple[CriterionView, ...]
    telling: tuple[CriterionView, ...]


@dataclass(frozen=True)
class PanelView:
    """One panel: its heading, its picture, its numbers, and what the picture leaves out."""

    title: str
    svg: str
    tables: tuple[Table, ...]
    note: str


@dataclass(frozen=True)
class FigureView:
    """A numbered figure; ``file`` is the name under which it also stands beside the page, empty where it does not."""

    number: str
    caption: str
    panels: tuple[PanelView, ...]
    error: str = ""
    file: str = ""


@dataclass(frozen=True)
class EntryView:
    """What every entry of the catalogue has: a place on the page, its texts, a verdict, a line."""

    judged: Judged
    anchor: str
    said: Said
    badge: Badge
    summary: str


@dataclass(frozen=True)
class ClaimView(EntryView):
    """A claim's section."""

    seeds: str
    steady: str
    verdicts: tuple[Badge, Badge, Badge] | None  # at half, given and double tolerance
    rules: tuple[RuleView, ...]
    control_badge: Badge | None
    control_rules: tuple[RuleView, ...]
    roles: tuple[tuple[str, str, str], ...]
    figures: tuple[FigureView, ...]
    command: str
    cost: str


def entry_view(judged: Judged, run: Run, words: Words) -> EntryView:
    """Return all that the page says of one entry: a `ClaimView` where there is something to measure."""
    claim = judged.claim
    if claim.study is not None:
        return _claim(claim, judged, run, words)
    assert judged.judgement is not None, "what cannot be tested has its verdict from the start"
    said = words.said(claim)
    return EntryView(judged, anchor(claim.id), said, badge(judged.judgement.verdict, words), said.reason)


def anchor(claim: str) -> str:
    """Return the id of a claim's section."""
    return f"claim-{plain(claim)}"


def plain(claim: str) -> str:
    """Return a claim's id as it may stand in an id and in a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", claim)


def _claim(claim: Claim, judged: Judged, run: Run, words: Words) -> ClaimView:
    judgement, control = judged.judgement, judged.control_judgement
    ours = [m for m in run.measurements if m.study == claim.study.id]
    waiting = Badge("waiting", words("could not run" if judged.error else "waiting"))
    if judged.full_only:
        waiting = Badge("unmeasured", words("full only"))
    return ClaimView(
        judged=judged,
        anchor=anchor(claim.id),
        said=words.said(claim),
        badge=badge(judgement.verdict, words) if judgement else waiting,
        summary=_waiting(judged, len(ours), words) if judgement is None else summary_of(judged),
        seeds=_seeds(judged, words),
        steady=_steady(judgement, words) if judgement else "",
        verdicts=_verdicts(judgement, words) if judgement else None,
        rules=tuple(_rules(claim, judgement, words)),
        control_badge=badge(control.verdict, words) if control else None,
        control_rules=tuple(_rules(claim, control, words)) if control else (),
        roles=tuple(
            (role, claim.plays.get(role, words("as its role")), arm)
            for role, arm in (judged.control or claim.control).plays.items()
        ),
        figures=tuple(figures_of(judged, words)),
        command=command(claim, run.settings),
        cost=words("{n} measurements, {s} s", n=len(ours), s=number(sum(m.seconds for m in ours), 3)) if ours else "",
    )


def badge(verdict: Verdict, words: Words) -> Badge:
    """Return the badge of a verdict."""
    return Badge(KEYS[verdict], words(verdict.value))


def _verdicts(judgement: Judgement, words: Words) -> tuple[Badge, Badge, Badge]:
    half, given, double = (badge(v, words) for v in (judgement.at_half, judgement.given, judgement.at_double))
    return half, given, double


def command(claim: Claim, settings: Settings) -> str:
    """Return the command that measures this claim again under the run's settings."""
    mode = "full" if claim.study.full_only else settings.mode
    words = ["normkit", "lab", "run", claim.id, f"--{mode}", "--seeds", seeds(settings.seeds)]
    words += ["--out", f"runs/{claim.id}"]  # a folder of its own: nothing there is cached, nothing refused
    if claim.study.corpus and settings.corpus != "stdlib":
        words += ["--corpus", settings.corpus]
    if settings.device != "cpu":
        words += ["--device", settings.device]
    return shlex.join(words)


def seeds(values: Sequence[int]) -> str:
    """Write seeds as the command line takes them: ``0-4`` or ``0,3,7``."""
    if len(values) > 1 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ",".join(map(str, values))


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for every leaf of nested settings."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)


def drawing_panel(drawing: Drawing, prefix: str) -> PanelView:
    """Return a drawing as a panel without numbers of its own."""
    svg = inline(drawing.svg, prefix=prefix, title=drawing.caption, description=drawing.alt, css_class="drawing")
    return PanelView("", svg, (), "")


def _waiting(judged: Judged, done: int, words: Words) -> str:
    if judged.full_only:
        return words(NOT_IN_QUICK)
    if judged.error:
        return judged.error
    return words("{done} of {all} measurements made.", done=done, all=done + len(judged.missing))


def _seeds(judged: Judged, words: Words) -> str:
    if judged.evidence is None or not judged.evidence.seeds:
        return ""
    used = judged.evidence.seeds
    return (
        words("seed {n}", n=used[0]) if len(used) == 1 else words("{n} seeds ({which})", n=len(used), which=seeds(used))
    )


def _steady(judgement: Judgement, words: Words) -> str:
    if judgement.at_half == judgement.given == judgement.at_double:
        return words("The verdict is the same at half and at double tolerance.")
    return words(
        "The verdict depends on the tolerance: {half} at half, {given} at the given, {double} at double tolerance. So "
        "it is not decided.",
        half=words(judgement.at_half),
        given=words(judgement.given),
        double=words(judgement.at_double),
    )


def _rules(claim: Claim, judgement: Judgement | None, words: Words) -> Iterator[RuleView]:
    yield _rule(words("The sentence as it stands"), claim.literal, judgement.literal if judgement else (), words)
    if claim.corrected is not None:
        yield _rule(words("The corrected sentence"), claim.corrected, judgement.corrected if judgement else (), words)


def _rule(title: str, rule: Rule, criteria: Sequence[Criterion], words: Words) -> RuleView:
    outcome = combine([c.outcome() for c in criteria]).value if criteria else ""
    views = {id(c): criterion_view(c, words) for c in criteria}
    few = tuple(views[id(c)] for c in telling(criteria, _FEW))
    return RuleView(title, rule.text, rule.origin, outcome, tuple(views[id(c)] for c in criteria), few)


def criterion_view(c: Criterion, words: Words) -> CriterionView:
    """Return a criterion as a row of a table."""
    outcomes = (c.outcome(0.5).value, c.outcome(1.0).value, c.outcome(2.0).value)
    on, spread = judged_on(c, words), estimate(list(c.values))
    return CriterionView(c.name, measured(c), spread, on, region(c), number(c.tolerance), c.reason, gauge(c), outcomes)


def figures_of(judged: Judged, words: Words, prefix: str = "", first: bool = False) -> Iterator[FigureView]:
    """Yield a judged claim's figures, the first alone if asked; ``prefix`` keeps a second copy's ids apart."""
    claim = judged.claim
    if claim.study is None or judged.evidence is None or judged.judgement is None:
        return
    try:
        figures = list(claim.figures(judged.evidence))
    except Exception as error:  # one claim's fault must not cost the reader the page
        yield FigureView("", "", (), words("The figures could not be made: {error}", error=last_line(error)))
        return
    for i, figure in enumerate(figures[:1] if first else figures, start=1):
        label = words("Figure {n}", n=claim.id + (f".{i}" if len(figures) > 1 else ""))
        try:
            panels = tuple(_panels(figure, f"{prefix}{anchor(claim.id)}-{i}", words))
            yield FigureView(label, figure.caption, panels, file=file_name(claim.id, i))
        except Exception as error:
            problem = words("This figure could not be drawn: {error}", error=last_line(error))
            yield FigureView(label, figure.caption, (), problem)


def file_name(claim: str, figure: int) -> str:
    """Return the name of a figure's file."""
    return f"{plain(claim)}-{figure}.svg"


def _panels(figure: Figure, prefix: str, words: Words) -> Iterator[PanelView]:
    if isinstance(figure, Drawing):
        yield drawing_panel(figure, prefix)
        return
    for i, panel in enumerate(figure.panels, start=1):
        svg = panel_svg(panel, prefix=f"{prefix}-{i}", description=describe(figure, i))
        missing = left_out(panel)
        note = words("In the table only, having no place on these axes: {n} of the values.", n=missing)
        yield PanelView(panel.title, svg, tuple(tables_of(panel)), note if missing else "")


def describe(chart: Chart, place: int) -> str:
    """Return the text alternative of one panel: the chart's for the first, axes and labels for the others."""
    if place == 1:
        return chart.alt
    panel = chart.panels[place - 1]
    names = "; ".join(s.label for s in panel.series if s.label)
    return f"Panel {place} of {len(chart.panels)}: {panel.y_label} against {panel.x_label}. {names}".strip()
