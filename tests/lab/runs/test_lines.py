import errno
import json
import os
from pathlib import Path

import pytest
import torch

from normkit.lab.claim import Measurement
from normkit.lab.runs.lines import Appender, Line, RunError, dump, jsonable, parse


def line(seed: int, value: object = 1.0) -> Line:
    return Line(f"key-{seed}", Measurement("study", "arm/a", seed, {"value": value}, 0.5))


def test_a_line_comes_back_as_it_was_written_to_the_last_bit():
    written = line(3, [0.1, 1e-308, -0.0, 1 / 3, 2**53 + 1, "word", None, True, {"deep": [1]}])
    assert parse(dump(written)) == parse(dump(written))
    assert parse(dump(written)).lines == (written,)
    assert parse(dump(written)).notices == ()


def test_non_finite_numbers_are_null_and_the_line_is_strict_json():
    data = dump(line(0, [float("nan"), float("inf"), -float("inf"), {"x": float("nan")}]))
    assert json.loads(data, parse_constant=pytest.fail)["values"] == {"value": [None, None, None, {"x": None}]}


@pytest.mark.parametrize("value", [torch.ones(1), {1: 2}, {1, 2}, b"bytes", object()])
def test_what_json_cannot_hold_is_refused_with_its_place(value: object):
    with pytest.raises(TypeError, match=r"values\.curve\[1\]"):
        jsonable({"curve": [0.0, value]})


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_half_written_last_line_is_dropped_with_a_notice_and_cut_before_appending(tmp_path: Path, cut: int):
    path = tmp_path / "measurements.jsonl"
    path.write_bytes(dump(line(0)) + dump(line(1))[:cut])
    lines = Appender(path)
    assert lines.parsed.lines == (line(0),)
    assert "cut short" in lines.parsed.notices[0]
    lines.append(line(2))
    lines.close()
    assert path.read_bytes() == dump(line(0)) + dump(line(2))


def test_lines_that_are_no_measurements_are_named_ignored_and_kept(tmp_path: Path):
    path = tmp_path / "measurements.jsonl"
    junk = (
        b'not json\n{"study": "s"}\n[1]\n\xff\xfe\n{"study":"s","arm":"a","seed":0,"key":"k","seconds":0,"values":3}\n'
    )
    path.write_bytes(junk + dump(line(0)))
    lines = Appender(path)
    lines.close()
    assert lines.parsed.lines == (line(0),)
    assert [n.split(":")[0].split()[-1] for n in lines.parsed.notices] == ["1", "2", "3", "4", "5"]
    assert path.read_bytes() == junk + dump(line(0))


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "measurements.jsonl"
    lines = Appender(path)
    lines.append(line(0))
    real = os.write

    def full(fd: int, data: bytes) -> int:
        real(fd, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match="No space left on device"):
        lines.append(line(1))
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
    with pytest.raises(RunError, match="10 of"):
        lines.append(line(1))
    monkeypatch.undo()
    assert path.read_bytes() == dump(line(0))
    lines.append(line(2))
    lines.close()
    assert parse(path.read_bytes()).lines == (line(0), line(2))
