"""How threads share pieces: every piece once, a thread's own first, what others leave afterwards."""

from __future__ import annotations

import ctypes

import numba
import pytest

from normkit.kernels.cpu import pool
from normkit.kernels.cpu.shares import drawn


@numba.njit
def draw(table: int, thread: int, pieces: int) -> int:
    return drawn(table, thread, pieces)  # type: ignore[no-any-return]


def table_of(team: int) -> ctypes.Array[ctypes.c_int64]:
    table = (ctypes.c_int64 * (pool.LINE * (team + 1)))()
    table[pool.TEAM] = team
    return table


@pytest.mark.parametrize("pieces", [1, 3, 8, 11])
@pytest.mark.parametrize("team", [1, 2, 3, 5])
def test_one_thread_finishes_what_the_others_never_begin(team: int, pieces: int):
    for thread in range(team):
        table = table_of(team)
        order = [draw(ctypes.addressof(table), thread, pieces) for _ in range(pieces + 2)]
        assert sorted(order[:pieces]) == list(range(pieces))
        assert order[pieces:] == [-1, -1]
        own = list(range(pieces * thread // team, pieces * (thread + 1) // team))
        assert order[: len(own)] == own


def test_threads_that_keep_pace_keep_to_their_shares():
    table = table_of(2)
    order = [draw(ctypes.addressof(table), step % 2, 8) for step in range(8)]
    assert order == [0, 4, 1, 5, 2, 6, 3, 7]
    assert draw(ctypes.addressof(table), 0, 8) == -1
