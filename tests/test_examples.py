"""The examples run, say the same each time, and say what the README shows of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def without_last_digits(line: str) -> str:
    """Replace figures such as 3e-07: float32's own rounding, which is another on another machine."""
    return re.sub(r"\d+(\.\d+)?e-\d+$", "#", line)


def test_the_broken_checkpoint_is_found_mended_and_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    said = printed("broken_checkpoint.py", capsys)
    codes = [line.split(":")[0].split(", ")[1] for line in said if line.startswith("  danger")]
    assert codes == ["never-called", "eps-differs", "one-plus-doubled"]
    distances = [float(line.rpartition(" ")[2]) for line in said if "off by" in line]
    assert distances[0] > 0.5
    assert distances[1] == 0  # 1 + fl(fl(w + 1) − 1) rounds to fl(w + 1): mending brings every bit back
    assert 0 < distances[2] < 1e-5
    assert [without_last_digits(line) for line in printed("broken_checkpoint.py", capsys)] == [
        without_last_digits(line) for line in said
    ]
    shown = re.search(r"```\n(as loaded.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    lines = [line for line in shown[1].splitlines() if line.strip() != "…"]
    kept = [without_last_digits(line) for line in said]
    assert [line for line in lines if without_last_digits(line) not in kept] == []


def test_large_mean(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [line.split()[-2:] for line in printed("large_mean.py", capsys)]
    assert [name for name, _ in errors] == ["normkit", "F.layer_norm"] * 3
    for (_, ours), (_, theirs) in zip(errors[::2], errors[1::2], strict=True):
        assert float(ours) < 1e-6
        assert float(theirs) > 1e-3
