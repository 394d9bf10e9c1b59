"""A run by all processes of a ``torchrun`` at once: every measurement is made by all of them together.

Process 0 owns the run folder, the terminal and the verdicts; the others compute. Measurements stand under the keys that
any run with the same settings gives them, so either kind of run goes on where the other stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from normkit.lab.claim import Bench, Measurement
from normkit.lab.corpus import Corpus
from normkit.lab.draws import Draws
from normkit.lab.runs.engine import Order, Result, View, run
from normkit.lab.runs.folder import Folder, opened
from normkit.lab.runs.interrupts import Interrupts
from normkit.lab.runs.lines import Line, RunError, jsonable
from normkit.lab.runs.plan import Cell, make_plan

WAIT = timedelta(minutes=10)


def processes() -> int:
    """Return how many processes ``torchrun`` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return which of them this is."""
    return int(os.environ.get("RANK", "0"))


def join(device: str) -> None:
    """Meet the other processes, and compute as a worker does: one thread, deterministic algorithms."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # PyTorch would wait half an hour for a process that hangs; no step of a lab's network takes minutes.
    dist.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo", timeout=WAIT)


def leave() -> None:
    """End the meeting."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_together(order: Order, corpus: Corpus, view: View, said: Callable[[str], object]) -> Result | None:
    """Measure what is missing, all processes together, and judge; the result is None but on process 0.

    Args:
        order: the same on all processes; studies that measure time are not for this.
        corpus: what the settings' text holds.
        view: who watches the judging, on process 0.
        said: told a line for every measurement, on process 0.

    Raises:
        RunError: on process 0, as `run` does, and the others return; on all that are left when a process is lost, at
            once where its connections close, after `WAIT` where it hangs. Measurements made before are kept.
    """
    with ExitStack() as stack:
        folder: Folder | None = None
        missing: list[Cell] = []
        refused: RunError | None = None
        if rank() == 0:
            try:
                folder = stack.enter_context(opened(order.out, order.settings, order.force, view.notice))
                missing = _missing(order, folder)
            except RunError as error:
                refused = error
        agreed: list[Any] = [[cell.id for cell in missing] if refused is None else None]
        dist.broadcast_object_list(agreed, src=0)
        if refused is not None:
            raise refused
        if agreed[0] is None:
            return None
        cells = {cell.id: cell for cell in _all(order)}
        for i, name in enumerate(agreed[0], start=1):
            cell = cells[tuple(name)]
            try:
                measured = _measure(cell, order, corpus, folder)
            except RuntimeError as error:
                if not _is_of_a_lost_process(error):
                    raise
                raise RunError(
                    f"a process of torchrun was lost during {cell.arm.name} seed {cell.seed} ({error}); {i - 1} "
                    f"measurements made before are kept in {order.out}, and the same command goes on from there"
                ) from error
            if folder is not None:
                folder.lines.append(Line(cell.key, measured))
                outcome = measured.values.get("outcome", "measured")
                said(f"{i}/{len(agreed[0])} {cell.arm.name} seed {cell.seed}: {outcome}")
    if rank() != 0:
        return None
    with Interrupts() as interrupts:
        return run(replace(order, jobs=1, force=False), view, interrupts)


def _is_of_a_lost_process(error: RuntimeError) -> bool:
    """Say whether a collective failed; gloo's errors have no class of their own, only the path of its sources."""
    return isinstance(error, dist.DistBackendError) or "gloo" in str(error)


def _all(order: Order) -> list[Cell]:
    plan = make_plan([claim for claim, _ in order.claims], [module for _, module in order.claims], order.settings)
    return list(plan.missing)


def _missing(order: Order, folder: Folder) -> list[Cell]:
    there = {((m.study, m.arm, m.seed), line.key) for line in folder.lines.parsed.lines for m in [line.measurement]}
    return [cell for cell in _all(order) if (cell.id, cell.key) not in there]


def _measure(cell: Cell, order: Order, corpus: Corpus, folder: Folder | None) -> Measurement:
    draws = Draws(cell.study.id, cell.arm.name, cell.seed)
    torch.manual_seed(draws.own("global").initial_seed())
    start = time.perf_counter()
    bench = Bench(order.settings, draws, corpus, None if folder is None else folder.path)
    values = jsonable(cell.study.measure(cell.arm.params, bench))
    return Measurement(*cell.id, values=values, seconds=time.perf_counter() - start)
