"""The command line: what stands on stdout, the exit codes, and runs that are interrupted, killed or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from toys import LONG, MIXED, SOURCE, toy
from typer.testing import CliRunner, Result

from normkit.cli import app
from normkit.environment import describe
from normkit.lab.claims import collect
from normkit.lab.runs import engine, folder
from normkit.lab.runs.judged import read_run
from normkit.lab.terminal import commands

SRC = Path(commands.__file__).parents[3]

# A process of its own, as the console script is, with toy claims for a catalogue.
START = """
import sys, {name} as toys
from types import SimpleNamespace
from normkit.lab.runs import rendering
from normkit.lab.terminal import commands
from normkit.lab.claims import collect
commands.located = lambda: collect([toys])
commands.load_corpus = lambda path: SimpleNamespace(name="text", sha256="0", bytes=1)
rendering.Rendering.render_if_due = lambda self, last=False: setattr(self, "due", False)
from normkit.cli import main
main()
"""


class NoReport:
    worker = None
    due = busy = unfinished = False

    def __init__(self, *_: object) -> None: ...

    def render_if_due(self, last: bool = False) -> None: ...


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = toy(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "located", lambda: collect([module]))
    text = SimpleNamespace(name="text", sha256="0", bytes=1)
    monkeypatch.setattr(commands, "load_corpus", lambda path: text)
    monkeypatch.setattr(engine, "Rendering", NoReport)
    monkeypatch.setattr(folder, "describe", lambda: describe(calibrate=False))
    return module


@pytest.fixture
def mixed(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toys with a sentence among them that cannot be tested, in place of those without."""
    both = toy(tmp_path, monkeypatch, MIXED)
    monkeypatch.setattr(commands, "located", lambda: collect([both]))
    return both


