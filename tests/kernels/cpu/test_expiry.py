"""Objects of other versions go once nobody used them for a month; nothing else in the folder ever does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from normkit.kernels.cpu import expiry, objects

DAY = 86400


def version(root: Path, letter: str, days: float, files: int = 2) -> Path:
    """Make a folder of objects that was last used so many days ago."""
    folder = root / f"cpu-{letter * 20}"
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"{number}.o").write_bytes(b"code")
    used(folder, days)
    return folder


def used(path: Path, days: float) -> None:
    when = time.time() - days * DAY
    os.utime(path, (when, when))


def named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(objects, "cache_folder", lambda: folder)
    monkeypatch.setattr(objects, "compile_kernel", lambda function: b"machine code")


def test_the_first_object_of_a_version_removes_what_was_long_unused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    old, recent = version(tmp_path, "a", 31), version(tmp_path, "b", 29)
    foreign = tmp_path / "cpu-of-mine"
    foreign.mkdir()
    (tmp_path / "note.txt").write_text("")
    for path in (foreign, tmp_path / "note.txt"):
        used(path, 400)
    named(monkeypatch, tmp_path / f"cpu-{'c' * 20}")
    objects._object("one", lambda: print)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["cpu-" + "b" * 20, "cpu-" + "c" * 20, "cpu-of-mine", "note.txt"]
    )
    assert not old.exists()
    assert len(list(recent.iterdir())) == 2
    late = version(tmp_path, "d", 31)
    objects._object("two", lambda: print)  # the folder is there already: nobody looks again
    assert late.exists()


def test_reading_an_object_counts_as_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    current = tmp_path / f"cpu-{'a' * 20}"
    named(monkeypatch, current)
    objects._object("one", lambda: print)
    used(current, 31)
    assert objects._object("one", lambda: print) == b"machine code"
    other = version(tmp_path, "b", 0)
    expiry.remove_unused(other)
    assert current.exists()
    used(current, 0.5)
    before = current.stat().st_mtime
    objects._object("one", lambda: print)
    assert current.stat().st_mtime == before  # once a day is enough


def test_links_and_what_lies_behind_them_stay(tmp_path: Path):
    precious = version(tmp_path / "elsewhere", "e", 99)
    root = tmp_path / "normkit"
    current = version(root, "a", 0)
    (root / f"cpu-{'b' * 20}").symlink_to(precious)
    inside = version(root, "c", 99)
    (inside / "link").symlink_to(precious)
    used(inside, 99)
    expiry.remove_unused(current)
    assert sorted(p.name for p in root.iterdir()) == ["cpu-" + "a" * 20, "cpu-" + "b" * 20]
    assert len(list(precious.iterdir())) == 2


def test_many_at_once_remove_each_folder_and_fail_at_none(tmp_path: Path):
    current = version(tmp_path, "0", 40)
    for letter in "abcdef":
        version(tmp_path, letter, 40, files=20)
    failed: list[BaseException] = []
    start = threading.Barrier(8)

    def work() -> None:
        try:
            start.wait()
            expiry.remove_unused(current)
        except BaseException as error:  # shown by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert failed == []
    assert [p.name for p in tmp_path.iterdir()] == [current.name]


def test_what_a_killed_process_left_half_removed_goes_too(tmp_path: Path):
    current = version(tmp_path, "0", 0)
    rest = version(tmp_path, "a", 40).rename(tmp_path / f"cpu-{'a' * 20}.removed-1")
    used(rest, 40)
    expiry.remove_unused(current)
    assert [p.name for p in tmp_path.iterdir()] == [current.name]


def test_what_may_not_be_written_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    current, old = version(tmp_path, "0", 0), version(tmp_path, "a", 40)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    expiry.remove_unused(current)
    expiry.mark_used(old)
    assert old.exists()
    expiry.remove_unused(tmp_path / "nowhere" / "cpu")  # nor does it mind that there is no folder
    expiry.mark_used(tmp_path / "nowhere")
