"""How a side of a comparison is read from the evidence: its best point, its stable range, what its runs came to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from normkit.lab.claim import Evidence

FREQUENCIES = "frequencies"  # the arm that knows how often each byte occurs, and nothing else
SHARE = 0.8  # of the seeds that must train for a rate to count as stable: 4 of 5, and all of fewer than five


@dataclass(frozen=True)
class Side:
    """A role of a claim, with the ends of its arms' names among which its best is chosen."""

    role: str
    ends: tuple[str, ...]

    def paths(self, e: Evidence) -> list[str]:
        """Return the evidence paths of its arms; the bytes' frequencies are one arm, whatever the grid."""
        if e.arm(self.role) == FREQUENCIES:
            return [self.role]
        return [f"{self.role}/{end}" for end in self.ends]

    def best(self, e: Evidence) -> str:
        """Return the path at which it gains most on held-out text, in the mean over seeds; the first of equals."""
        return max(self.paths(e), key=lambda path: math.fsum(e.numbers(path, "gain")))

    def unigram(self, e: Evidence) -> float:
        """Return the entropy of the judged bytes' frequencies, the plateau of those who learn nothing else."""
        return float(e.first(self.paths(e)[0], "unigram"))

    def told(self, e: Evidence) -> str:
        """Return its best point in words."""
        arm = e.arm(self.best(e))
        if arm == FREQUENCIES:
            return "no training"
        warmup, lr = point_of(arm)
        return f"lr {lr:g}" + (f" (warm-up {warmup})" if warmup and len(self.warmups(e)) > 1 else "")

    def rates(self, e: Evidence, warmup: int) -> list[tuple[float, str]]:
        """Return its learning rates at a warm-up, each with the path of its runs."""
        found = [(point_of(e.arm(path)), path) for path in self.paths(e) if e.arm(path) != FREQUENCIES]
        return [(lr, path) for (w, lr), path in found if w == warmup]

    def warmups(self, e: Evidence) -> list[int]:
        """Return the warm-ups among its arms."""
        return sorted({point_of(e.arm(path))[0] for path in self.paths(e) if e.arm(path) != FREQUENCIES})


def point_of(arm: str) -> tuple[int, float]:
    """Return warm-up and learning rate of an arm, from its name."""
    _, warmup, lr = arm.rsplit("/", 2)
    return int(warmup.removeprefix("warmup-")), float(lr.removeprefix("lr-"))


def share_trained(e: Evidence, path: str) -> float:
    """Return the share of seeds that leave the unigram plateau."""
    runs = e.numbers(path, "trained")
    return sum(runs) / len(runs)


def stable_range(e: Evidence, side: Side) -> tuple[float, float] | None:
    """Return the lowest and highest of the neighbouring rates, the best among them, at which it trains; else None.

    At the warm-up of its best point.
    """
    arm = e.arm(side.best(e))
    if arm == FREQUENCIES:
        return None
    warmup, best = point_of(arm)
    trains = [(lr, share_trained(e, path) >= SHARE) for lr, path in side.rates(e, warmup)]
    at = [lr for lr, _ in trains].index(best)
    if not trains[at][1]:
        return None
    low = high = at
    while low > 0 and trains[low - 1][1]:
        low -= 1
    while high < len(trains) - 1 and trains[high + 1][1]:
        high += 1
    return trains[low][0], trains[high][0]


def trained_range(e: Evidence, side: Side) -> str:
    """Return the stable range in words, and how much of the grid it is not known beyond."""
    found = stable_range(e, side)
    if found is None:
        return "stable at no lr"
    low, high = found
    return f"stable at {low:g}" if low == high else f"stable at {low:g} to {high:g}"


def outcomes(e: Evidence, path: str) -> Counter[str]:
    """Return how many seeds trained, got stuck and diverged."""
    return Counter(str(outcome) for outcome in e.values(path, "outcome"))
