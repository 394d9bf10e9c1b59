from pathlib import Path
from typing import Any

import pytest

from normkit.lab.runs import rendering
from normkit.lab.runs.rendering import Rendering


class FakeWorker:
    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def give(self, task: None, request: dict[str, Any]) -> None:
        assert task is None
        self.given.append(request)


class FakePool:
    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []

    def start(self) -> FakeWorker:
        self.workers.append(FakeWorker())
        return self.workers[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rendering.time, "monotonic", lambda: now[0])
    return now


def made(notices: list[str]) -> tuple[Rendering, FakePool]:
    pool = FakePool()
    return Rendering(pool, Path("run"), notices.append), pool  # type: ignore[arg-type]


def test_verdicts_that_come_while_it_renders_make_one_more_rendering_after_a_pause(clock: list[float]):
    report, pool = made([])
    report.render_if_due()
    assert pool.workers == []
    assert not report.unfinished
    report.due = True
    report.render_if_due()
    [worker] = pool.workers
    assert worker.given == [{"report": "run", "language": "en"}]
    report.due = True
    report.render_if_due()
    assert len(worker.given) == 1  # one at a time
    clock[0] += 2.0
    report.answered({"path": "run/report.html"})
    clock[0] += 7.9
    report.render_if_due()
    assert len(worker.given) == 1  # 2 s of rendering, then 8 s of measuring undisturbed
    clock[0] += 0.2
    report.render_if_due()
    assert len(worker.given) == 2
    report.answered({"path": "run/report.html"})
    report.due = True
    report.render_if_due(last=True)  # the last one does not wait
    assert len(worker.given) == 3


def test_what_is_missing_is_said_once_with_the_way_to_get_it(clock: list[float]):
    notices: list[str] = []
    report, pool = made(notices)
    for _ in range(2):
        report.due = True
        report.render_if_due(last=True)
        report.answered({"error": "ModuleNotFoundError: No module named 'jinja2'", "kind": "ModuleNotFoundError"})
    assert len(notices) == 1
    assert "jinja2" in notices[0]
    assert "pip install 'normkit[lab]'" in notices[0]
    pool.workers.clear()  # it died
    report.due = True
    report.render_if_due(last=True)
    assert len(pool.workers) == 1
    report.answered({"error": "ValueError: bad figure", "kind": "ValueError"})
    assert notices[1].startswith("no report: ValueError: bad figure. ")
