"""Taking times: every contender in every round, in an order drawn anew, so that what the machine does meets all.

Times of different rounds are not compared: ratios are taken within a round, and the statistic is their median.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

Clock = Callable[[], float]  # of a GPU it waits for what was queued: calls run back to back, one wait a sample
SAMPLE = 1e-3  # seconds: a thousand times what a clock's reading costs, a tenth of a scheduler's slice
MOST_CALLS = 1 << 14


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Args:
        name: as the table shows it.
        call: one call; the clock runs around as many as make a sample.
        fresh: made before the clock starts, once for each call, which receives it: a graph that a backward consumes.
        holds: what must live as long as the calls do: memory that a foreign runtime was given by its address.
        most: calls of a sample, where what is made fresh takes memory.
    """

    name: str
    call: Callable[..., object]
    fresh: Callable[[], Any] | None = None
    holds: object = None
    most: int = MOST_CALLS


@dataclass(frozen=True)
class Samples:
    """Seconds per call, one a round, and how many calls each is the mean of."""

    calls: int
    seconds: tuple[float, ...]


def sample(contender: Contender, calls: int, clock: Clock) -> float:
    """Return the seconds of one call, as the mean over ``calls``."""
    call = contender.call
    if contender.fresh is None:
        turns = repeat(None, calls)
        start = clock()
        for _ in turns:
            call()
        return (clock() - start) / calls
    given = [contender.fresh() for _ in range(calls)]
    start = clock()
    for one in given:
        call(one)
    return (clock() - start) / calls


def calls_for(contender: Contender, least: float, clock: Clock) -> int:
    """Return how many calls last ``least`` seconds, a power of two; doing so also warms the contender up.

    At most as many as the contender allows, however short they are.
    """
    calls = 1
    sample(contender, 1, clock)
    while 2 * calls <= contender.most and sample(contender, calls, clock) * calls < least:
        calls *= 2
    return calls


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    seed: int,
    least: float = SAMPLE,
    clock: Clock = time.perf_counter,
) -> dict[str, Samples]:
    """Time every contender once a round, in an order that each round draws from the seed."""
    draws = random.Random(seed)
    calls = {contender.name: calls_for(contender, least, clock) for contender in contenders}
    assert len(calls) == len(contenders), "two contenders of one name"
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with _no_collections():
        for _ in range(rounds):
            for contender in draws.sample(contenders, len(contenders)):
                taken[contender.name].append(sample(contender, calls[contender.name], clock))
    return {name: Samples(calls[name], tuple(seconds)) for name, seconds in taken.items()}


@contextmanager
def _no_collections() -> Generator[None]:
    """Keep Python's garbage collector from running inside a sample."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
