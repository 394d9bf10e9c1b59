"""A criterion at a glance: the interval against the region, with the regions of half and double tolerance."""

from __future__ import annotations

import math

from normkit.lab.verdict import Criterion, interval

_WIDTH, _HEIGHT = 190.0, 26.0


def gauge(criterion: Criterion) -> str:
    """Return a small SVG; the numbers beside it say the same, so screen readers skip it."""
    values = [v for v in criterion.values if math.isfinite(v)]
    marks = _marks(criterion, values)
    low, high = _range(criterion, [v for mark in marks for v in mark])

    def x(value: float) -> float:
        return 4 + (min(max(value, low), high) - low) / (high - low) * (_WIDTH - 8)

    parts = [f'<svg class="gauge" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" fill="none" aria-hidden="true">']
    parts.append(f'<path d="M4 13H{_WIDTH - 4:g}" stroke="var(--rule)"/>')
    for scale, opacity in ((2.0, 0.14), (1.0, 0.22), (0.5, 0.3)):
        a, b = (x(v) for v in criterion.region(scale))
        a, b = (a, b) if b - a >= 2 else ((a + b) / 2 - 1, (a + b) / 2 + 1)
        parts.append(
            f'<rect x="{a:.1f}" y="4" width="{b - a:.1f}" height="18" fill="var(--accent)" opacity="{opacity}"/>'
        )
    edges = [x(edge) for edge in criterion.region() if math.isfinite(edge)]
    parts.extend(f'<path d="M{at:.1f} 2V24" stroke="var(--accent)" stroke-width="1.3"/>' for at in edges)
    for a, middle, b in marks:
        if b > a:
            whisker = f"M{x(a):.1f} 13H{x(b):.1f}M{x(a):.1f} 9V17M{x(b):.1f} 9V17"
            parts.append(f'<path d="{whisker}" stroke="var(--ink)" stroke-width="1.5"/>')
        parts.append(f'<circle cx="{x(middle):.1f}" cy="13" r="3.2" fill="var(--ink)" stroke="var(--page)"/>')
    return "".join(parts) + "</svg>"


def _marks(criterion: Criterion, values: list[float]) -> list[tuple[float, float, float]]:
    """Return (low, middle, high) of what is judged: each value, or the interval of the mean."""
    if criterion.every or not values:
        return [(v, v, v) for v in sorted(set(values))[:: max(1, len(set(values)) // 40)]]
    found = interval(values)
    return [(found.low, found.mean, found.high)]


def _range(criterion: Criterion, marks: list[float]) -> tuple[float, float]:
    ends = [e for e in criterion.region(2.0) if math.isfinite(e)] + [criterion.target, *marks]
    low, high = min(ends), max(ends)
    air = 0.15 * (high - low) or abs(high) * 0.1 or 1.0
    return low - air, high + air
