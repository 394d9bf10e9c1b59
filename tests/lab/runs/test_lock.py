import os
from pathlib import Path

import pytest

from normkit.lab.runs.lines import RunError
from normkit.lab.runs.lock import LOCK, locked


def test_the_second_is_refused_at_once_and_told_the_pid_of_the_first(tmp_path: Path):
    with locked(tmp_path):
        with pytest.raises(RunError, match=f"pid {os.getpid()}\\b"), locked(tmp_path):
            pytest.fail("two holders")
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_the_lock_is_free_after_its_holder_however_that_ended(tmp_path: Path):
    (tmp_path / LOCK).write_text("99999999999999999999\n")  # longer than any pid: none of it may remain
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(RunError, match=r"run\.lock: cannot be opened .* Choose another --out"), locked(tmp_path):
        pass
