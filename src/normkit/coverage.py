"""Which elements share a statistic: the half of a norm that is not its formula.

For x of shape (N, L, C), N sequences, L positions, C channels. Functions, modules and the four-panel picture read
this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """A row of the table.

    Args:
        name: what the norm is called.
        axes: the axes of (N, L, C) that a statistic runs over; ``"C/G"`` is one group of channels.
        statistics: how many statistics there are, in words of N, L, C, G.
        causal: whether a position's output depends on that position alone.
        running: whether inference uses statistics remembered from training.
        affine: the axis that weight and bias are indexed by.
    """

    name: str
    axes: tuple[str, ...]
    statistics: str
    causal: bool
    running: bool
    affine: str = "C"

    def covers(self, a: tuple[int, int, int], b: tuple[int, int, int], group_size: int) -> bool:
        """Say whether elements ``a`` and ``b`` of an (N, L, C) tensor share a statistic."""
        same_group = a[2] // group_size == b[2] // group_size
        free = {"N": a[0] == b[0], "L": a[1] == b[1], "C": a[2] == b[2]}
        for axis in self.axes:
            free[axis[0]] = same_group if axis == "C/G" else True
        return all(free.values())

    def axes_in(self, dims: int, channel: int) -> tuple[int, ...]:
        """Return the axes of a statistic in a tensor of ``dims`` axes: N is axis 0, C is ``channel``, all others are L.

        For ``"C/G"``, C comes split in two: the groups on ``channel``, the channels of one group on the axis after it.
        """
        inside = {channel + 1: "C/G"} if "C/G" in self.axes else {channel: "C"}
        letters = {0: "N", channel: "", **inside}
        return tuple(axis for axis in range(dims) if letters.get(axis, "L") in self.axes)


COVERAGE: dict[str, Coverage] = {
    row.name: row
    for row in (
        Coverage("batch", ("N", "L"), "C", causal=False, running=True),
        Coverage("layer", ("C",), "N·L", causal=True, running=False),
        Coverage("instance", ("L",), "N·C", causal=False, running=False),
        Coverage("group", ("L", "C/G"), "N·G", causal=False, running=False),
    )
}
