"""A rank that dies or hangs while batch norm shares statistics: the others say so in time, and nothing is half done."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import normkit as nk
from rows import randn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
TIMEOUT, LAST, STEPS = 3.0, 2, 5
LOSSES = ("exit in forward", "exit in backward", "hang in forward")


def train(rank: int, port: int, folder: Path, loss: str) -> None:
    """Train until rank 1 is lost in step ``LAST``; the checkpoint of each whole step replaces the one before."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)  # the first start is slow
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    model = nn.Sequential(nn.Linear(4, 5), nk.BatchNorm(5, process_group=group), nn.Linear(5, 1))
    model(randn(3, 7, 4))  # compiles the kernels
    dist.barrier()
    model[1].reset_running_stats()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        before = {name: t.clone() for name, t in model.state_dict().items()}
        start = time.monotonic()
        try:
            if rank == 1 and step == LAST and loss.endswith("forward"):
                lose(loss, folder)
            y = model(randn(3, 7, 4, seed=10 * step + rank))
            if rank == 1 and step == LAST:
                lose(loss, folder)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
        except RuntimeError as error:
            report: dict[str, Any] = {"error": str(error), "seconds": time.monotonic() - start, "step": step}
            after = model.state_dict()
            report["moved"] = [name for name, t in before.items() if not torch.equal(t, after[name])]
            torch.save(report, folder / "report")
            os._exit(0)  # what is left of the group may not be asked for anything any more
        if rank == 0:
            torch.save(model.state_dict(), folder / "checkpoint.new")
            (folder / "checkpoint.new").replace(folder / "checkpoint")
    os._exit(9)


def lose(loss: str, folder: Path) -> None:
    if loss.startswith("exit"):
        os._exit(1)
    while not (folder / "report").exists():
        time.sleep(0.1)
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_others_fail_in_time_and_nothing_is_written_half(loss: str, tmp_path: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    spawned = mp.get_context("spawn")
    processes = [spawned.Process(target=train, args=(rank, port, tmp_path, loss)) for rank in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0, 1]
    report = torch.load(tmp_path / "report")
    # A closed connection is seen at once, a silent rank after the group's timeout; both leave time for a busy machine.
    assert report["seconds"] < TIMEOUT + 5
    assert report["step"] == LAST
    assert "batch_norm: rank 0 of 2 waits for the others' part" in report["error"]
    # The statistics of the step move once they are known of all ranks: if the loss came after that, they have moved.
    known = ["1.running_mean", "1.running_var", "1.num_batches_tracked"] if loss == "exit in backward" else []
    assert report["moved"] == known
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "report"]
    assert int(torch.load(tmp_path / "checkpoint")["1.num_batches_tracked"]) == LAST
