"""Sampling on a clock that only contenders move: what is counted, in which order, and what stays outside the clock."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from normkit.bench.timing import Contender, calls_for, interleave, sample


class Machine:
    """A clock that advances by what is run on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now

    def work(self, name: str, cost: Callable[[], float]) -> Callable[..., None]:
        def call(*_: object) -> None:
            self.ran.append(name)
            self.now += cost()

        return call


def test_a_sample_is_the_mean_of_its_calls() -> None:
    machine = Machine()
    assert sample(Contender("a", machine.work("a", lambda: 0.25)), 4, machine.clock) == 0.25
    assert machine.ran == ["a"] * 4


def test_what_is_made_fresh_stays_outside_the_clock_and_reaches_its_call() -> None:
    machine = Machine()
    made: list[int] = []

    def fresh() -> int:
        machine.now += 100.0
        made.append(len(made))
        return made[-1]

    used: list[int] = []

    def call(one: int) -> None:
        used.append(one)
        machine.now += 0.5

    assert sample(Contender("a", call, fresh), 3, machine.clock) == 0.5
    assert used == made == [0, 1, 2]


def test_calls_last_at_least_what_a_sample_must() -> None:
    machine = Machine()
    assert calls_for(Contender("a", machine.work("a", lambda: 1e-4)), 1e-3, machine.clock) == 16
    assert calls_for(Contender("b", machine.work("b", lambda: 1.0)), 1e-3, machine.clock) == 1
    assert calls_for(Contender("c", machine.work("c", lambda: 0.0)), 1e-3, machine.clock) == 1 << 14  # and ends


@pytest.mark.slow
def test_every_contender_runs_once_a_round_in_changing_order() -> None:
    machine = Machine()
    contenders = [Contender(n, machine.work(n, lambda: 2e-3)) for n in "abc"]
    interleave(contenders, 12, seed=0, clock=machine.clock)
    ran = machine.ran[-36:]
    rounds = [tuple(ran[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2
    again = Machine()
    interleave([Contender(n, again.work(n, lambda: 2e-3)) for n in "abc"], 12, seed=0, clock=again.clock)
    assert again.ran == machine.ran
    other = Machine()
    interleave([Contender(n, other.work(n, lambda: 2e-3)) for n in "abc"], 12, seed=1, clock=other.clock)
    assert other.ran != machine.ran


def test_no_collection_runs_in_a_sample_and_the_collector_comes_back() -> None:
    machine = Machine()
    states: list[bool] = []

    def call() -> None:
        states.append(gc.isenabled())
        machine.now += 1.0

    assert gc.isenabled()
    interleave([Contender("a", call)], 3, seed=0, clock=machine.clock)
    assert states[-3:] == [False] * 3
    assert gc.isenabled()
