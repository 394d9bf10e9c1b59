"""What a grid will cost, measured on a few steps of every contender before any of it is trained."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.lab.corpus import HELDOUT_WINDOWS, Corpus
from normkit.lab.draws import Draws
from normkit.lab.grid.options import Grid
from normkit.lab.grid.own_models import check
from normkit.lab.grid.study import contender, made
from normkit.lab.model.training import Schedule, batches, next_byte_loss

ADAM = 4  # copies of a trained weight: itself, its gradient, Adam's two moments
_TIMED = 3  # steps, of which the fastest counts: others on the machine only ever slow one down
_LONG = 5.0  # seconds; a step that takes longer is timed once


@dataclass(frozen=True)
class Cost:
    """What one run of a contender takes.

    Args:
        parameters: of the network, trained or not.
        state: bytes of weights, gradients and Adam's moments.
        saved: bytes that one step keeps for its backward; on a GPU, all that was allocated beyond ``state``.
        step: seconds of a step.
        run: seconds of a whole run: its steps, and judging it.
    """

    parameters: int
    state: int
    saved: int
    step: float
    run: float


def costs(grid: Grid, corpus: Corpus, device: str) -> dict[str, Cost]:
    """Measure every contender on its first steps, one thread of the CPU as in a worker; nothing is kept.

    Raises:
        ValueError: a network that cannot be built at this size, or a model of one's own that is refused.
    """
    draws = Draws("estimate", "any", 0)
    windows = batches(corpus, Schedule(grid.lrs[0], 0, _TIMED, grid.rows), draws)
    found: dict[str, Cost] = {}
    with _one_thread():
        for name in grid.contenders:
            if name.startswith("model/"):
                check(name.removeprefix("model/"), windows[0], device)
            with torch.random.fork_rng():
                found[name] = cost(made(contender(grid, name), draws), grid, windows, device)
    return found


def cost(model: nn.Module, grid: Grid, windows: Tensor, device: str) -> Cost:
    """Measure a network on batches (steps, N, T + 1) of bytes; its weights stay as they are.

    Kept for the backward is what autograd saves in a forward, each storage once, parameters left out.
    """
    windows = windows.to(device)
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    model = model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.0, betas=(0.9, 0.98), fused=True)
    saved: dict[int, int] = {}

    def step(window: Tensor, keep: Callable[[Tensor], Tensor]) -> float:
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = next_byte_loss(model, window)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    first = step(windows[0], count)  # the first also compiles kernels
    seconds = first if first > _LONG else min(step(window, lambda x: x) for window in windows)
    state = sum(p.numel() * p.element_size() for p in model.parameters())
    state += (ADAM - 1) * sum(p.numel() * p.element_size() for p in trained)
    held = sum(saved.values())
    if cuda:
        held = max(0, torch.cuda.max_memory_allocated(device) - before - state)  # pyright: ignore[reportPossiblyUnboundVariable]
    # Judging is forward only: a third of a step for as many windows.
    judging = seconds * HELDOUT_WINDOWS / grid.rows / 3
    return Cost(sum(p.numel() for p in model.parameters()), state, held, seconds, grid.steps * seconds + judging)


@contextmanager
def _one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def process_bytes() -> int:
    """Return what this process holds in memory: the interpreter, PyTorch and the corpus, as a worker does too."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def available_bytes(device: str) -> int | None:
    """Return what is free: the GPU's memory, or what the system could give without swapping; None where unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
