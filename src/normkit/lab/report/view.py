"""What the page says, worked out before the template sees it: plain values, nothing left to compute or to trust."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.claim import Claim, Evidence, Rule
from normkit.lab.figures import Chart, Drawing, Figure
from normkit.lab.numbers import number
from normkit.lab.report.charts import left_out, panel_svg
from normkit.lab.report.gauge import gauge
from normkit.lab.report.inline import inline
from normkit.lab.report.numbers import judged_on, measured, region
from normkit.lab.report.tables import Table, tables_of
from normkit.lab.runs.judged import Judged, Run, last_line, summary_of
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, Judgement, Verdict, combine

KEYS = {
    Verdict.HOLDS: "holds",
    Verdict.CORRECTED: "corrected",
    Verdict.FAILS: "fails",
    Verdict.UNDECIDED: "undecided",
    Verdict.UNTESTABLE: "untestable",
}


@dataclass(frozen=True)
class Badge:
    """A verdict's words with the key of its shape and colour."""

    key: str
    text: str


WAITING = Badge("waiting", "waiting")


@dataclass(frozen=True)
class CriterionView:
    """A row of a criteria table; outcomes at half, given and double tolerance."""

    name: str
    measured: str
    judged_on: str
    region: str
    tolerance: str
    reason: str
    gauge: str
    outcomes: tuple[str, str, str]


@dataclass(frozen=True)
class RuleView:
    """A rule, what it came to, and the criteria behind that."""

    title: str
    text: str
    origin: str
    outcome: str
    criteria: tuple[CriterionView, ...]


@dataclass(frozen=True)
class PanelView:
    """One panel: its heading, its picture, its numbers, and what the picture leaves out."""

    title: str
    svg: str
    tables: tuple[Table, ...]
    note: str


@dataclass(frozen=True)
class FigureView:
    """A numbered figure."""

    number: str
    caption: str
    panels: tuple[PanelView, ...]
    error: str = ""


@dataclass(frozen=True)
class EntryView:
    """What every entry of the catalogue has: a place on the page, a verdict, a line."""

    judged: Judged
    anchor: str
    badge: Badge
    summary: str


@dataclass(frozen=True)
class ClaimView(EntryView):
    """A claim's section."""

    seeds: str
    steady: str
    rules: tuple[RuleView, ...]
    control_badge: Badge | None
    control_rules: tuple[RuleView, ...]
    roles: tuple[tuple[str, str, str], ...]
    figures: tuple[FigureView, ...]
    command: str
    cost: str


def entry_view(judged: Judged, run: Run) -> EntryView:
    """Return all that the page says of one entry: a `ClaimView` where there is something to measure."""
    claim = judged.claim
    anchor = "claim-" + re.sub(r"[^A-Za-z0-9]+", "-", claim.id)
    if claim.study is not None:
        return _claim(claim, judged, run, anchor)
    assert judged.judgement is not None, "what cannot be tested has its verdict from the start"
    return EntryView(judged, anchor, badge(judged.judgement), summary_of(judged))


def _claim(claim: Claim, judged: Judged, run: Run, anchor: str) -> ClaimView:
    judgement, control = judged.judgement, judged.control_judgement
    ours = [m for m in run.measurements if m.study == claim.study.id]
    return ClaimView(
        judged=judged,
        anchor=anchor,
        badge=badge(judgement) if judgement else Badge("waiting", "could not run" if judged.error else "waiting"),
        summary=_waiting(judged, len(ours)) if judgement is None else summary_of(judged),
        seeds=_seeds(judged),
        steady=_steady(judgement) if judgement else "",
        rules=tuple(_rules(claim, judgement)),
        control_badge=badge(control) if control else None,
        control_rules=tuple(_rules(claim, control)) if control else (),
        roles=tuple(
            (role, claim.plays.get(role, "as its role"), arm)
            for role, arm in (judged.control or claim.control).plays.items()
        ),
        figures=tuple(_figures(claim, judged.evidence, anchor)) if judged.evidence and judgement else (),
        command=command(claim, run.settings),
        cost=f"{len(ours)} measurements, {number(sum(m.seconds for m in ours), 3)} s" if ours else "",
    )


