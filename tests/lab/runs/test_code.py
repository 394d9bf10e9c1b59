import itertools
from pathlib import Path

import pytest

from normkit.lab.runs.code import closure, digest

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / f"pkg{next(_numbers)}"
    (folder / "deep").mkdir(parents=True)
    for file, text in {
        "__init__.py": "from os import path\n",
        "study.py": f'"""Doc."""\nimport torch\n\ndef f():\n    """Doc."""\n    from {folder.name}.deep import near\n',
        "deep/__init__.py": "",
        "deep/near.py": "from ..far import Thing\nfrom . import twin\n",
        "deep/twin.py": "ONE = 1\n",
        "far.py": f"import {folder.name}.study\nfrom normkit.lab.draws import Draws\n\nclass Thing: ...\n",
        "unrelated.py": "X = 1\n",
    }.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_closure_follows_imports_however_deep_round_and_relative(package: Path):
    reached = set(closure([f"{package.name}.study"]))
    ours = {name.removeprefix(f"{package.name}.") for name in reached if name.startswith(package.name)}
    assert ours == {"study", "deep", "deep.near", "deep.twin", "far"}
    assert "normkit.lab.draws" in reached
    assert not any(name.startswith(("torch", "os")) for name in reached)


@pytest.mark.parametrize("file", ["study.py", "far.py", "deep/near.py", "deep/twin.py"])
def test_an_edit_anywhere_in_the_closure_changes_the_digest(package: Path, file: str):
    before = digest([f"{package.name}.study"])
    path = package / file
    path.write_text(path.read_text() + "Y = 2\n")
    assert digest([f"{package.name}.study"]) != before


def test_an_edit_elsewhere_and_of_words_does_not(package: Path):
    before = digest([f"{package.name}.study"])
    (package / "unrelated.py").write_text("X = 2\n")
    study = package / "study.py"
    study.write_text(study.read_text().replace('"""Doc."""', '"""Other words."""') + "\n# a comment\n")
    assert "Other words" in study.read_text()
    assert digest([f"{package.name}.study"]) == before


def test_the_modules_of_a_claim_are_found_without_importing_them(package: Path):
    (package / "study.py").write_text("raise SystemExit('imported')\n")
    assert set(closure([f"{package.name}.study"])) == {f"{package.name}.study"}
