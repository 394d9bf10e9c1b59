"""Launches without a GPU or a compiler, for what they cost in Python and for which compiled kernel they would run.

Triton's own binding, specialisation and hashing run; the compiler, the driver and the launch itself are stood in for.

Example:
    >>> from importlib.util import find_spec
    >>> import torch
    >>> if find_spec("triton"):
    ...     from normkit.kernels.gpu import dry, positions
    ...
    ...     x = torch.empty(8, 4096, 64)
    ...     with dry.running() as seen:
    ...         for _ in range(2):
    ...             y = positions.forward(x, None, None, channel=2, groups=64, per_sample=False, eps=1e-5, mask=None)
    ...     assert (seen.asked, seen.launches) == (3, 6)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from normkit.kernels.gpu import launch
from normkit.kernels.gpu.launch import Launcher


def microseconds(call: Callable[[], object]) -> float:
    """Return the least time of a call over many, in which nothing else ran."""
    call()
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter_ns()
        for _ in range(10):
            call()
        best = min(best, (time.perf_counter_ns() - start) / 10)
    return best / 1000


_indices = count(64)  # devices that nobody has: what Triton keeps for one is never met again


@dataclass
class Seen:
    """What was launched.

    Args:
        asked: how often Triton was.
        launches: how many there were.
        compiled: the kernel that ran last.
        arguments: what its launcher got; more would keep memory alive that a call could have again.
    """

    asked: int = 0
    launches: int = 0
    compiled: object = None
    arguments: tuple[Any, ...] = ()


class _Compiled:
    """What Triton returns of a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        seen = self._seen
        seen.launches += 1
        seen.compiled, seen.arguments = self, arguments


class _Driver:
    def __init__(self, index: int) -> None:
        self._index = index

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def running(always_ask: bool = False) -> Generator[Seen]:
    """Let tensors on the CPU pass for such on a GPU, and every kernel for one that compiles at once.

    Args:
        always_ask: whether every launch goes Triton's own way.
    """
    seen, gpu = Seen(), torch.device("cuda", next(_indices))
    short, ask = Launcher.launch, Launcher.ask

    def launched(
        self: Launcher, same: bool, grid: tuple[int, int, int], arguments: Sequence[Any], device: object
    ) -> None:
        if always_ask:
            self.ask(grid, arguments)
        else:
            short(self, same, grid, arguments, gpu)

    def asked(self: Launcher, grid: tuple[int, int, int], arguments: Sequence[Any]) -> Any:
        seen.asked += 1
        return ask(self, grid, arguments)

    with (
        patch.object(triton.runtime.driver, "_active", _Driver(gpu.index)),
        patch("triton.compiler.compile", lambda *_, **__: _Compiled(seen)),  # pyright: ignore[reportUnknownLambdaType]
        patch.object(torch.cuda, "current_device", lambda: gpu.index),
        patch.object(launch, "stream_of", lambda _: 0),  # pyright: ignore[reportUnknownLambdaType]
        patch.object(Launcher, "launch", launched),
        patch.object(Launcher, "ask", asked),
    ):
        yield seen
