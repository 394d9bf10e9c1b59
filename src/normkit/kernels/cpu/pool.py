"""Running a kernel on PyTorch's own threads.

PyTorch's CPU build brings its OpenMP runtime along. Handing it our entry point costs a few microseconds and shares its
pool; a second pool (Numba's) would fight it for the cores, and dies under concurrent callers or after a fork.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

# After a fork the runtime waits for threads that only the parent has: kernels then run serially.
_process = os.getpid()


@lru_cache(maxsize=1)
def _runtime() -> tuple[Callable[[int, Any, int, int], None], int] | None:
    """Return GOMP_parallel of the runtime that torch brings and the address of omp_get_thread_num, or None."""
    found = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*"))
    found += glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torch.libs", "libgomp*"))
    if not found:
        return None
    try:
        library = ctypes.CDLL(found[0])
        function, number = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    address = ctypes.cast(number, ctypes.c_void_p).value
    assert address is not None
    return function, address


def threads_for(work: int) -> int:
    """Return how many threads ``work`` elements are worth: 1 below the launch's own cost and in a forked child."""
    if work < PARALLEL_FROM or os.getpid() != _process:
        return 1
    threads = torch.get_num_threads()
    return threads if threads > 1 and _runtime() is not None else 1


# Measured on two cores: below this a second thread costs more than it brings (see benchmarks/threads.py).
PARALLEL_FROM = 1 << 17


# A table of shares, in words of eight bytes: the address of the function that tells a thread its number, how many
# threads there are, and for each, a cache line further on, how many pieces of its share are taken (see shares.py).
NUMBER_OF, TEAM, LINE = 0, 1, 8


def new_shares(threads: int) -> ctypes.Array[ctypes.c_int64]:
    """Return the table of a call that so many threads share, nothing taken yet. It must outlive the call."""
    runtime = _runtime()
    assert runtime is not None
    table = (ctypes.c_int64 * (LINE * (threads + 1)))()
    table[NUMBER_OF], table[TEAM] = runtime[1], threads
    return table


def run_parallel(address: int, block: bytes, threads: int) -> None:
    """Run the entry point on ``threads`` threads; they draw their pieces from the block's table of shares."""
    runtime = _runtime()
    assert runtime is not None
    runtime[0](address, block, threads, 0)
