import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from toys import MIXED, Recorder, toy

from normkit.environment import describe
from normkit.lab.claims import collect
from normkit.lab.runs import engine, folder
from normkit.lab.runs.engine import Order, Result, run
from normkit.lab.runs.interrupts import Interrupts
from normkit.lab.runs.judged import judge_claim, read_run
from normkit.lab.runs.lines import RunError
from normkit.lab.runs.pool import Worker
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))


class NoReport:
    """Rendering left out: it has tests of its own and takes seconds."""

    worker = None
    due = busy = unfinished = False

    def __init__(self, *_: object) -> None: ...

    def render_if_due(self, last: bool = False) -> None: ...


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Rendering", NoReport)
    monkeypatch.setattr(folder, "describe", lambda: describe(calibrate=False))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return toy(tmp_path, monkeypatch)


def go(module: ModuleType, out: Path, *ids: str, view: Recorder | None = None, jobs: int = 1, **more: Any) -> Result:
    claims = [(claim, name) for claim, name in collect([module]) if not ids or claim.id in ids]
    with Interrupts() as interrupts:
        return run(Order(claims, more.pop("settings", SETTINGS), out, jobs, **more), view or Recorder(), interrupts)


def values(out: Path) -> dict[tuple[str, str, int], Any]:
    return {(m.study, m.arm, m.seed): m.values for m in read_run(out).measurements}


def test_a_whole_run(module: ModuleType, tmp_path: Path):
    out, view = tmp_path / "deep" / "run", Recorder()
    result = go(module, out, view=view, jobs=2)
    verdicts = {j.claim.id: j for j in result.judged}
    words = {name: j.judgement.verdict for name, j in verdicts.items() if j.judgement}
    # T1 and T2 judge one study; a measurement that diverges is data, not an error.
    assert words == {
        "T1": Verdict.HOLDS,
        "T2": Verdict.FAILS,
        "DIV": Verdict.FAILS,
        "CLK": Verdict.HOLDS,
    }
    assert {name for name, j in verdicts.items() if j.flipped} == {"T1", "T2", "CLK"}
    assert result.could_not_run == ("BAD",)
    assert verdicts["BAD"].error.endswith("RuntimeError: the toy is broken")
    assert view.verdicts[-1] == "CLK"  # times are taken when all others are done
    assert not result.interrupted
    stored = values(out)
    assert stored["diverged", "low", 0]["value"] is None
    assert {cell[0] for cell in stored} == {"steady", "diverged", "clock"}
    assert sum(cell[0] == "steady" for cell in stored) == 6  # measured once for both claims
    on_disk = {entry["id"]: entry for entry in json.loads((out / "verdicts.json").read_text())}
    assert on_disk["T1"]["verdict"] == "holds"
    assert on_disk["BAD"]["verdict"] is None
    assert json.loads((out / "environment.json").read_text())["torch"]
    again = {c.id: judge_claim(c, read_run(out)) for c in module.CLAIMS}  # the folder alone gives the same
    assert again["T1"].judgement == verdicts["T1"].judgement
    assert again["BAD"].error == verdicts["BAD"].error
    assert again["BAD"].missing == ("low, seed 0", "low, seed 1", "high, seed 0", "high, seed 1")


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_number_of_workers(module: ModuleType, tmp_path: Path):
    go(module, tmp_path / "one", "T1", jobs=1)
    go(module, tmp_path / "two", "T1", jobs=2)
    assert values(tmp_path / "one") == values(tmp_path / "two")


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go(module, tmp_path / "run", "T1")
    before = (tmp_path / "run" / "measurements.jsonl").read_bytes()

    def no_worker(*_: object, **__: object) -> None:
        pytest.fail("a worker was started")

    monkeypatch.setattr(Worker, "__init__", no_worker)
    view = Recorder()
    go(module, tmp_path / "run", "T1", "T2", view=view)
    assert view.verdicts == ["T1", "T2"]
    assert (tmp_path / "run" / "measurements.jsonl").read_bytes() == before


