"""What a launch costs in Python, with the GPU's part stubbed out, and what must not be launched again unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import randn


@pytest.fixture
def seen() -> Iterator[Any]:
    """Let tensors on the CPU pass for tensors on a GPU, and every kernel for one that compiles at once."""
    from normkit.kernels.gpu import dry

    with dry.running() as found:
        yield found


def yardstick() -> float:
    """Return what ten allocations take: bounds are ratios to it, so that a slow machine moves both."""
    from normkit.kernels.gpu.dry import microseconds

    x = randn(16, 4096, dtype=torch.bfloat16)
    return microseconds(lambda: [torch.empty_like(x) for _ in range(10)])


def test_a_call_asks_triton_once_and_then_costs_less_than_asking(seen: Any):
    """Triton's own way binds and hashes some fifty arguments: 28 µs here, on a machine where this takes 7."""
    from normkit.kernels.gpu import contiguous
    from normkit.kernels.gpu.dry import microseconds

    x, w = randn(16, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, x.dtype, w.dtype, None, x.device)
    run(x, w, None, 1e-6, None, False)
    taken, ten = microseconds(lambda: run(x, w, None, 1e-6, None, False)), yardstick()
    assert seen.asked == 1
    assert seen.launches > 2000
    assert taken < 3 * ten, f"{taken:.1f} µs, and ten empty_like {ten:.1f}"


def column_step(x: Tensor, channel: int) -> Any:
    """Return a forward and a backward of batch norm."""
    from normkit.kernels.gpu import positions

    w, b = randn(x.shape[channel]), randn(x.shape[channel])
    how = {"channel": channel, "groups": x.shape[channel], "per_sample": False, "eps": 1e-5, "mask": None}

    def step() -> None:
        _, table, plan, _ = positions.forward(x, w, b, **how)
        positions.backward(x, w, x, table, plan, wanted=(True, True, True))

    return step


@pytest.mark.parametrize("channel", [1, 3], ids=["channels first", "channels last"])
def test_a_norm_across_positions_asks_triton_once_a_kernel(seen: Any, channel: int):
    """Six launches: 160 µs where Triton is asked for each, on a machine where this takes 80 and ten empty_like 8."""
    from normkit.kernels.gpu.dry import microseconds

    step = column_step(randn(8, 16, 16, 16, dtype=torch.bfloat16), channel)
    step()
    assert (seen.asked, seen.launches) == (6, 6)
    taken, ten = microseconds(step), yardstick()
    assert seen.asked == 6
    assert taken < 16 * ten, f"{taken:.1f} µs, and ten empty_like {ten:.1f}"


def test_arguments_reach_the_launcher_as_triton_would_pass_them(seen: Any):
    from normkit.kernels.gpu import contiguous, forward

    x, w = randn(16, 4096), randn(4096)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, x.dtype, w.dtype, None, x.device)
    run(x, w, None, 1e-6, None, False)
    y, _ = run(x, w, None, 1e-6, None, False)
    assert seen.asked == 1
    grid, _stream, *rest = seen.arguments[:3], *seen.arguments[3:]
    assert grid == (16, 1, 1)
    given = dict(zip(forward.held_forward.arg_names, rest[5:], strict=True))
    assert given["x"] is x
    assert given["w"] is w
    assert given["y"] is y
    assert given["rows"] == 16
    assert given["n"] == 4096
    assert given["C"] == 4096


def test_an_odd_address_or_another_width_is_not_launched_as_if_it_were_the_first(seen: Any):
    """128-bit loads of an address that is no multiple of 16 would fault; another width has other constants."""
    from normkit.kernels.gpu import contiguous

    memory = randn(16 * 4096 + 16)
    aligned, odd = memory[: 16 * 4096].view(16, 4096), memory[1 : 1 + 16 * 4096].view(16, 4096)
    run = contiguous.forward_for(nk.TORCH_RMS_NORM, torch.float32, None, None, aligned.device)
    for asked, x in enumerate((aligned, memory[: 16 * 2048].view(16, 2048), odd), start=1):
        for _ in range(3):
            run(x, None, None, 1e-6, None, False)
        assert seen.asked == asked


# Arguments of `columns.apply`, which differ from the first in one thing each.
NUMBERS = {"length": 64, "total": 512, "channels": 32, "groups": 32, "depth": 3, "x0": 2048, "x1": 32, "x2": 5}
OTHERS = {
    "the same": {},
    "an odd address": {"x": 1},
    "an odd address of what is written": {"y": 1},
    "an odd address of a parameter": {"w": 3},
    "another dtype": {"x": torch.float16},
    "a size of 1": {"depth": 1},
    "a length that is no multiple of 16": {"length": 65},
    "a multiple of 16 more": {"channels": 48},
    "a stride that becomes a multiple of 16": {"x2": 16},
    "a stride beyond 32 bits": {"x0": 2**31},
    "a stride within 32 bits": {"x0": 2**31 - 1},
    "a stride far below": {"x0": -(2**31) - 16},
    "one position": {"total": 1},
    "a total beyond 32 bits": {"total": 2**31},
}
ALIKE = ("the same", "a multiple of 16 more")


def changed(other: dict[str, Any]) -> list[Any]:
    """Return the arguments, tensors first; of a tensor ``other`` says where it starts or its dtype."""
    tensors = {name: torch.zeros(16) for name in ("x", "w", "b", "y", "flags", "table")}
    numbers = NUMBERS | {"y0": 2048, "y1": 32, "y2": 1}
    for name, value in other.items():
        if name in numbers:
            numbers[name] = value
        else:
            t = tensors[name]
            tensors[name] = t.to(value) if isinstance(value, torch.dtype) else t[value:]
    return [*tensors.values(), *numbers.values()]


@pytest.mark.parametrize("name", OTHERS)
def test_what_triton_would_compile_anew_is_compiled_anew(seen: Any, name: str):
    """Whatever was launched before, what runs is the kernel that Triton itself chooses, and it is told the same."""
    from normkit.kernels.gpu import columns
    from normkit.kernels.gpu.launch import Launcher

    constants = {"K": 16, "C": 32, "MASKED": False, "PER": False, "RUNS": False, "HAS_W": True, "HAS_B": True}
    launcher, device, grid = Launcher(columns.apply, constants, 4), torch.device("cpu"), (2, 1, 1)
    launcher.launch(False, grid, changed({}), device)
    first, arguments = seen.compiled, changed(OTHERS[name])
    launcher.launch(False, grid, arguments, device)
    assert (seen.compiled is first) == (name in ALIKE)
    asked = seen.asked
    launcher.launch(False, grid, arguments, device)
    assert seen.asked == asked
    short = seen.compiled, *seen.arguments
    launcher.ask(grid, arguments)
    assert all(a is b for a, b in zip(short, (seen.compiled, *seen.arguments), strict=True))


def test_numbers_that_are_equal_and_of_other_types_are_told_apart():
    from normkit.kernels.gpu.launch import kind_of

    x = randn(4)
    assert kind_of([x, 1, 16]) != kind_of([x, 1.0, 16])
    assert kind_of([x, 0.5, 16]) == kind_of([x, 1.0, 32])