def badge(judgement: Judgement) -> Badge:
    """Return the badge of a verdict."""
    return Badge(KEYS[judgement.verdict], judgement.verdict.value)


def command(claim: Claim, settings: Settings) -> str:
    """Return the command that measures this claim again under the run's settings."""
    words = ["normkit", "lab", "run", claim.id, f"--{settings.mode}", "--seeds", seeds(settings.seeds)]
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


def _waiting(judged: Judged, done: int) -> str:
    if judged.error:
        return judged.error
    return f"{done} of {done + len(judged.missing)} measurements made."


def _seeds(judged: Judged) -> str:
    if judged.evidence is None or not judged.evidence.seeds:
        return ""
    used = judged.evidence.seeds
    return f"seed {used[0]}" if len(used) == 1 else f"{len(used)} seeds ({seeds(used)})"


def _steady(judgement: Judgement) -> str:
    if judgement.at_half == judgement.given == judgement.at_double:
        return "The verdict is the same at half and at double tolerance."
    return (
        f"The verdict depends on the tolerance: {judgement.at_half} at half, {judgement.given} at the given, "
        f"{judgement.at_double} at double tolerance. So it is not decided."
    )


def _rules(claim: Claim, judgement: Judgement | None) -> Iterator[RuleView]:
    yield _rule("The sentence as it stands", claim.literal, judgement.literal if judgement else ())
    if claim.corrected is not None:
        yield _rule("The corrected sentence", claim.corrected, judgement.corrected if judgement else ())


def _rule(title: str, rule: Rule, criteria: Sequence[Criterion]) -> RuleView:
    outcome = combine([c.outcome() for c in criteria]).value if criteria else ""
    return RuleView(title, rule.text, rule.origin, outcome, tuple(map(_criterion, criteria)))


def _criterion(c: Criterion) -> CriterionView:
    outcomes = (c.outcome(0.5).value, c.outcome(1.0).value, c.outcome(2.0).value)
    return CriterionView(
        c.name, measured(c), judged_on(c), region(c), number(c.tolerance), c.reason, gauge(c), outcomes
    )


def _figures(claim: Claim, evidence: Evidence, anchor: str) -> Iterator[FigureView]:
    try:
        figures = list(claim.figures(evidence))
    except Exception as error:  # one claim's fault must not cost the reader the page
        yield FigureView("", "", (), f"The figures could not be made: {last_line(error)}")
        return
    for i, figure in enumerate(figures, start=1):
        label = f"Figure {claim.id}" + (f".{i}" if len(figures) > 1 else "")
        try:
            yield FigureView(label, figure.caption, tuple(_panels(figure, f"{anchor}-{i}")))
        except Exception as error:
            yield FigureView(label, figure.caption, (), f"This figure could not be drawn: {last_line(error)}")


def _panels(figure: Figure, prefix: str) -> Iterator[PanelView]:
    if isinstance(figure, Drawing):
        yield drawing_panel(figure, prefix)
        return
    for i, panel in enumerate(figure.panels, start=1):
        svg = panel_svg(panel, prefix=f"{prefix}-{i}", description=_describe(figure, i))
        missing = left_out(panel)
        note = f"In the table only, having no place on these axes: {missing} of the values." if missing else ""
        yield PanelView(panel.title, svg, tuple(tables_of(panel)), note)


def _describe(chart: Chart, place: int) -> str:
    if place == 1:
        return chart.alt
    panel = chart.panels[place - 1]
    names = "; ".join(s.label for s in panel.series if s.label)
    return f"Panel {place} of {len(chart.panels)}: {panel.y_label} against {panel.x_label}. {names}".strip()
