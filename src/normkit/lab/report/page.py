"""The page: a pure function of a run and its judged claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.coverage import COVERAGE
from normkit.lab.numbers import number
from normkit.lab.report import drawings, palette
from normkit.lab.report.view import KEYS, ClaimView, PanelView, drawing_panel, entry_view, flat, seeds
from normkit.lab.runs.judged import MEASUREMENTS, Judged, Run
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


def page(run: Run, judged: Sequence[Judged]) -> str:
    """Return the report of ``run`` as one HTML text that refers to nothing outside itself."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.from_string((_HERE / "template.html.j2").read_text(encoding="utf-8"))
    entries = [entry_view(j, run) for j in judged]
    claims = [entry for entry in entries if isinstance(entry, ClaimView)]
    counts = Counter(entry.badge.key for entry in entries)
    return template.render(
        style=palette.css() + (_HERE / "style.css").read_text(encoding="utf-8"),
        run=run,
        seeds=seeds(run.settings.seeds),
        entries=entries,
        claims=claims,
        untestable=[entry for entry in entries if not isinstance(entry, ClaimView)],
        corrected=_of(claims, "fails") + _of(claims, "corrected"),
        holding=_of(claims, "holds"),
        open=_of(claims, "undecided"),
        waiting=_of(claims, "waiting"),
        counts=[(key, verdict.value, counts[key]) for verdict, key in KEYS.items() if _shown(verdict, counts[key])],
        unflipped=[c for c in claims if c.badge.key in _DECIDED and c.judged.flipped is not True],
        wirings=[_wiring(row) for row in WIRINGS.values()],
        coverage=[(row, drawing_panel(drawings.coverage(row), f"coverage-{name}")) for name, row in COVERAGE.items()],
        settings=list(flat(run.settings.to_json())),
        environment=list(flat(run.environment)),
        measurements=MEASUREMENTS,
        spent=number(sum(m.seconds for m in run.measurements), 3),
    )


def _of(claims: Sequence[ClaimView], key: str) -> list[ClaimView]:
    return [c for c in claims if c.badge.key == key]


def _shown(verdict: Verdict, count: int) -> bool:
    return count > 0 or verdict is not Verdict.UNTESTABLE


def _wiring(row: Wiring) -> WiringView:
    return WiringView(row, drawing_panel(drawings.wiring(row), f"wiring-{row.name}"), drawings.constants(row))
