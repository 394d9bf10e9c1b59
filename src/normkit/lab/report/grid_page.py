"""The page of a grid that `normkit lab train` ran: verdicts in pairs, what every run came to, and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.lab.claim import Claim, Evidence
from normkit.lab.figures import Drawing, Figure
from normkit.lab.grid.curves import CURVES
from normkit.lab.grid.figures import outcome_map
from normkit.lab.grid.options import command
from normkit.lab.grid.reading import Side
from normkit.lab.grid.study import STUDY, WATCHED, grid_of
from normkit.lab.grid.verdicts import label
from normkit.lab.numbers import number
from normkit.lab.report import palette
from normkit.lab.report.charts import left_out, panel_svg
from normkit.lab.report.gauge import gauge
from normkit.lab.report.inline import inline
from normkit.lab.report.numbers import measured, region
from normkit.lab.report.tables import Table, tables_of
from normkit.lab.report.view import KEYS, flat, seeds
from normkit.lab.runs.judged import MEASUREMENTS, Judged, Run, last_line, summary_of
from normkit.lab.verdict import Criterion, Judgement

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A criterion as the page shows it, with its outcomes at half, given and double tolerance."""

    name: str
    measured: str
    judged_on: str
    region: str
    tolerance: str
    reason: str
    gauge: str
    outcomes: tuple[str, str, str]


@dataclass(frozen=True)
class Picture:
    """A figure: panels as (title, SVG, note), the tables under them, a caption, or why there is none."""

    caption: str
    panels: tuple[tuple[str, str, str], ...]
    tables: tuple[Table, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Entry:
    """One claim of the grid."""

    judged: Judged
    claim: Claim
    key: str
    verdict: str
    summary: str
    rules: tuple[tuple[str, str, tuple[Row, ...]], ...]
    control: str
    control_rules: tuple[tuple[str, str, tuple[Row, ...]], ...]
    pictures: tuple[Picture, ...]


def grid_page(run: Run, judged: Sequence[Judged]) -> str:
    """Return the report of a grid as one HTML text that refers to nothing outside itself."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((_HERE / "grid.html.j2").read_text(encoding="utf-8"))
    grid = grid_of(run.settings)
    flags = {
        f"{m.arm}, seed {m.seed}": m.values["flags"]
        for m in sorted(run.measurements, key=lambda m: (m.arm, m.seed))
        if m.study == STUDY.id and m.values.get("flags")
    }
    return template.render(
        style=palette.css() + (_HERE / "style.css").read_text(encoding="utf-8"),
        run=run,
        seeds=seeds(run.settings.seeds),
        entries=[_entry(j) for j in judged],
        overview=list(_overview(run)),
        flags=flags,
        watched=WATCHED,
        curves=CURVES,
        command=command(grid, run.settings, seeds(run.settings.seeds)),
        settings=[
            *((k, v) for k, v in flat(run.settings.to_json()) if k != "grid"),
            *flat(vars(grid)),
        ],
        environment=list(flat(run.environment)),
        measurements=MEASUREMENTS,
        spent=number(sum(m.seconds for m in run.measurements), 3),
    )


def _overview(run: Run) -> Iterator[Picture]:
    """Draw the contenders whose runs are all there, on one map."""
    grid = grid_of(run.settings)
    ours = [m for m in run.measurements if m.study == STUDY.id]
    have = {(m.arm, m.seed) for m in ours}
    ends = tuple(point.name for point in grid.points)
    whole = [
        name
        for name in grid.contenders
        if all((f"{name}/{end}", seed) in have for end in ends for seed in run.settings.seeds)
    ]
    if whole:
        evidence = Evidence(ours, {f"side-{i}": name for i, name in enumerate(whole)}, run.settings)
        sides = {label(name): Side(f"side-{i}", ends) for i, name in enumerate(whole)}
        yield _picture(outcome_map(evidence, sides), "overview")


def _entry(judged: Judged) -> Entry:
    claim, judgement, control = judged.claim, judged.judgement, judged.control_judgement
    assert claim.study is not None, "a grid holds nothing that cannot be tested"
    return Entry(
        judged,
        claim,
        KEYS[judgement.verdict] if judgement else "waiting",
        judgement.verdict.value if judgement else "could not run" if judged.error else "waiting",
        summary_of(judged),
        tuple(_rules(claim, judgement)),
        control.verdict.value if control else "",
        tuple(_rules(claim, control)) if control else (),
        tuple(_pictures(claim, judged)),
    )


def _rules(claim: Claim, judgement: Judgement | None) -> Iterator[tuple[str, str, tuple[Row, ...]]]:
    yield "The sentence", claim.literal.text, tuple(map(_row, judgement.literal if judgement else ()))
    if claim.corrected is not None:
        yield "No difference", claim.corrected.text, tuple(map(_row, judgement.corrected if judgement else ()))


def _row(c: Criterion) -> Row:
    outcomes = (c.outcome(0.5).value, c.outcome(1.0).value, c.outcome(2.0).value)
    judged = "one seed: no interval" if c.known is not None else f"mean of {len(c.values)} seeds, 95 % interval"
    return Row(c.name, measured(c), judged, region(c), number(c.tolerance), c.reason, gauge(c), outcomes)


def _pictures(claim: Claim, judged: Judged) -> Iterator[Picture]:
    if judged.evidence is None or judged.judgement is None:
        return
    try:
        figures = list(claim.figures(judged.evidence))
    except Exception as error:  # one claim's fault must not cost the reader the page
        yield Picture("", (), error=f"The figures could not be made: {last_line(error)}")
        return
    for i, figure in enumerate(figures, start=1):
        try:
            yield _picture(figure, f"{claim.id}-{i}")
        except Exception as error:
            yield Picture(figure.caption, (), error=f"This figure could not be drawn: {last_line(error)}")


def _picture(figure: Figure, prefix: str) -> Picture:
    if isinstance(figure, Drawing):
        svg = inline(figure.svg, prefix=prefix, title=figure.caption, description=figure.alt, css_class="drawing")
        return Picture(figure.caption, (("", svg, ""),))
    panels: list[tuple[str, str, str]] = []
    for i, panel in enumerate(figure.panels, start=1):
        svg = panel_svg(panel, prefix=f"{prefix}-{i}", description=figure.alt)
        missing = left_out(panel)
        note = f"In the table only, having no place on these axes: {missing} of the values." if missing else ""
        panels.append((panel.title, svg, note))
    return Picture(figure.caption, tuple(panels), tuple(t for panel in figure.panels for t in tables_of(panel)))
