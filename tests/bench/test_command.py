"""`normkit bench` as it is called: what stands on stdout, the files it writes, the exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from normkit.bench import command
from normkit.bench.measure import Measured, Method, measure
from normkit.bench.shapes import Case
from normkit.cli import app

TINY = ("--shape", "3x32", "--dtype", "float32", "--rounds", "3", "--peer", "nn.RMSNorm", "--peer", "nn.LayerNorm")


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args])


def test_a_table_ends_with_the_means() -> None:
    found = call(*TINY, "--op", "rms", "--op", "layer")
    assert found.exit_code == 0, found.output
    assert "rms · forward · 3×32 · float32" in found.stdout
    assert "layer · forward · 3×32 · float32" in found.stdout
    assert "forward rms, nn.RMSNorm" in found.stdout
    assert "[1/2]" in found.stderr
    assert "[1/2]" not in found.stdout


def test_json_is_all_there_is_on_stdout_and_holds_every_sample() -> None:
    found = call(*TINY, "--json", "--step", "--no-forward", "--seed", "7")
    data: dict[str, Any] = json.loads(found.stdout)
    assert [(c["op"], c["pass"]) for c in data["cases"]] == [("rms", "step"), ("layer", "step"), ("add_rms", "step")]
    assert data["settings"]["seed"] == 7
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert data["environment"]["torch"] == str(torch.__version__)
    for case in data["cases"]:
        assert case["failed"] == {}
        for contender in case["contenders"]:
            assert len(contender["seconds"]) == 3
            assert all(0 < s < 60 for s in contender["seconds"])  # seconds, not µs: three rows of 32 take no minute
        assert "normkit, out=" in case["absent"]


def test_threads_are_used_stated_and_given_back() -> None:
    before = torch.get_num_threads()
    found = call(*TINY, "--op", "rms", "--threads", "1")
    assert "· 1 thread\n" in found.stdout
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_csv_has_a_line_for_everyone_and_reasons_for_the_missing(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    assert call(*TINY, "--op", "rms", "--backward", "--csv", str(path)).exit_code == 0
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert {(r["pass"], r["contender"]) for r in rows} >= {("forward", "nn.RMSNorm"), ("backward", "normkit")}
    missing = [r for r in rows if r["reason_missing"]]
    assert [(r["pass"], r["contender"], r["median_seconds"]) for r in missing] == [("backward", "normkit, out=", "")]
    assert all(float(r["median_seconds"]) > 0 for r in rows if r not in missing)


def test_the_figure_is_an_svg_with_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure is an extra")
    path = tmp_path / "out.svg"
    assert call(*TINY, "--shape", "9x32", "--op", "rms", "--figure", str(path)).exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert text.lstrip().startswith("<?xml")
    for words in ("bytes that must move", "share of copy bandwidth", "rms, forward, float32", "nn.RMSNorm"):
        assert words in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--op", "batch"), "one of rms, layer, add_rms"),
        (("--dtype", "int8"), "one of float32"),
        (("--shape", "12"), "512x768"),
        (("--peer", "apex"), "no such peer"),
        (("--no-forward",), "--backward or --step"),
        (("--figure", "a.png"), "ends in .svg"),
        (("--csv", "no/such/folder/a.csv"), "no folder"),
    ],
)
def test_wrong_usage_is_one_line_and_2(args: tuple[str, ...], words: str) -> None:
    found = call(*args)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_failure_of_our_own_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: Case, peers: object, method: Method) -> Measured:
        good = measure(case, command.peers_named(["nn.RMSNorm"]), method)
        return Measured(case, good.samples, {}, {"normkit": "wrong, not timed: y is off by 3 × …"}, good.errors)

    monkeypatch.setattr(command, "measure", failing)
    found = call(*TINY, "--op", "rms")
    assert found.exit_code == 2
    assert "wrong, not timed" in found.stderr


@pytest.mark.slow
def test_strict_makes_a_missed_goal_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from normkit.bench import goals

    monkeypatch.setitem(goals.SPEEDUPS, ("forward", "rms", "nn.RMSNorm"), 1e9)
    assert call(*TINY, "--op", "rms", "--strict").exit_code == 1
    assert call(*TINY, "--op", "rms").exit_code == 0


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Case] = []

    def once(case: Case, peers: Any, method: Method) -> Measured:
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return measure(case, peers, method)

    monkeypatch.setattr(command, "measure", once)
    found = call(*TINY, "--op", "rms", "--backward", "--json")
    assert found.exit_code == 130
    assert len(json.loads(found.stdout)["cases"]) == 1
    assert "interrupted after 1 of 2 cases" in found.stderr


def test_what_does_not_fit_in_memory_is_said_and_the_rest_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(case: Case, peers: Any, method: Method) -> Measured:
        if case.which == "step":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(case, peers, method)

    monkeypatch.setattr(command, "measure", full)
    found = call(*TINY, "--op", "rms", "--step", "--json")
    assert found.exit_code == 0
    assert [c["pass"] for c in json.loads(found.stdout)["cases"]] == ["forward"]
    assert "does not fit" in found.stderr
