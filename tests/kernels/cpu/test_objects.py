"""Compiled kernels on disk: found by who may use them, by nobody when stale, rebuilt when torn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normkit.kernels.cpu import objects

RUN = """
import json, sys, torch, normkit as nk
with nk.use("cpu"):
    y = nk.rms_norm(torch.arange(8.0).view(2, 4))
assert torch.allclose(y, torch.nn.functional.rms_norm(torch.arange(8.0).view(2, 4), (4,), eps=1e-6))
from normkit.kernels.cpu import objects
print(json.dumps({"numba": "numba" in sys.modules, "folder": str(objects.cache_folder())}))
"""


def run(cache: Path | None, code: str = RUN, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if cache is not None:
        env["NORMKIT_CACHE"] = str(cache)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.slow
def test_the_second_process_loads_without_numba(tmp_path: Path):
    first = run(tmp_path)
    assert '"numba": true' in first.stdout
    assert str(tmp_path) in first.stdout
    (kept,) = tmp_path.rglob("*.o")
    assert kept.stat().st_mode & 0o044 == 0o044  # a cache filled by one user serves the others
    if "compiled" in first.stderr:  # said once, and only where it took a second
        assert first.stderr.count("normkit: compiled a CPU kernel in") == 1
        assert str(kept.parent) in first.stderr
    second = run(tmp_path)
    assert '"numba": false' in second.stdout
    assert second.stderr == ""


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_or_does_not_exist(tmp_path: Path):
    """Then the object lives in the process alone. (A file in the folder's place stops root, too.)"""
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run(blocked)
    assert '"numba": true' in result.stdout
    assert "could not be kept" in result.stderr or "compiled" not in result.stderr


@pytest.mark.slow
def test_a_cache_filled_before_can_be_read_only(tmp_path: Path):
    run(tmp_path)
    (folder,) = {path.parent for path in tmp_path.rglob("*.o")}
    folder.chmod(0o555)
    try:
        assert '"numba": false' in run(tmp_path).stdout
    finally:
        folder.chmod(0o755)


def named(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    monkeypatch.setattr(objects, "cache_folder", lambda: folder)
    monkeypatch.setattr(objects, "_said", False)
    monkeypatch.setattr(objects, "compile_kernel", lambda function: function.code)


class Source:
    """Stands for a kernel to compile: counts how often that is asked for."""

    code = b"machine code"

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Callable[[Any], None]:
        self.made += 1
        return self  # type: ignore[return-value]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"?" + b[41:], lambda b: b + b"x"]
)
def test_a_torn_file_is_compiled_again(
    damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    named(monkeypatch, tmp_path)
    source = Source()
    assert objects._object("kernel", source) == objects._object("kernel", source) == Source.code
    assert source.made == 1
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert objects._object("kernel", source) == Source.code
    assert source.made == 2
    assert objects._object("kernel", source) == Source.code
    assert source.made == 2


def test_kernels_have_files_of_their_own_and_leave_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    named(monkeypatch, tmp_path)
    for name in ("one", "other", "one"):
        objects._object(name, Source())
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    named(monkeypatch, None)
    source = Source()
    for _ in range(2):
        assert objects._object("kernel", source) == Source.code
    assert source.made == 2


def fresh_folder() -> Path | None:
    return objects.cache_folder.__wrapped__()


def test_where_the_folder_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    inner = Path("normkit") / f"cpu-{objects.fingerprint()}"
    assert fresh_folder() == tmp_path / "a" / inner
    monkeypatch.delenv("NORMKIT_CACHE")
    assert fresh_folder() == tmp_path / "b" / inner
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert fresh_folder() == tmp_path / ".cache" / inner

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert fresh_folder() is None


def test_whatever_decides_the_code_changes_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for path in Path(objects.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(objects, "__file__", str(tmp_path / "objects.py"))
    digest = objects.fingerprint.__wrapped__
    seen = [digest()]
    assert digest() == seen[0]
    for path in sorted(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes() + b"#")
        seen.append(digest())
    (tmp_path / "new.py").write_text("")
    seen.append(digest())
    monkeypatch.setattr(objects, "version", lambda package: "0.0")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


def test_a_wait_of_over_a_second_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(objects, "_said", False)
    objects._say_once(0.9, tmp_path)
    assert capsys.readouterr() == ("", "")
    objects._say_once(1.5, tmp_path)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"normkit: compiled a CPU kernel in 1.5 s; it is kept in {tmp_path} for the next process\n"
    objects._say_once(2.5, None)
    assert capsys.readouterr() == ("", "")
