"""`import normkit` costs torch and nothing heavier, and does nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("numpy.testing", "numba", "matplotlib", "jinja2", "typer", "rich", "transformers", "triton", "pandas", "scipy")


def fresh(code: str) -> str:
    """Run ``code`` in a new interpreter and return what it prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return result.stdout


def loaded_by(statement: str) -> set[str]:
    return set(json.loads(fresh(f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))")))


def test_import_loads_torch_and_nothing_heavier() -> None:
    extra = loaded_by("import torch, normkit") - loaded_by("import torch")
    foreign = {name.split(".")[0] for name in extra} - {"normkit"} - set(sys.stdlib_module_names)
    assert foreign == set()
    assert "normkit.lab" not in extra
    assert "normkit.cli" not in extra


@pytest.mark.slow
def test_the_check_sees_a_heavier_import() -> None:
    extra = loaded_by("import torch, normkit, rich") - loaded_by("import torch")
    assert "rich" in {name.split(".")[0] for name in extra} - {"normkit"} - set(sys.stdlib_module_names)


def test_import_leaves_torch_alone() -> None:
    code = """
import torch
before = (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), torch.is_grad_enabled())
patched = {n: id(v) for m in (torch.nn.functional, torch.nn, torch) for n, v in vars(m).items()}
import normkit

import pytest
after = {n: id(v) for m in (torch.nn.functional, torch.nn, torch) for n, v in vars(m).items()}
assert patched == after
assert before == (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), torch.is_grad_enabled())
print("ok")
"""
    assert fresh(code) == "ok\n"


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    import normkit

    assert normkit.__version__ == version("normkit")
