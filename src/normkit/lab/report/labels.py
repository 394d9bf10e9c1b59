"""Where labels go so that none covers another: each as near as possible to the height it wants."""

from __future__ import annotations

from collections.abc import Sequence


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return centres for labels of the given heights, in the order given, that do not overlap.

    Labels keep the order of the heights they want. Subtracting each label's offset in the stack turns "no
    overlap" into "not decreasing", so pooling neighbours that violate it gives the least squared displacement.
    Where the stack fits between ``low`` and ``high`` it stays there; otherwise it starts at ``low``.
    """
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    offsets: list[float] = []
    height = 0.0
    for i in order:
        offsets.append(height + heights[i] / 2)
        height += heights[i]
    pools: list[tuple[float, int]] = []
    for i, offset in zip(order, offsets, strict=True):
        mean, count = wanted[i] - offset, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        pools.append((mean, count))
    starts = [mean for mean, count in pools for _ in range(count)]
    ceiling = max(low, high - height)
    placed = [0.0] * len(wanted)
    for i, offset, start in zip(order, offsets, starts, strict=True):
        placed[i] = min(max(start, low), ceiling) + offset
    return placed
