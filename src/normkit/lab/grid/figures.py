"""Pictures of a grid: what every run came to, held-out loss over the learning rate, and the curves of the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from normkit.lab.claim import Evidence
from normkit.lab.figures import Chart, Drawing, Panel, Series, band
from normkit.lab.grid.reading import Side, outcomes
from normkit.lab.model.training import CURVE
from normkit.lab.numbers import number

_ROW, _COLUMN, _MARK, _HEAD = 46, 92, 11, 44
_WORDS = {"trained": "trained", "stuck": "stuck at the unigram plateau", "diverged": "diverged"}
_NOTHING = math.log(256)  # the loss of knowing nothing: where runs that diverged are drawn


def outcome_map(e: Evidence, sides: Mapping[str, Side]) -> Drawing:
    """Draw one mark a run, a row for each side and warm-up, a column for each learning rate.

    The three outcomes differ in shape: a filled disc, a ring with a bar, a cross. Under the marks stands the mean
    held-out loss of the runs that did not diverge.
    """
    rows = [(label, side, warmup) for label, side in sides.items() for warmup in side.warmups(e)]
    rates = sorted({lr for _, side, warmup in rows for lr, _ in side.rates(e, warmup)})
    several = len({warmup for *_, warmup in rows}) > 1
    names = [f"{label}, warm-up {warmup}" if several else label for label, _, warmup in rows]
    left = max(60.0, 7.4 * max(map(len, names)) + 16)
    parts = [_text(left + (i + 0.5) * _COLUMN, 14, f"lr {lr:g}", "muted") for i, lr in enumerate(rates)]
    said: list[str] = []
    for row, (name, (_, side, warmup)) in enumerate(zip(names, rows, strict=True)):
        y = _HEAD + row * _ROW
        parts.append(f'<path d="M0 {y - 20}H{left + len(rates) * _COLUMN:g}" stroke="var(--rule)"/>')
        parts.append(_text(left - 10, y, name, "ink", anchor="end"))
        for lr, path in side.rates(e, warmup):
            x = left + (rates.index(lr) + 0.5) * _COLUMN
            parts += _cell(e, path, x, y)
            counts = outcomes(e, path)
            told = ", ".join(f"{counts[key]} {words}" for key, words in _WORDS.items() if counts[key])
            said.append(f"{name}, lr {lr:g}: {told}")
    height = _HEAD + len(rows) * _ROW + 14
    parts += _legend(height - 8)
    width = max(left + len(rates) * _COLUMN, 430)
    return Drawing(
        caption="What every run came to, a mark each: ● trained, ⊖ stuck at the unigram plateau, ✕ diverged. Below, "
        "the mean held-out loss in nats per byte of those that did not diverge.",
        alt=". ".join(said) + ".",
        svg=f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" fill="none">'
        + "".join(parts)
        + "</svg>",
    )


def _cell(e: Evidence, path: str, x: float, y: float) -> list[str]:
    found = [str(outcome) for outcome in e.values(path, "outcome")]
    step = min(_MARK * 1.3, (_COLUMN - 12) / len(found))
    first = x - step * (len(found) - 1) / 2
    marks = [_mark(outcome, first + i * step, y - 5, min(_MARK, step * 0.8)) for i, outcome in enumerate(found)]
    losses = [loss for loss in e.values(path, "heldout") if loss is not None]
    text = number(math.fsum(losses) / len(losses), 3) if losses else "–"
    return [*marks, _text(x, y + 12, text, "muted", 11)]


def _mark(outcome: str, x: float, y: float, size: float) -> str:
    r = size / 2
    if outcome == "trained":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="var(--holds)"/>'
    if outcome == "stuck":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r - 0.8:.1f}" stroke="var(--undecided)" stroke-width="1.6"/>'
            f'<path d="M{x - r + 1:.1f} {y:.1f}H{x + r - 1:.1f}" stroke="var(--undecided)" stroke-width="1.6"/>'
        )
    a, b, c, d = x - r, x + r, y - r, y + r
    return (
        f'<path d="M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}M{a:.1f} {d:.1f}L{b:.1f} {c:.1f}" '
        'stroke="var(--fails)" stroke-width="2.2"/>'
    )


def _legend(y: float) -> list[str]:
    parts: list[str] = []
    x = 8.0
    for outcome, words in _WORDS.items():
        parts += [_mark(outcome, x, y - 4, _MARK), _text(x + 11, y - 4, words, "muted", 11, anchor="start")]
        x += 30 + 6.2 * len(words)
    return parts


def _text(x: float, y: float, text: str, colour: str, size: float = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" text-anchor="{anchor}" '
        f'style="font-size:{size:g}px;fill:var(--{colour})">{escape(text)}</text>'
    )


def loss_chart(e: Evidence, sides: Mapping[str, Side]) -> Chart:
    """Draw held-out loss over the learning rate; runs that were stuck or diverged have marks of their own."""
    panels: list[Panel] = []
    first = next(iter(sides.values()))
    for warmup in first.warmups(e):
        series: list[Series] = []
        stuck: list[tuple[float, float]] = []
        diverged: list[tuple[float, float]] = []
        for label, side in sides.items():
            # Where sides differ by their warm-up, each has one of its own.
            own = side.warmups(e)
            rates = side.rates(e, warmup if warmup in own else own[0])
            series += _line(e, label, rates)
            for lr, path in rates:
                for outcome, loss in zip(e.values(path, "outcome"), e.values(path, "heldout"), strict=True):
                    if outcome == "stuck":
                        stuck.append((lr, float(loss)))
                    elif outcome == "diverged":
                        diverged.append((lr, _NOTHING))
        series += [_points("stuck", stuck), _points("diverged (drawn at ln 256)", diverged)]
        rates = [lr for lr, _ in first.rates(e, warmup)]
        plateau = first.unigram(e)
        series.append(Series("unigram plateau", rates, [plateau] * len(rates), kind="reference"))
        panels.append(
            Panel(
                f"warm-up {warmup}" if len(first.warmups(e)) > 1 else "what training comes to",
                "learning rate",
                "held-out loss (nats/byte)",
                [s for s in series if s.x],
                x_scale="log",
            )
        )
    return Chart(
        caption="Held-out loss over the learning rate. Lines join the means of runs that trained, bands are their "
        "min–max over seeds; runs that got stuck or diverged are marked one by one.",
        alt="A line for each side over the learning rate, with marks of their own for runs that got stuck or diverged.",
        panels=panels[:4],
    )


def _line(e: Evidence, label: str, rates: list[tuple[float, str]]) -> list[Series]:
    found: list[tuple[float, list[float]]] = []
    for lr, path in rates:
        pairs = zip(e.values(path, "outcome"), e.values(path, "heldout"), strict=True)
        losses = [float(loss) for outcome, loss in pairs if outcome == "trained"]
        if losses:
            found.append((lr, losses))
    if not found:
        return []
    means = [math.fsum(losses) / len(losses) for _, losses in found]
    low, high = [min(losses) for _, losses in found], [max(losses) for _, losses in found]
    return [Series(label, [lr for lr, _ in found], means, low, high)]


def _points(label: str, points: list[tuple[float, float]]) -> Series:
    return Series(label, [x for x, _ in points], [y for _, y in points], kind="points")


def curves_chart(e: Evidence, sides: Mapping[str, Side]) -> Chart:
    """Draw the training curves of each side at its best, as far as all its seeds go."""
    series: list[Series] = []
    for label, side in sides.items():
        rows: list[list[float]] = e.values(side.best(e), "curve")
        points = min(map(len, rows))
        if points:
            x = [CURVE * (i + 0.5) for i in range(points)]
            series.append(band(f"{label}, {side.told(e)}", x, [row[:points] for row in rows]))
    steps = [x for s in series for x in s.x] or [0.0]
    plateau = next(iter(sides.values())).unigram(e)
    ends = [min(steps), max(steps)]
    series.append(Series("unigram plateau", ends, [plateau, plateau], kind="reference"))
    return Chart(
        caption="Training loss of each at its best, the mean of every ten steps. Bands: min–max over seeds.",
        alt="A falling curve for each side that trains, a level one near the dashed plateau where it is stuck.",
        panels=[Panel("training at the best point", "step", "training loss (nats/byte)", series)],
    )