@pytest.mark.slow
def test_missing_and_half_written_lines_are_made_again_with_the_same_bits(module: ModuleType, tmp_path: Path):
    out = tmp_path / "run"
    go(module, out, "T1")
    first, file = values(out), out / "measurements.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    foreign = lines[0].replace(b'"key": "', b'"key": "other')
    file.write_bytes(b"".join([lines[0], foreign, *lines[1:3], lines[3][:40]]))
    view = Recorder()
    go(module, out, "T1", view=view)
    assert any("cut short" in text for text in view.notices)
    assert view.plan is not None
    assert len(view.plan.missing) == 3
    assert values(out) == first
    kept = file.read_bytes()
    assert foreign in kept
    # The line of another key came later than the valid one, and the last line of a cell counts.
    assert kept.count(lines[0]) == 2


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused_and_force_moves_it_aside(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "run"
    go(module, out, "T1")
    before = (out / "measurements.jsonl").read_bytes()
    other = replace(SETTINGS, seeds=(5, 6, 7))
    with pytest.raises(RunError, match=r"seeds is \[0, 1, 2\], asked for \[5, 6, 7\].*--force"):
        go(module, out, "T1", settings=other)
    assert (out / "measurements.jsonl").read_bytes() == before
    same_text = replace(SETTINGS, corpus="the same bytes elsewhere")
    assert go(module, out, "T1", settings=same_text).judged[0].judgement
    view = Recorder()
    go(module, out, "T1", settings=other, force=True, view=view)
    assert {seed for _, _, seed in values(out)} == {5, 6, 7}
    assert (out / "replaced-1" / "measurements.jsonl").read_bytes() == before
    assert "replaced-1" in view.notices[0]


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_whole_lines(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, written = os.write, [0]

    def filling(fd: int, data: bytes) -> int:
        written[0] += 1
        if written[0] > 2:
            real(fd, data[:30])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(RunError, match="No space left"):
        go(module, tmp_path / "run", "T1")
    assert len(values(tmp_path / "run")) == 2
    assert read_run(tmp_path / "run").notices == ()


@pytest.mark.parametrize("name", ["a file", "a file/below"])
def test_a_path_that_is_no_folder_is_refused(module: ModuleType, tmp_path: Path, name: str):
    (tmp_path / "a file").write_text("precious")
    with pytest.raises(RunError, match="cannot be made a run folder"):
        go(module, tmp_path / name, "T1")
    assert (tmp_path / "a file").read_text() == "precious"


def test_settings_that_cannot_be_read_are_not_overwritten(module: ModuleType, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text('{"theme": "dark"}')
    with pytest.raises(RunError, match=r"settings\.json: cannot be read as settings"):
        go(module, tmp_path / "run", "T1")
    assert (tmp_path / "run" / "settings.json").read_text() == '{"theme": "dark"}'


def test_an_interrupted_run_keeps_what_it_measured_and_ends_its_workers(module: ModuleType, tmp_path: Path):
    pids: list[int] = []

    class Impatient(Recorder):
        def judged(self, judged: Any) -> None:
            super().judged(judged)
            os.kill(os.getpid(), 2)

    original = Worker.__init__

    def remember(self: Worker, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        pids.append(self._process.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "__init__", remember)
        result = go(module, tmp_path / "run", "DIV", "T1", view=Impatient())
    assert result.interrupted
    assert [j.claim.id for j in result.judged] == ["DIV"]
    assert len(values(tmp_path / "run")) >= 2
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_study_whose_judging_raises_is_reported_and_the_run_goes_on(module: ModuleType, tmp_path: Path):
    claim, name = next((c, n) for c, n in collect([module]) if c.id == "T1")

    def wrong(evidence: Any) -> Any:
        return evidence.values("a", "no such key")

    broken = replace(claim, literal=replace(claim.literal, criteria=wrong))
    whole = next((c, n) for c, n in collect([module]) if c.id == "T2")
    with Interrupts() as interrupts:
        result = run(Order([(broken, name), whole], SETTINGS, tmp_path / "run", 1), Recorder(), interrupts)
    assert result.could_not_run == ("T1",)
    assert "no such key" in result.judged[0].error
    assert result.judged[1].judgement


@pytest.mark.slow
def test_what_cannot_be_tested_has_its_verdict_without_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, view = tmp_path / "run", Recorder()
    mixed = toy(tmp_path, monkeypatch, MIXED)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "__init__", lambda *_: pytest.fail("nothing to measure, and a worker all the same"))
        result = go(mixed, out, "OPEN", view=view)
    (judged,) = result.judged
    assert judged.judgement is not None
    assert judged.judgement.verdict is Verdict.UNTESTABLE
    assert (judged.flipped, judged.control_judgement, judged.missing, judged.error) == (None, None, (), "")
    assert result.could_not_run == ()
    assert view.verdicts == ["OPEN"]
    assert values(out) == {}
    (entry,) = json.loads((out / "verdicts.json").read_text())
    assert (entry["verdict"], entry["summary"]) == ("not testable here", "Dear to whom is not said.")
    assert (entry["study"], entry["control"], entry["flipped"]) == (None, None, None)
    assert (entry["literal"], entry["corrected"], entry["missing"]) == ([], [], [])
    go(mixed, out, "OPEN", "T1", view=view)
    assert view.verdicts == ["OPEN", "OPEN", "T1"]
    assert {v["id"] for v in json.loads((out / "verdicts.json").read_text())} == {"OPEN", "T1"}
