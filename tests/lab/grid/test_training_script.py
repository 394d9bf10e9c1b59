"""`benchmarks/training.py`, which spends eight minutes on a GPU: its path on the CPU, its deadline, its refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normkit.lab.grid.options import Grid
from normkit.lab.runs.judged import read_run

ROOT = Path(__file__).resolve().parents[3]


def call(*options: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "training.py")
    return subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path):
    done = call("--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr == "no CUDA device here; --device cpu --toy takes the same path\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_cut_off_and_called_again_it_leaves_a_whole_run(tmp_path: Path):
    toy = ("--device", "cpu", "--toy", "--out", str(tmp_path), "--jobs", "2", "--steps", "20")
    cut = call(*toy, "--seconds", "27")
    assert cut.returncode == 1, cut.stderr
    assert "go on with --steps 20" in cut.stdout
    whole = call(*toy, "--seconds", "900")
    assert whole.returncode == 0, whole.stderr
    run = read_run(tmp_path)
    grid = Grid.from_text(run.settings.grid)
    assert (grid.precision, grid.warmups, len(grid.lrs)) == ("bfloat16", (0, 2), 3)
    assert len([m for m in run.measurements if "curve" in m.values]) == 4 * 2 * 3 * 2
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert len(verdicts) == 8
    assert (tmp_path / "report.html").exists()
