"""The pytest plugin: a readable report, and nothing for those who do not use it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_pytest(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "normkit_pytest", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_wrong_norm_fails_with_one_report_and_a_right_one_passes(tmp_path: Path):
    code = """
import torch, normkit as nk

def mine(x, weight, eps):
    return nk.rms_norm(x, weight, eps=eps, spec=nk.OLMO2)

def test_right(norm_conformance):
    with nk.use("reference"):
        assert "B2" in norm_conformance(mine, spec=nk.OLMO2, backward=False, only=["A", "B"]).passed

def test_wrong(norm_conformance):
    with nk.use("reference"):
        norm_conformance(mine, spec=nk.LLAMA, backward=False, only=["A", "B"])
"""
    result = run_pytest(tmp_path, code)
    assert "1 failed, 1 passed" in result.stdout, result.stdout
    assert "FAILS B2: Rounding before or after the weight" in result.stdout
    assert "smallest failing input" in result.stdout
    assert "normkit_pytest.py" not in result.stdout, "the report needs no traceback"


def test_other_suites_pay_nothing(tmp_path: Path):
    code = """
import sys

def test_nothing_was_imported():
    assert not {"torch", "normkit"} & set(sys.modules)
"""
    result = run_pytest(tmp_path, code)
    assert "1 passed" in result.stdout, result.stdout


def test_the_entry_point_names_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"normkit_pytest": "normkit_pytest"}
    assert (ROOT / "src" / "normkit_pytest.py").exists()


@pytest.mark.slow
def test_testing_is_loaded_only_when_asked_for():
    code = "import sys, normkit as nk; a = 'normkit.testing' in sys.modules; nk.testing.check; print(a)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out == "False\n"
