"""`normkit lab train` as it is called: plan first, runs that are killed, doubled, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from normkit.cli import app
from normkit.environment import describe
from normkit.lab.grid.curves import CURVES
from normkit.lab.runs import engine, folder
from normkit.lab.runs.judged import read_run
from normkit.lab.terminal import train as command

SRC = Path(command.__file__).parents[3]
SMALL = ("--wiring", "pre,post", "--depth", "1", "--width", "16", "--steps", "10", "--rows", "2", "--seeds", "0-1")


class NoReport:
    """Rendering left out: the page has tests of its own."""

    worker = None
    due = busy = unfinished = False

    def __init__(self, *_: object) -> None: ...

    def render_if_due(self, last: bool = False) -> None: ...


@pytest.fixture(autouse=True)
def here(tmp_path: Path, brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(brought))
    monkeypatch.setattr(engine, "Rendering", NoReport)
    monkeypatch.setattr(folder, "describe", lambda: describe(calibrate=False))


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["lab", "train", *args])


def values(out: Path) -> dict[Any, Any]:
    return {(m.study, m.arm, m.seed): m.values for m in read_run(out).measurements}


def test_a_dry_run_says_what_it_would_cost_and_touches_nothing(text: Path, tmp_path: Path):
    result = call(*SMALL, "--corpus", str(text), "--dry-run", "--jobs", "2")
    assert result.exit_code == 0, result.stderr
    assert "2 contenders × 1 warm-up × 2 learning rates × 2 seeds = 8 runs of 10 steps" in result.stdout
    assert "pre rms" in result.stdout
    assert "memory: about" in result.stdout
    assert "10 measurements, 0 are there already" in result.stdout
    assert not (tmp_path / "runs").exists()
    data = json.loads(call(*SMALL, "--corpus", str(text), "--dry-run", "--json").stdout)
    cost = data["contenders"]["pre/rms"]
    embedding, head = 256 * 16, 16 * 256
    assert cost["parameters"] == embedding + head + 4 * 16 * 16 + 3 * 16 * 48 + 3 * 16
    assert cost["state"] == 4 * 4 * cost["parameters"]
    logits = 2 * 64 * 256 * 4
    assert logits < cost["saved"] < 20 * logits
    assert cost["run"] > 10 * cost["step"] > 0


@pytest.mark.slow
def test_killed_and_continued_by_another_number_of_workers_it_comes_to_the_same(text: Path, tmp_path: Path):
    whole = call(*SMALL, "--corpus", str(text), "--jobs", "2", "--out", "whole")
    assert whole.exit_code == 0, whole.stderr
    words = [sys.executable, "-m", "normkit.cli", "lab", "train", *SMALL, "--corpus", str(text)]
    process = subprocess.Popen(
        [*words, "--jobs", "1", "--out", "killed"],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines = tmp_path / "killed" / "measurements.jsonl"
    end = time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < end, "nothing measured"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = len(values(tmp_path / "killed"))
    assert 2 <= there < 10, "killed too late to show anything"
    again = call(*SMALL, "--corpus", str(text), "--jobs", "1", "--out", "killed")
    assert again.exit_code == 0, again.stderr
    assert f"{there} are there already" in again.stderr
    assert values(tmp_path / "killed") == values(tmp_path / "whole")
    assert again.stdout == whole.stdout  # verdicts, controls, numbers
    assert json.loads((tmp_path / "killed/verdicts.json").read_text()) == json.loads(
        (tmp_path / "whole/verdicts.json").read_text()
    )
    ended = [json.loads(line) for line in (tmp_path / "whole" / CURVES).read_text().splitlines()]
    assert sum("outcome" in line for line in ended) == 8
    other = call(*SMALL, "--corpus", str(text), "--out", "killed", "--tolerance", "0.5")
    assert other.exit_code == 2
    assert "a run with other settings (grid is" in other.stderr


@pytest.mark.slow
def test_models_of_ones_own_stand_beside_the_labs(text: Path, tmp_path: Path, brought: Path):
    options = ("--lr", "1e-2", "--model", "brought_models:logits_only", "--model", "brought_models:in_a_tuple")
    result = call(*SMALL[2:], *options, "--corpus", str(text), "--jobs", "1", "--json", "--out", "run")
    assert result.exit_code == 0, result.stderr
    verdicts = json.loads(result.stdout)
    assert [v["title"] for v in verdicts] == [
        "brought_models:logits_only trains",
        "brought_models:in_a_tuple against brought_models:logits_only",
    ]
    (difference,) = verdicts[1]["literal"]
    assert difference["values"] == [0.0, 0.0]  # one model, two wrappings
    assert len(list((tmp_path / "run" / "watched").iterdir())) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to train"),
        (("--wiring", "pre", "--lr", "fast"), "--lr 'fast': expected numbers such as 1e-3,3e-3"),
        (("--wiring", "pre", "--warmup", "0.5"), "--warmup '0.5': expected whole numbers"),
        (("--wiring", "pre", "--seeds", "2-1"), "the range '2-1' ends before it begins"),
        (("--wiring", "pre", "--device", "abacus"), "--device 'abacus' cannot be used here"),
        (("--wiring", "pre", "--corpus", "no such text"), "no corpus at no such text"),
        (("--model", "brought_models:nan"), "--model brought_models:nan: its logits hold NaN"),
        (("--model", "brought_models:narrow"), "got (16, 64, 100)"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line_before_anything_is_written(
    options: tuple[str, ...], message: str, text: Path, tmp_path: Path
):
    corpus = () if "--corpus" in options else ("--corpus", str(text))
    result = call(*options, *corpus)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()
