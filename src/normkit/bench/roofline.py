"""A GPU's goals: which share of the copy's bandwidth the module is to reach at each width, and which it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.bench.measure import Measured
from normkit.bench.peers import Normkit
from normkit.bench.ratios import Ratio
from normkit.bench.shapes import BEYOND_CACHES, Case
from normkit.kernels.gpu.settings import backward_setting, clusters_wanted, forward_setting

# Pass → the share where a program holds a row, so that its tensors are read once. Beyond, the forward moves 3 planes
# where 2 must move and the backward 5 where 3 must: 67 and 60 % are what kernels of that design cannot pass.
HELD = {"forward": 0.90, "backward": 0.85}
SPLIT = 0.60


@dataclass(frozen=True)
class Roofline:
    """A case whose tensors no cache holds.

    Args:
        case: what was timed.
        share: of the copy's bandwidth: bytes that must move, over the time, over the copy's rate.
        held: whether one program holds a row; None for a step, which is of two kernels.
        goal: the share that it is to reach; None without one.
    """

    case: Case
    share: Ratio
    held: bool | None
    goal: float | None

    @property
    def reached(self) -> bool | None:
        """Say whether the goal is reached, None without one."""
        return None if self.goal is None else self.share.median >= self.goal


def held_by_a_program(which: str, width: int) -> bool | None:
    """Say whether a program holds a row of this width, by the settings that the kernels are launched with.

    Example:
        >>> held_by_a_program("forward", 4096), held_by_a_program("forward", 262144), held_by_a_program("step", 64)
        (True, False, None)
    """
    if which == "step":
        return None
    if which == "forward":
        return forward_setting(width, clusters_wanted()).block >= width
    return backward_setting(width, True, clusters_wanted()).block >= width


def rooflines(run: Sequence[Measured]) -> list[Roofline]:
    """Return every case on a GPU that is larger than any cache and in which normkit was timed."""
    found: list[Roofline] = []
    for measured in run:
        case = measured.case
        if not case.gpu or case.plane < BEYOND_CACHES or Normkit.name not in measured.samples:
            continue
        held = held_by_a_program(case.which, case.shape.width)
        goal = None if held is None else HELD[case.which] if held else SPLIT
        found.append(Roofline(case, measured.share(Normkit.name), held, goal))
    return found
