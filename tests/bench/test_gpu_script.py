"""`benchmarks/gpu.py` where things go wrong: kernels that fail, processes that die or hang, time that runs out."""

from __future__ import annotations

import importlib.util
import itertools
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from normkit.bench.measure import Measured, Method, measure
from normkit.bench.peers import Copy, CopyAgain, Normkit, NormkitInto
from normkit.bench.shapes import GPU_SHAPES, Case, Shape
from normkit.bench.timing import Samples

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SMALL = Shape((3, 40))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    yield load("gpu_cases")
    del sys.modules["gpu_cases"]


@pytest.fixture(scope="module")
def script(cases: ModuleType) -> Iterator[ModuleType]:
    yield load("gpu")
    del sys.modules["gpu"]


@pytest.fixture
def session(script: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "scratch").mkdir()
    return script.Session("cpu", True, tmp_path, tmp_path / "scratch", time.monotonic() + 60)


def made_up(case: Case, ours: float = 1.1) -> Measured:
    names = {"copy": 1.0, "copy again": 1.0, "normkit": ours, "normkit, out=": ours, "nn.RMSNorm": 2.0}
    names |= {"normkit, graph": 1.0, "Liger": 3.0}
    samples = {n: Samples(1, tuple(1e-4 * f * w for w in (1.0, 1.01, 0.99, 1.0))) for n, f in names.items()}
    return Measured(case, samples, {}, {}, dict.fromkeys(names, 0.25))


def test_what_tells_most_comes_first_and_nothing_twice(cases: ModuleType) -> None:
    found = cases.bench_cases("cuda:0", False)
    assert len(set(found)) == len(found)
    wide = [s for s in GPU_SHAPES if s.rows > 16]
    assert [c.shape for c in found[: len(wide)]] == wide
    assert all((c.op, c.which, c.dtype) == ("rms", "forward", "bfloat16") for c in found[: len(wide)])
    assert {(c.op, c.which) for c in found} == set(
        itertools.product(("rms", "layer", "add_rms"), ("forward", "backward"))
    ) | {("rms", "step")}
    assert {s for s in GPU_SHAPES if s.rows <= 16} <= {c.shape for c in found[:30]}
    assert all(c.gpu for c in (*found, *cases.cluster_cases("cuda:0", False)))
    assert set(cases.cluster_cases("cuda:0", False)) & set(found), "held against the kernels without clusters"


