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
def _parallel() -> Callable[[int, Any, int, int], None] | None:
    """Return GOMP_parallel of the runtime that torch brings, or None where there is none."""
    found = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*"))
    found += glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torch.libs", "libgomp*"))
    if not found:
        return None
    try:
        function = ctypes.CDLL(found[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    return function


def threads_for(work: int) -> int:
    """Return how many threads ``work`` elements are worth: 1 below the launch's own cost and in a forked child."""
    if work < PARALLEL_FROM or os.getpid() != _process:
        return 1
    threads = torch.get_num_threads()
    return threads if threads > 1 and _parallel() is not None else 1


# Measured on two cores: below this a second thread costs more than it brings (see benchmarks/threads.py).
PARALLEL_FROM = 1 << 17


def run_parallel(address: int, block: bytes, threads: int) -> None:
    """Run the entry point on ``threads`` threads; they draw their pieces from the block's counter."""
    parallel = _parallel()
    assert parallel is not None
    parallel(address, block, threads, 0)
