"""The tables in docs/ are what the code says; the README names only what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import normkit

ROOT = Path(__file__).parent.parent


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["wirings.md", "conventions.md"])
def test_tables_are_generated_from_the_code(page: str) -> None:
    written = (ROOT / "docs" / page).read_text()
    assert written == generator().PAGES[page](), "run `python docs/generate.py`"


def test_python_blocks_of_the_readme_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "the README shows no Python"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_names_in_the_readme_exist() -> None:
    names = set(re.findall(r"\bnk\.([A-Za-z_0-9]+)", (ROOT / "README.md").read_text()))
    assert names
    missing = sorted(n for n in names if not hasattr(normkit, n))
    assert missing == []