@pytest.fixture
def long(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toys with a study among them that only a full run measures."""
    made = toy(tmp_path, monkeypatch, LONG)
    monkeypatch.setattr(commands, "located", lambda: collect([made]))
    return made


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["lab", *args])


def start(folder: Path, name: str, *args: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(folder), str(SRC)])
    return subprocess.Popen(
        [sys.executable, "-c", START.format(name=name), "lab", "run", *args],
        env=os.environ | {"PYTHONPATH": path, "TOY_SECONDS": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def until_measured(out: Path, lines: int) -> None:
    end = time.monotonic() + 60
    file = out / "measurements.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < end, "nothing measured"
        time.sleep(0.02)


def values(out: Path) -> dict[Any, Any]:
    return {(m.study, m.arm, m.seed): m.values for m in read_run(out).measurements}


def test_list_is_one_json_list_with_an_object_per_claim(module: ModuleType):
    result = call("list", "--json")
    claims = json.loads(result.stdout)
    assert [c["id"] for c in claims] == ["T1", "T2", "DIV", "BAD", "CLK"]
    assert claims[0]["sentences"] == [1]
    assert claims[0]["seconds"] == pytest.approx(0.06)
    assert claims[0] | {"title": "toy T1", "seeds": 3, "study": "steady", "mode": "quick"} == claims[0]
    assert "T1     1          0.1 s  toy T1" in call("list").stdout


def test_an_unknown_claim_is_answered_with_near_names_and_touches_nothing(module: ModuleType, tmp_path: Path):
    result = call("run", "TT1", "zzz", "--out", "run")
    assert result.exit_code == 2
    assert "no claim 'TT1': did you mean T1" in result.stderr
    assert "no claim 'zzz': there are T1, T2, DIV, BAD, CLK" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "a"], "expected numbers and ranges"),
        (["--seeds", ""], "expected numbers and ranges"),
        (["--seeds", "-3"], "expected numbers and ranges"),
        (["--seeds", "4-0"], "ends before it begins"),
        (["--seeds", "0,0-2"], "occurs twice"),
        (["--device", "abacus"], "cannot be used here"),
        (["--jobs", "0"], "Invalid value"),
        (["--no-such"], "No such option"),
    ],
)
def test_wrong_usage_is_2_before_the_run_folder_is_touched(
    module: ModuleType, tmp_path: Path, args: list[str], words: str
):
    result = call("run", "T1", "--out", "run", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_corpus_that_cannot_be_used_is_2_before_the_run_folder_is_touched(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from normkit.lab.corpus import load_corpus

    monkeypatch.setattr(commands, "load_corpus", load_corpus)
    (tmp_path / "empty.txt").touch()
    result = call("run", "T1", "--out", "run", "--corpus", "empty.txt")
    assert result.exit_code == 2
    assert "empty.txt" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "seeds"), [("0-4", (0, 1, 2, 3, 4)), ("100-101,7", (100, 101, 7)), ("5", (5,))])
def test_seeds(text: str, seeds: tuple[int, ...]):
    assert commands.parse_seeds(text) == seeds


@pytest.mark.slow
def test_a_run_with_json_prints_json_only_and_codes_follow_the_verdicts(module: ModuleType, tmp_path: Path):
    plan = json.loads(call("run", "T1", "T2", "--out", "run", "--dry-run", "--json").stdout)
    assert plan == [
        {"study": "steady", "claims": ["T1", "T2"], "measurements": 6, "cached": 0, "seconds": pytest.approx(0.06)}
    ]
    assert not (tmp_path / "run").exists()
    result = call("run", "t1", "T2", "--out", "run", "--json")
    verdicts = json.loads(result.stdout)
    assert [(v["id"], v["verdict"], v["control"], v["flipped"]) for v in verdicts] == [
        ("T1", "holds", "fails", True),
        ("T2", "fails", "holds", True),
    ]
    assert result.exit_code == 0
    assert "2 claims, 6 measurements, 0 of them cached" in result.stderr
    assert "T1: holds. toy T1" in result.stderr
    assert "6 of them cached" in call("run", "T1", "--out", "run", "--dry-run").stdout
    assert call("run", "T1", "--out", "run", "--strict").exit_code == 0
    strict = call("run", "T1", "T2", "--out", "run", "--strict")
    assert strict.exit_code == 1
    assert re.search(r"^T2 +fails +holds +toy T2 +difference -", strict.stdout, re.MULTILINE)
    other = call("run", "T1", "--out", "run", "--seeds", "0-2")
    assert other.exit_code == 2
    assert "--force" in other.stderr
    broken = call("run", "BAD", "--out", "run", "--strict")
    assert broken.exit_code == 2
    assert "the toy is broken" in broken.stdout
    kept = {v["id"] for v in json.loads((tmp_path / "run" / "verdicts.json").read_text())}
    assert kept == {"T1", "T2", "BAD"}


@pytest.mark.slow
def test_verdicts_are_told_in_chinese_when_asked(mixed: ModuleType, monkeypatch: pytest.MonkeyPatch):
    result = call("run", "T1", "OPEN", "--out", "run", "--lang", "zh")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["论断", "判定", "对照", "标题", "测得"]
    assert re.search(r"^T1    成立          不成立  toy T1    difference ", result.stdout, re.MULTILINE)
    assert re.search(r"^OPEN  此处无法检验  –       toy OPEN  Dear", result.stdout, re.MULTILINE)
    assert "T1: 成立. toy T1" in result.stderr
    refused = call("run", "T1", "--out", "other", "--lang", "tlh")
    assert refused.exit_code == 2
    assert "expected en or zh" in refused.stderr


def test_report_and_compare_refuse_what_is_no_run(module: ModuleType, tmp_path: Path):
    for args in (["report", "nowhere"], ["compare", "nowhere", "nowhere"], ["report", "."]):
        result = call(*args)
        assert result.exit_code == 2
        assert "run folder" in result.stderr
        assert result.stdout == ""


@pytest.mark.slow
def test_compare_puts_verdicts_and_criteria_side_by_side(module: ModuleType, tmp_path: Path):
    assert call("run", "T1", "--out", "a").exit_code == 0
    assert call("run", "T1", "DIV", "--out", "b", "--seeds", "100-102").exit_code == 0
    changed = json.loads((tmp_path / "b" / "verdicts.json").read_text())
    for entry in changed:
        entry["verdict"] = "not decided" if entry["id"] == "T1" else entry["verdict"]
    (tmp_path / "b" / "verdicts.json").write_text(json.dumps(changed))
    found = json.loads(call("compare", "a", "b", "--json").stdout)
    assert [(c["id"], c["a"], c["b"], c["changed"]) for c in found["claims"]] == [
        ("T1", "holds", "not decided", True),
        ("T2", "fails", "fails", False),  # nobody asked for it, but T1's study settles it
        ("DIV", None, "fails", False),
    ]
    criterion = found["claims"][0]["criteria"][0]
    assert criterion["name"] == "b - a"
    assert len(criterion["a"]) == len(criterion["b"]) == 3
    assert criterion["a"] != criterion["b"]
    assert found["settings"] == ["seeds is [0, 1, 2, 3, 4] in a, [100, 101, 102] in b"]
    assert criterion["difference"] is None  # no seed in common
    text = call("compare", "a", "b").stdout
    assert "T1   ≠  holds  |  not decided" in text
    assert "verdicts: 1 of 2 that both runs have differ" in text


@pytest.mark.slow
def test_compare_pairs_what_two_runs_measured_at_the_same_seeds(module: ModuleType, tmp_path: Path):
    assert call("run", "T1", "--out", "a", "--seeds", "0-2").exit_code == 0
    file = tmp_path / f"{module.__name__}.py"
    file.write_text(SOURCE.replace("OFFSET = 1.0", "OFFSET = 1.5"))
    assert call("run", "T1", "--out", "b", "--seeds", "1-3").exit_code == 0
    [t1, _] = json.loads(call("compare", "a", "b", "--json").stdout)["claims"]
    found = t1["criteria"][0]["difference"]
    assert found["seeds"] == [1, 2]
    assert found["mean"] == pytest.approx(0.5)
    assert found["low"] == pytest.approx(0.5)  # the draws are the same, so is every difference
    assert (t1["changed"], t1["differs"]) == (False, True)
    text = call("compare", "a", "b").stdout
    assert "b − a 0.5 [0.5, 0.5] (2 seeds) *" in text
    assert "verdicts: 0 of 2 that both runs have differ" in text
    assert "criteria: 2 of 2 differ that can be paired at the seeds that both have (1, 2)" in text
    same = call("compare", "a", "a").stdout
    assert "T1" not in same
    assert "criteria: 0 of 2 differ" in same


def test_what_cannot_be_tested_is_listed_selected_and_answered_for_nothing(mixed: ModuleType, tmp_path: Path):
    listed = {c["id"]: c for c in json.loads(call("list", "--json").stdout)}
    assert listed["OPEN"] == {
        "id": "OPEN",
        "title": "toy OPEN",
        "sentence": "Toys are dear.",
        "sentences": [7],
        "seconds": 0,
        "seeds": 0,
        "study": None,
        "full_only": False,
        "mode": "quick",
    }
    assert re.search(r"^OPEN +7 +0\.0 s +toy OPEN$", call("list").stdout, re.MULTILINE)
    plan = call("run", "open", "T1", "--out", "run", "--dry-run").stdout
    assert re.search(r"^OPEN +– +0 +0 +nothing: not testable$", plan, re.MULTILINE)
    assert "2 claims, 6 measurements" in plan
    assert json.loads(call("run", "OPEN", "--out", "run", "--dry-run", "--json").stdout) == []
    answered = call("run", "open", "--out", "run", "--strict")
    assert answered.exit_code == 0
    assert re.search(
        r"^OPEN +not testable here +– +toy OPEN +Dear to whom is not said\.$", answered.stdout, re.MULTILINE
    )
    assert "OPEN: not testable here. toy OPEN: Dear to whom is not said." in answered.stderr
    assert values(tmp_path / "run") == {}
    (verdict,) = json.loads(call("run", "OPEN", "--out", "run", "--json").stdout)
    assert verdict["verdict"] == "not testable here"


def test_the_plan_and_the_list_name_what_only_a_full_run_measures(long: ModuleType, tmp_path: Path):
    plan = call("run", "--out", "run", "--dry-run")
    assert re.search(r"^L1, L2 +long +0 +0 +nothing: full only$", plan.stdout, re.MULTILINE)
    assert "4 claims (2 of them full only), 6 measurements" in plan.stdout
    assert plan.stderr == ""
    steps = json.loads(call("run", "--out", "run", "--dry-run", "--json").stdout)
    assert [step["study"] for step in steps] == ["steady"]
    full = call("run", "--full", "--out", "run", "--dry-run").stdout
    assert re.search(r"^L1, L2 +long +2 +0 +2 min 00 s$", full, re.MULTILINE)
    assert "full only" not in full
    assert re.search(r"^L1 +1 +full only +toy L1$", call("list").stdout, re.MULTILINE)
    assert re.search(r"^L1 +1 +2 min 00 s +toy L1$", call("list", "--full").stdout, re.MULTILINE)
    assert [c["full_only"] for c in json.loads(call("list", "--json").stdout)] == [True, False, False, True]


@pytest.mark.parametrize("extra", [[], ["--dry-run"], ["--json"]])
def test_a_quick_run_of_full_only_claims_alone_says_what_to_do(long: ModuleType, tmp_path: Path, extra: list[str]):
    refused = call("run", "l1", "L2", "--quick", "--out", "run", *extra)
    assert refused.exit_code == 2
    assert "nothing to measure in a quick run" in refused.stderr
    assert "L1, L2 are measured in a full run only: `normkit lab run L1 L2 --full`" in refused.stderr
    assert refused.stdout == ""
    assert not (tmp_path / "run").exists()


def test_full_only_claims_beside_others_are_told_apart_from_failures(long: ModuleType, tmp_path: Path):
    result = call("run", "L1", "OPEN", "--out", "run", "--strict")
    assert result.exit_code == 0
    assert "note: L1 is measured in a full run only: `normkit lab run L1 --full`" in result.stderr
    assert "L1: full only. toy L1: not measured in a quick run; run --full" in result.stderr
    line = r"^L1 +full only +– +toy L1 +not measured in a quick run; run --full$"
    assert re.search(line, result.stdout, re.MULTILINE)
    kept = {v["id"]: v for v in json.loads((tmp_path / "run" / "verdicts.json").read_text())}
    expected = {"verdict": None, "full_only": True, "missing": [], "error": ""}
    assert kept["L1"] | expected == kept["L1"]
    assert kept["OPEN"]["full_only"] is False
    chinese = call("run", "L1", "OPEN", "--out", "run", "--lang", "zh").stdout
    assert re.search(r"^L1 +仅完整运行 +– +toy L1 +快速运行不测量；请用 --full 运行$", chinese, re.MULTILINE)
    text = call("compare", "run", "run").stdout
    assert "verdicts: 0 of 0 that both runs have differ" in text


@pytest.mark.slow
def test_compare_puts_what_cannot_be_tested_beside_itself(mixed: ModuleType, tmp_path: Path):
    assert call("run", "T1", "OPEN", "--out", "a").exit_code == 0
    assert call("run", "T1", "--out", "b").exit_code == 0
    found = json.loads(call("compare", "a", "b", "--json").stdout)
    assert found["claims"][1] == {
        "id": "OPEN",
        "a": "not testable here",
        "b": "not testable here",
        "changed": False,
        "rule_changed": False,
        "differs": False,
        "criteria": [],
    }
    assert "OPEN" not in call("compare", "a", "b").stdout
    text = call("compare", "a", "b", "--all").stdout
    assert "OPEN =  not testable here  |  not testable here" in text
    assert "verdicts: 0 of 2 that both runs have differ" in text  # what is not testable has none


@pytest.mark.slow
def test_killed_and_started_again_gives_the_same_bits(module: ModuleType, tmp_path: Path):
    assert call("run", "T1", "--out", "whole", "--jobs", "1").exit_code == 0
    killed = start(tmp_path, module.__name__, "T1", "--out", "killed", "--jobs", "1", seconds=0.4)
    until_measured(tmp_path / "killed", 2)
    killed.kill()
    killed.communicate(timeout=30)
    before = (tmp_path / "killed" / "measurements.jsonl").read_bytes()
    assert 2 <= before.count(b"\n") < 6
    again = start(tmp_path, module.__name__, "T1", "--out", "killed", "--jobs", "2", "--json")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads(out)[0]["verdict"] == "holds"
    assert (tmp_path / "killed" / "measurements.jsonl").read_bytes().startswith(before)
    assert values(tmp_path / "killed") == values(tmp_path / "whole")
    assert len(values(tmp_path / "whole")) == 6


@pytest.mark.slow
def test_a_second_process_is_refused_and_signals_end_the_first_with_130(module: ModuleType, tmp_path: Path):
    out = tmp_path / "run"
    first = start(tmp_path, module.__name__, "T1", "--out", "run", "--jobs", "1", seconds=3.0)
    until_measured(out, 1)
    second = call("run", "T1", "--out", "run")
    assert second.exit_code == 2
    assert f"pid {first.pid}" in second.stderr
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 130
    assert "interrupted" in err
    kept = values(out)
    assert 1 <= len(kept) < 6
    third = start(tmp_path, module.__name__, "T1", "--out", "run", "--jobs", "1", seconds=3.0)
    until_measured(out, len(kept) + 1)
    third.terminate()
    third.communicate(timeout=30)
    assert third.returncode == 130
    assert values(out).items() >= kept.items()


@pytest.mark.slow
def test_edited_code_is_measured_again_and_untouched_code_is_not(module: ModuleType, tmp_path: Path):
    def cached() -> int:
        [step] = json.loads(call("run", "T1", "--out", "run", "--dry-run", "--json").stdout)
        return step["cached"]

    file = tmp_path / f"{module.__name__}.py"
    assert call("run", "T1", "--out", "run").exit_code == 0
    first = values(tmp_path / "run")
    file.write_text(SOURCE + "\n# a comment is no code\n")
    assert cached() == 6
    file.write_text(SOURCE.replace("OFFSET = 1.0", "OFFSET = 2.0"))
    assert cached() == 0
    assert call("run", "T1", "--out", "run").exit_code == 0
    assert cached() == 6
    second = values(tmp_path / "run")
    assert second["steady", "high", 0]["value"] - first["steady", "high", 0]["value"] == pytest.approx(1.0)
    assert second["steady", "low", 0] == first["steady", "low", 0]


def test_env_json_is_json_only():
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["torch"]


def test_every_command_has_examples():
    for command in (["lab", "list"], ["lab", "run"], ["lab", "report"], ["lab", "compare"], ["env"]):
        assert "Examples:" in CliRunner().invoke(app, [*command, "--help"]).stdout
