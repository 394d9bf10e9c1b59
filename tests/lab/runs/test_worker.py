import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from toys import MIXED, SOURCE, toy

from normkit.lab.runs.pool import Pool, Worker
from normkit.lab.runs.worker import find_study
from normkit.lab.settings import Settings


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = SOURCE.replace(
        "BROKEN = Study",
        "TENSOR = Study('tensor', arms, lambda p, b: {'t': torch.ones(1)}, lambda p: 1.0)\nBROKEN = Study",
    ).replace("CLAIMS = (", "CLAIMS = (\n    claim('TEN', TENSOR),")
    return toy(tmp_path, monkeypatch, source)


@pytest.fixture
def pool(tmp_path: Path, module: ModuleType) -> Iterator[Pool]:
    with (tmp_path / "log").open("wb") as log:
        pool = Pool(Settings(), log)
        yield pool
        pool.stop()


def ask(pool: Pool, worker: Worker, module: ModuleType, study: str, arm: str = "high") -> dict[str, Any]:
    worker.give(None, {"module": module.__name__, "study": study, "arm": arm, "seed": 0})
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for _, _, reply in pool.wait(1.0):
            return reply
    raise TimeoutError


def test_a_worker_measures_says_what_went_wrong_and_goes_on(pool: Pool, module: ModuleType, tmp_path: Path):
    worker = pool.start()
    first = ask(pool, worker, module, "steady")
    assert first["seconds"] > 0
    assert first["values"]["threads"] == 1
    assert first["values"]["deterministic"] is True
    assert ask(pool, worker, module, "broken") == {"error": "RuntimeError: the toy is broken", "kind": "RuntimeError"}
    assert "values.t is a Tensor" in ask(pool, worker, module, "tensor")["error"]
    assert ask(pool, worker, module, "diverged", "low")["values"] == {"value": None, "loss": [1.0, None]}
    assert ask(pool, worker, module, "steady")["values"] == first["values"]  # global streams start anew each time
    log = (tmp_path / "log").read_text()
    assert log.count("noise on stdout") == 2  # prints go to the log, replies have the pipe to themselves
    assert 'raise RuntimeError("the toy is broken")' in log


def test_a_killed_worker_is_an_error_that_names_the_signal(pool: Pool, module: ModuleType, monkeypatch: Any):
    monkeypatch.setenv("TOY_SECONDS", "60")
    worker = pool.start()
    pid = worker._process.pid
    os.kill(pid, signal.SIGTERM)  # Ctrl-C and the like reach the whole group; only the parent decides
    os.kill(pid, signal.SIGINT)
    worker.give(None, {"module": module.__name__, "study": "steady", "arm": "low", "seed": 0})
    assert list(pool.wait(0.5)) == []
    os.kill(pid, signal.SIGKILL)
    [(dead, _, reply)] = pool.wait(10.0)
    assert dead is worker
    assert "SIGKILL" in reply["error"]
    assert pool.workers == []


def test_a_worker_ends_with_its_input_even_in_the_middle_of_a_measurement(
    pool: Pool, module: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOY_SECONDS", "60")
    worker = pool.start()
    worker.give(None, {"module": module.__name__, "study": "steady", "arm": "low", "seed": 0})
    time.sleep(3.0)  # well into the sleep
    stdin = worker._process.stdin
    assert stdin is not None
    stdin.close()  # as the system does when the parent is killed
    assert worker._process.wait(timeout=5) == 0


def test_a_timing_worker_has_all_cores_and_torch_as_its_users_find_it(pool: Pool, module: ModuleType):
    from normkit.environment import usable_cores

    values = ask(pool, pool.start(timing=True), module, "clock")["values"]
    assert values["threads"] == usable_cores()
    assert values["deterministic"] is False


def test_a_study_is_found_by_the_claims_of_its_module(module: ModuleType):
    assert find_study(module.__name__, "diverged") is module.DIVERGED


def test_a_study_is_found_past_what_nobody_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = toy(tmp_path, monkeypatch, MIXED)
    assert find_study(module.__name__, "clock") is module.CLOCK