def test_a_case_that_fails_is_a_record_and_the_next_is_timed(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(case: Case, peers: Any, method: Method) -> Measured:
        if case.which == "backward":
            raise RuntimeError("ptxas failed\nwith much more text")
        return measure(case, peers, method)

    monkeypatch.setattr(cases, "measure", failing)
    listed = [(i, Case("rms", which, SMALL, "float32")) for i, which in enumerate(("forward", "backward", "step"))]
    peers = (Copy(), CopyAgain(), NormkitInto(), Normkit())
    found = list(cases.records(listed, peers, Method(2, 0, 0.0), seconds=60))
    assert [r.measured is None for r in found] == [False, True, False]
    assert found[1].why == "RuntimeError: ptxas failed"
    assert "FAILED RuntimeError" in cases.said(found[1])
    assert "normkit" in cases.said(found[0])


def test_no_case_is_begun_without_time_for_it(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cases.time, "monotonic", lambda: now[0])

    def ten_seconds(case: Case, *_: Any) -> Measured:
        now[0] += 10
        return made_up(case)

    monkeypatch.setattr(cases, "measure", ten_seconds)
    listed = [(i, Case("rms", "forward", SMALL, "float32")) for i in range(9)]
    assert len(list(cases.records(listed, (), Method(), seconds=46))) == 4


def worker(file: Path, records: list[Any], ending: str) -> subprocess.Popen[bytes]:
    """A process that writes records and ends in one way or another."""
    with file.open("ab") as out:
        for record in records:
            pickle.dump(record, out)
    return subprocess.Popen([sys.executable, "-c", f"import os, sys, time; {ending}"], start_new_session=True)


def test_a_broken_gpu_and_a_dead_process_cost_a_case_each(
    script: ModuleType, cases: ModuleType, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = cases.bench_cases("cpu", True)
    firsts: list[int] = []
    endings = iter([([0, 1], "sys.exit(3)"), ([2], "os.abort()"), ([4, 5, 6, 7], "sys.exit(0)")])

    def start(name: str, file: str, *options: str, **_: str) -> subprocess.Popen[bytes]:
        firsts.append(int(options[1]))
        indices, ending = next(endings)
        made = [cases.Record(i, every[i], made_up(every[i])) for i in indices]
        if indices[0] == 0:
            made[1] = cases.Record(1, every[1], None, "AcceleratorError: illegal memory access")
        return worker(session.scratch / file, made, ending)

    monkeypatch.setattr(session, "cases", start)
    found = script.timed(session, "bench", 30.0)
    assert firsts == [0, 2, 4]  # after the broken one, then past the case in which the process died
    assert [r.index for r in found] == [0, 1, 2, 4, 5, 6, 7]
    assert any("illegal memory access" in line for line in session.wrong)
    assert any("in case 3" in line for line in session.wrong)
    assert len(script.runs_of(found)) == 6


def test_a_process_that_hangs_is_ended(script: ModuleType, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STARTING", 0.1)
    monkeypatch.setattr(
        session, "cases", lambda name, file, *_, **__: worker(session.scratch / file, [], "time.sleep(99)")
    )
    begun = time.monotonic()
    assert script.timed(session, "clusters", 1.0) == []
    assert time.monotonic() - begun < 20
    assert session.wrong == ["clusters: the process ended (out of time) in case 0"]


def test_a_record_that_was_cut_off_is_left_out(cases: ModuleType, tmp_path: Path) -> None:
    whole = pickle.dumps(cases.Record(0, Case("rms", "forward", SMALL, "float32"), None, "x"))
    (tmp_path / "a").write_bytes(whole + whole[:-20])
    assert [r.index for r in cases.read(tmp_path / "a")] == [0]
    assert cases.read(tmp_path / "none") == []


def test_tests_that_fail_are_named_and_change_the_exit_code(script: ModuleType, session: Any) -> None:
    log = session.out / "tests.log"
    log.write_text("FAILED tests/a.py::test_b - oh\n== 1 failed, 7 passed in 3.1s ==\n")
    assert script.outcome_of_tests(session, 1) == "1 failed, 7 passed in 3.1s"
    assert session.wrong == ["tests: exit code 1: tests/a.py::test_b"]
    log.write_text("No module named pytest\n")
    assert "see tests.log" in script.outcome_of_tests(session, 1)
    assert "stopped" in (script.outcome_of_tests(session, None), session.wrong[-1])[1]
    assert len(session.wrong) == 3


def test_the_report_ends_with_goals_and_complaints(script: ModuleType, session: Any) -> None:
    wide = next(s for s in GPU_SHAPES if s.width == 65536)
    run = [made_up(Case("rms", "forward", s, "bfloat16", "cuda:0"), 1.05) for s in (GPU_SHAPES[0], GPU_SHAPES[6], wide)]
    broken = Measured(
        run[1].case, {n: run[1].samples[n] for n in ("copy", "copy again")}, {}, {"normkit": "failed: x"}, {}
    )
    session.wrong = [f"complaint {i}" for i in range(20)]
    lines = script.report(session, [*run, broken], [made_up(run[2].case, 1.02)], missing=2)
    text = "\n".join(lines)
    assert "goals reached: 2 of 2; not timed: 2" in text
    (row,) = [line for line in lines if "32768×4096" in line and "reached" in line]
    assert row.split()[-2:] == ["1.90", "2.86"]
    assert "failed: x" in text
    (cluster,) = [line for line in lines if "65536" in line and "0.25" in line]
    assert cluster.split()[-2:] == ["98%", "95%"]
    assert lines[-1] == "and 8 more, in bench.json"
    assert sum(map(len, lines)) < 11_000


def test_files_are_written_whatever_there_is(script: ModuleType, session: Any) -> None:
    script.write(session, [], [])
    assert json.loads((session.out / "bench.json").read_text())["cases"] == []
    assert (session.out / "bench.csv").read_text().startswith("op,")
    assert session.wrong == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line() -> None:
    found = subprocess.run([sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "--device cuda" in found.stderr


@pytest.mark.slow
def test_the_whole_path_runs_interpreted(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    command = [sys.executable, BENCHMARKS / "gpu.py", "--device", "cpu", "--toy", "--out", tmp_path, "--seconds", "400"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "6 passed" in found.stdout
    assert "10 of 10 cases, 0 complaints" in found.stdout
    assert "not timed: 0" in found.stdout
    data = json.loads((tmp_path / "bench.json").read_text())
    assert len(data["cases"]) == 8
    names = {"bench.csv", "bench.json", "bench.svg", "clusters.json", "log.txt", "table.txt", "tests.log"}
    assert {p.name for p in tmp_path.iterdir()} == names
