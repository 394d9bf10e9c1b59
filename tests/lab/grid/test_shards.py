"""Gradients from parts of a batch: the stated bounds, and ``torchrun`` against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.grid.options import Grid
from normkit.lab.grid.shards import backward_of
from normkit.lab.model.training import next_byte_loss, whole_batch
from normkit.lab.runs.judged import read_run

SRC = Path(nk.__file__).parents[1]
UNIT = 2.0**-24


def bigrams(seed: int) -> nn.Embedding:
    torch.manual_seed(seed)
    return nn.Embedding(256, 256)


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_parts_give_the_batchs_gradient_within_the_bound(shards: int, seed: int):
    windows = torch.randint(0, 7, (12, 33), generator=torch.Generator().manual_seed(seed))
    whole, parts = bigrams(seed), bigrams(seed)
    loss = whole_batch(whole, windows)
    other = backward_of(parts, shards)(parts, windows)
    with torch.no_grad():  # every position's share of the gradient, in float64
        tokens, targets = windows[:, :-1].flatten(), windows[:, 1:].flatten()
        terms = whole.weight.double()[tokens].softmax(-1)
        terms[torch.arange(len(targets)), targets] -= 1
        n = len(tokens)
        size = torch.zeros(256, 256, dtype=torch.float64).index_add_(0, tokens, terms.abs() / n)
    gamma = (n + 2) * UNIT / (1 - (n + 2) * UNIT)
    assert abs(other - loss) <= 2 * gamma * loss  # a mean of positive terms
    assert whole.weight.grad is not None
    assert parts.weight.grad is not None
    assert bool(((whole.weight.grad - parts.weight.grad).double().abs() <= 2 * gamma * size).all())


def test_parts_are_averaged_in_order_and_divided_once():
    windows = torch.randint(0, 256, (6, 9), generator=torch.Generator().manual_seed(2))
    net, apart = bigrams(3), bigrams(3)
    backward_of(net, 3)(net, windows)
    gradients: list[torch.Tensor] = []
    for part in windows.chunk(3):
        (gradient,) = torch.autograd.grad(next_byte_loss(apart, part), [apart.weight])
        gradients.append(gradient)
    assert net.weight.grad is not None
    assert torch.equal(net.weight.grad, ((gradients[0] + gradients[1]) + gradients[2]) / 3)


def test_running_statistics_are_refused_by_name():
    for norm in (nn.BatchNorm1d(4), nk.BatchNorm(4)):
        with pytest.raises(ValueError, match="0 keeps running statistics"):
            backward_of(nn.Sequential(norm), 2)
    with pytest.raises(ValueError, match="--norm batch with --shards 2"):
        Grid(wirings=("pre",), norms=("batch",), shards=2)
    with pytest.raises(ValueError, match="--shards 3: expected a divisor of --rows, 16"):
        Grid(wirings=("pre",), norms=("rms",), shards=3)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_torchrun_comes_to_the_bits_of_one_process(processes: int, text: Path, brought: Path, tmp_path: Path):
    words = ["lab", "train", "--wiring", "pre,post", "--model", "brought_models:in_a_dict", "--depth", "1"]
    words += ["--width", "16", "--rows", "6", "--steps", "20", "--lr", "1e-2", "--seeds", "0-1", "--corpus", str(text)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), str(brought)]), "OMP_NUM_THREADS": "1"}

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, *command]
        return subprocess.run(
            words, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    together = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "normkit.cli", *words]
    first = call(*together, "--out", "together")
    assert first.returncode == 0, first.stderr
    alone = call("-m", "normkit.cli", *words, "--shards", str(processes), "--jobs", "1", "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    a, b = (
        {(m.arm, m.seed): m.values for m in read_run(tmp_path / name).measurements} for name in ("together", "alone")
    )
    assert len(a) == 8
    assert a == b
    assert first.stdout == alone.stdout
    again = call(*together, "--out", "alone")  # what one process measured need not be measured again
    assert "8 are there already" in again.stderr
    assert again.stdout == alone.stdout


@pytest.mark.slow
def test_a_lost_process_is_named_and_the_same_command_goes_on(text: Path, brought: Path, tmp_path: Path):
    words = ["lab", "train", "--wiring", "pre", "--model", "brought_models:lost", "--depth", "1", "--width", "16"]
    words += ["--rows", "4", "--steps", "20", "--lr", "1e-2", "--seeds", "0", "--corpus", str(text)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), str(brought)]), "OMP_NUM_THREADS": "1"}

    def call(out: str) -> subprocess.CompletedProcess[str]:
        together = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "normkit.cli", *words]
        return subprocess.run(
            [*together, "--out", out], check=False, env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    (tmp_path / "lose").touch()
    broken = call("run")
    assert broken.returncode != 0
    assert "a process of torchrun was lost during model/brought_models:lost/warmup-0/lr-0.01 seed 0" in broken.stderr
    assert "1 measurements made before are kept in run" in broken.stderr
    assert len(read_run(tmp_path / "run").measurements) == 1
    (tmp_path / "lose").unlink()
    mended, whole = call("run"), call("whole")
    assert mended.returncode == whole.returncode == 0, mended.stderr
    a, b = ({(m.arm, m.seed): m.values for m in read_run(tmp_path / n).measurements} for n in ("run", "whole"))
    assert len(a) == 3
    assert a == b
