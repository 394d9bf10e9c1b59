"""Pictures of the two tables: where norms sit around a residual stream, and which elements share a statistic.

Everything drawn is read from the row. Every part of a wiring has its own place, so that two pictures differ
exactly where their rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from normkit.coverage import Coverage
from normkit.lab.figures import Drawing
from normkit.placement import Wiring

_STREAM, _BRANCH = 118, 48  # heights of the residual stream and of the branch above it
_TAP, _BEFORE, _SUBLAYER, _AFTER_SUBLAYER, _SUM, _AFTER_SUM, _END, _FINAL = 40, 84, 148, 212, 256, 302, 340, 388
_DEPTHS = (6, 24, 96)


def wiring(row: Wiring) -> Drawing:
    """Draw one step of a residual stream as the row describes it."""
    parts = [
        _text(14, _STREAM, "x", "muted", style="italic"),
        _arrow(22, _STREAM, _END, _STREAM),
        f'<circle cx="{_TAP}" cy="{_STREAM}" r="3" fill="var(--ink)"/>',
        _path(f"M{_TAP} {_STREAM}V{_BRANCH}H{_SUM}"),
        _arrow(_SUM, _BRANCH, _SUM, _STREAM - 11),
        *(_norm(_BEFORE, _BRANCH) if row.before else ()),
        *_sublayers(row),
        *(_norm(_AFTER_SUBLAYER, _BRANCH) if row.branch else ()),
        *(_scale((_TAP + _SUM) // 2) if row.scaled_residual else ()),
        *_sum(),
        *(_norm(_AFTER_SUM, _STREAM) if row.after else ()),
        *_end(row),
    ]
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 430 166" fill="none">{"".join(parts)}</svg>'
    return Drawing(row.formula, _say(row), svg)


def constants(row: Wiring) -> list[tuple[int, str, str]]:
    """Return (layers, α, β) for a few depths of a decoder; empty where both are 1 at every depth."""
    found = [(depth, row.constants(depth, "decoder-only")) for depth in _DEPTHS]
    if all(c.alpha == c.beta == 1 for _, c in found):
        return []
    return [(depth, f"{c.alpha:.3f}", f"{c.beta:.3f}") for depth, c in found]


def _say(row: Wiring) -> str:
    steps = ["The stream x is tapped"]
    if row.before:
        steps.append("the tap is normalised")
    steps.append("two sublayers read it side by side and are summed" if row.parallel else "a sublayer F reads it")
    if row.branch:
        steps.append("its output is normalised")
    steps.append(f"and is added to {'α times x' if row.scaled_residual else 'x'}")
    if row.after:
        steps.append("the sum is normalised")
    end = "A final norm follows the last layer." if row.final_norm else "No final norm follows the last layer."
    return f"{', '.join(steps)}. {end}"


def _text(x: float, y: float, text: str, colour: str, size: float = 14, style: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y + size * 0.35:.1f}" text-anchor="middle" '
        f'style="font-size:{size}px;font-style:{style};fill:var(--{colour})">{text}</text>'
    )


def _path(d: str) -> str:
    return f'<path d="{d}" stroke="var(--ink)" stroke-width="1.6"/>'


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    if y0 == y1:
        head = f"M{x1 - 6} {y1 - 4}L{x1} {y1}L{x1 - 6} {y1 + 4}"
    else:
        head = f"M{x1 - 4} {y1 - 6}L{x1} {y1}L{x1 + 4} {y1 - 6}"
    return _path(f"M{x0} {y0}L{x1} {y1}{head}")


def _box(x: float, y: float, text: str, width: float = 34, height: float = 30) -> Iterator[str]:
    yield (
        f'<rect x="{x - width / 2}" y="{y - height / 2}" width="{width}" height="{height}" rx="3" '
        'fill="var(--page)" stroke="var(--ink)" stroke-width="1.6"/>'
    )
    yield _text(x, y, text, "ink")


def _norm(x: float, y: float) -> Iterator[str]:
    yield f'<rect x="{x - 13}" y="{y - 17}" width="26" height="34" rx="13" fill="var(--accent)"/>'
    yield _text(x, y, "N", "page")


def _sublayers(row: Wiring) -> Iterator[str]:
    if not row.parallel:
        yield from _box(_SUBLAYER, _BRANCH, "F", 46, 34)
        return
    left, right = _SUBLAYER - 34, _SUBLAYER + 34
    for y, text in ((_BRANCH - 22, "F₁"), (_BRANCH + 22, "F₂")):
        yield _path(f"M{left} {_BRANCH}V{y}H{right}V{_BRANCH}")
        yield from _box(_SUBLAYER, y, text, 40, 26)
    yield f'<path d="M{left + 2} {_BRANCH}H{right - 2}" stroke="var(--page)" stroke-width="4"/>'
    yield f'<circle cx="{right}" cy="{_BRANCH}" r="3" fill="var(--ink)"/>'


def _scale(x: float) -> Iterator[str]:
    yield (
        f'<path d="M{x - 15} {_STREAM - 16}L{x + 17} {_STREAM}L{x - 15} {_STREAM + 16}Z" '
        'fill="var(--page)" stroke="var(--series-1)" stroke-width="1.8"/>'
    )
    yield _text(x - 4, _STREAM, "α", "series-1")


def _sum() -> Iterator[str]:
    yield f'<circle cx="{_SUM}" cy="{_STREAM}" r="11" fill="var(--page)" stroke="var(--ink)" stroke-width="1.6"/>'
    yield _path(f"M{_SUM - 5} {_STREAM}H{_SUM + 5}M{_SUM} {_STREAM - 5}V{_STREAM + 5}")


def _end(row: Wiring) -> Iterator[str]:
    yield (f'<path d="M{_END + 6} {_STREAM}H420" stroke="var(--axis)" stroke-width="1.6" stroke-dasharray="2 4"/>')
    if row.final_norm:
        yield (
            f'<rect x="{_FINAL - 13}" y="{_STREAM - 17}" width="26" height="34" rx="13" fill="var(--page)" '
            'stroke="var(--accent)" stroke-width="1.8" stroke-dasharray="4 3"/>'
        )
        yield _text(_FINAL, _STREAM, "N", "accent")
        yield _text(_FINAL, _STREAM + 30, "final", "muted", 12)


_SHAPE = (3, 4, 4)  # sequences, positions, channels of the tensor that is drawn
_GROUP = 2  # channels a group
_CELL, _DEEP = 30.0, (15.0, -11.0)


def coverage(row: Coverage) -> Drawing:
    """Draw an (N, L, C) tensor and mark every element that shares the statistic of the dotted one.

    Positions run to the right, channels upwards, sequences into the page.
    """
    n, length, channels = _SHAPE
    chosen = (0, length - 1, channels - 1)
    cells = []
    for points, element in _faces():
        mark = row.covers(chosen, element, _GROUP)
        fill, edge = ("accent", "page") if mark else ("raised", "axis")
        cells.append((mark, f'<path d="M{points}Z" fill="var(--{fill})" stroke="var(--{edge})"/>'))
    top = -n * _DEEP[1]
    ordered = "".join(svg for _, svg in sorted(cells, key=lambda c: c[0]))  # marked cells last: their edges show
    x, y = 26 + (length - 0.5) * _CELL, 8 + top + 0.5 * _CELL
    bottom = 8 + top + channels * _CELL
    labels = (
        _text(26 + length * _CELL / 2, bottom + 15, "positions L", "muted", 12)
        + f'<g transform="translate(13 {bottom - channels * _CELL / 2}) rotate(-90)">'
        + _text(0, 0, "channels C", "muted", 12)
        + "</g>"
        + _text(26 + length * _CELL + n * _DEEP[0] + 10, bottom + 2 + n * _DEEP[1] / 2, "N", "muted", 12)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 220 {bottom + 26}" fill="none">'
        f'{ordered}<circle cx="{x}" cy="{y}" r="4.5" fill="var(--page)"/>{labels}</svg>'
    )
    axes = ", ".join(row.axes)
    alt = (
        f"A block of {n} sequences by {length} positions by {channels} channels. One element is dotted; marked are "
        f"the elements that share its statistic, which runs over ({axes})."
    )
    return Drawing(f"{row.name}: over ({axes})", alt, svg)


def _faces() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the outline of every visible cell face with the element it belongs to."""
    n, length, channels = _SHAPE
    left, top = 26.0, 8.0 - n * _DEEP[1]

    def at(position: float, channel: float, sequence: float) -> str:
        x = left + position * _CELL + sequence * _DEEP[0]
        y = top + (channels - channel) * _CELL + sequence * _DEEP[1]
        return f"{x:g} {y:g}"

    for s in range(n):
        for p in range(length):
            corners = ((p, s), (p + 1, s), (p + 1, s + 1), (p, s + 1))
            yield "L".join(at(a, channels, b) for a, b in corners), (s, p, channels - 1)
        for c in range(channels):
            edges = ((c, s), (c + 1, s), (c + 1, s + 1), (c, s + 1))
            yield "L".join(at(length, a, b) for a, b in edges), (s, length - 1, c)
    for p in range(length):
        for c in range(channels):
            square = ((p, c), (p + 1, c), (p + 1, c + 1), (p, c + 1))
            yield "L".join(at(a, b, 0) for a, b in square), (0, p, c)
