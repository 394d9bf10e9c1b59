"""What a launch costs in Python, with the GPU's part stubbed out, and what must not be launched again unseen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import normkit as nk
from rows import randn

GPU = torch.device("cuda", 0)


class Compiled:
    """What Triton returns of a compiled kernel, counting instead of launching."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Kernel:
    """A ``triton.jit`` function that compiles at once."""

    def __init__(self) -> None:
        self.compiled, self.asked = Compiled(), 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def call(*_: Any, **__: Any) -> Compiled:
            self.asked += 1
            return self.compiled

        return call


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let rows on the CPU pass for rows on GPU 0, and every kernel for one that is compiled."""
    # row_backward makes a launcher when it is imported: under the stub, every later test of the process would have it.
    from normkit.kernels.gpu import launch, row_backward

    kernel = Kernel()
    made = launch.Launcher.__init__

    def with_stub(self: Any, _: Any, *rest: Any, **named: Any) -> None:
        made(self, kernel, *rest, **named)

    monkeypatch.setattr(launch.Launcher, "__init__", with_stub)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "stream_of", lambda index: 0)
    again = launch.Launcher.again
    monkeypatch.setattr(launch.Launcher, "again", lambda self, grid, given, device: again(self, grid, given, GPU))
    monkeypatch.setattr("normkit.kernels.gpu.rows._launchers", {})
    monkeypatch.setattr(row_backward, "_launchers", {})
    return kernel


def microseconds(call: Any) -> float:
    """Return the least time of a call over many, in which nothing else ran."""
    call()
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter_ns()
        for _ in range(10):
            call()
        best = min(best, (time.perf_counter_ns() - start) / 10)
    return best / 1000


def test_a_call_asks_triton_once_and_then_costs_less_than_asking(stub: Kernel):
    """Triton's own way binds and hashes some fifty arguments: 25 µs here, on a machine where this takes 9.

    The bound is a ratio to ten tensors' allocation, so that a slow machine moves both.
    """
    from normkit.kernels.gpu import contiguous

    x, w = randn(16, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, x.dtype, w.dtype, None, x.device)
    run(x, w, None, 1e-6, None, False)
    taken = microseconds(lambda: run(x, w, None, 1e-6, None, False))
    assert stub.asked == 1
    assert len(stub.compiled.calls) > 2000
    yardstick = microseconds(lambda: [torch.empty_like(x) for _ in range(10)])
    assert taken < 3 * yardstick, f"{taken:.1f} µs, and ten empty_like {yardstick:.1f}"


def test_arguments_reach_the_launcher_as_triton_would_pass_them(stub: Kernel):
    from normkit.kernels.gpu import contiguous, forward

    x, w = randn(16, 4096), randn(4096)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, x.dtype, w.dtype, None, x.device)
    run(x, w, None, 1e-6, None, False)
    y, _ = run(x, w, None, 1e-6, None, False)
    [call] = stub.compiled.calls
    grid, _stream, *rest = call[:3], *call[3:]
    assert grid == (16, 1, 1)
    given = dict(zip(forward.held_forward.arg_names, rest[5:], strict=True))
    assert given["x"] is x
    assert given["w"] is w
    assert given["y"] is y
    assert given["rows"] == 16
    assert given["n"] == 4096
    assert given["C"] == 4096


def test_an_odd_address_or_another_width_is_not_launched_as_if_it_were_the_first(stub: Kernel):
    """128-bit loads of an address that is no multiple of 16 would fault; another width has other constants."""
    from normkit.kernels.gpu import contiguous

    memory = randn(16 * 4096 + 16)
    aligned, odd = memory[: 16 * 4096].view(16, 4096), memory[1 : 1 + 16 * 4096].view(16, 4096)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, torch.float32, None, None, aligned.device)
    for _ in range(3):
        run(aligned, None, None, 1e-6, None, False)
    assert stub.asked == 1
    run(memory[: 16 * 2048].view(16, 2048), None, None, 1e-6, None, False)
    assert stub.asked == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normkit.kernels.gpu.launch.Launcher.__call__", lambda *_: setattr(stub, "asked", -1))
        run(odd, None, None, 1e-6, None, False)
    assert stub.asked == -1
