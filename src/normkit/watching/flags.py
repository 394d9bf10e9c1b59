"""What deserves a look: rules over the readings, each naming the place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from normkit.surgery.auditing.finding import Finding
from normkit.watching.reading import Reading

Rule = Callable[[Sequence[Reading]], Iterator[Finding]]

HEADROOM = 8.0  # a value within a factor of 8 of the largest finite number is one layer's gain from infinity
LOGITS = 50.0  # e^-50 is 2e-22: beside a score that much larger a float32 probability no longer changes
GROWTH = 10.0  # a stream, or a logit, ten times what it was


def flags(readings: Sequence[Reading]) -> list[Finding]:
    """Return what the rules find, in the order of the rules."""
    return [finding for rule in RULES for finding in rule(readings)]


def first_not_finite(readings: Sequence[Reading]) -> Iterator[Finding]:
    """The first NaN or infinity of the first forward that has one."""
    bad = next((r for r in readings if not r.finite), None)
    if bad is not None:
        where = f"{bad.position} of " if bad.position else ""
        yield Finding(
            "danger", "not-finite", (bad.name,),
            f"step {bad.step}: the first NaN or infinity passes {where}this module, largest magnitude {bad.x_max:.3g}",
            "every later layer, the loss and all gradients are lost with it",
            "look at what this norm reads: the sublayer before it overflowed or divided by zero",
        )  # fmt: skip


def near_overflow(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Values that a half-precision dtype can hardly hold any more."""
    worst: dict[str, Reading] = {}
    for r in readings:
        kind = getattr(torch, r.dtype, None)
        if r.finite and kind is not None and r.x_max * HEADROOM > torch.finfo(kind).max:
            worst[r.name] = max(worst.get(r.name, r), r, key=lambda reading: reading.x_max)
    for r in worst.values():
        limit = torch.finfo(getattr(torch, r.dtype)).max
        yield Finding(
            "warning", "near-overflow", (r.name,),
            f"step {r.step}: a value of {r.x_max:.3g} in {r.dtype}, which ends at {limit:.3g}",
            "one more layer, or a few steps, and it is infinite",
            "keep the stream in float32 or bfloat16, or norm the branches' outputs (sandwich)",
        )  # fmt: skip


def stream_grows_with_depth(readings: Sequence[Reading]) -> Iterator[Finding]:
    """A stream whose mean square grows faster than the number of sublayers: branches that add up instead of random."""
    steps: dict[int, list[Reading]] = defaultdict(list)
    for r in readings:
        if r.stream_rms is not None and r.finite:
            steps[r.step].append(r)
    if not steps:
        return
    last = steps[max(steps)]
    factors = [(b.stream_rms / a.stream_rms, b) for a, b in pairwise(last) if a.stream_rms and b.stream_rms]
    largest = max(factors, key=lambda pair: pair[0], default=None)
    if largest is not None and len(last) > 2 and largest[0] > GROWTH:
        factor, place = largest
        yield Finding(
            "warning", "stream-jumps", (place.name,),
            f"step {place.step}: the stream's RMS is {factor:.3g} times that at the norm before it",
            "whatever was in the stream is a rounding error beside this sublayer's output",
            "look at the sublayer before this norm: its initialisation, its scale, a weight that is added to 1 twice",
        )  # fmt: skip


def stream_grows_with_time(readings: Sequence[Reading]) -> Iterator[Finding]:
    """A stream that has become ten times what it was in the first forward."""
    for name, seen in _by_name(r for r in readings if r.stream_rms and r.finite).items():
        first, last = seen[0], seen[-1]
        if last.step > first.step and (last.stream_rms or 0) > GROWTH * (first.stream_rms or math.inf):
            yield Finding(
                "warning", "stream-grows", (name,),
                f"its RMS went from {first.stream_rms:.3g} at step {first.step} to {last.stream_rms:.3g}",
                "a pre-norm sublayer's share shrinks as the stream grows; half precision loses its small additions",
                "lower the learning rate, decay the matrices that write to the stream, or norm the branches' outputs",
            )  # fmt: skip
            return


def large_logits(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Attention scores so large that the softmax has one winner."""
    for name, seen in _by_name(r for r in readings if r.largest_logit is not None).items():
        worst = max(seen, key=lambda r: r.largest_logit or 0)
        if (worst.largest_logit or 0) > LOGITS:
            yield Finding(
                "warning", "large-logits", (name,),
                f"step {worst.step}: an attention score of {worst.largest_logit:.3g}",
                "the softmax is one-hot and passes no gradient to queries and keys; training may diverge from here",
                "normalise queries and keys (nk.QKNorm, before the rotation), or lower the learning rate",
            )  # fmt: skip


def _by_name(readings: Iterator[Reading]) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = defaultdict(list)
    for r in readings:
        found[r.name].append(r)
    return found


RULES: tuple[Rule, ...] = (
    first_not_finite,
    near_overflow,
    stream_grows_with_depth,
    stream_grows_with_time,
    large_logits,
)
