"""Removing the objects of other versions: every edit or upgrade names a new folder, and nobody else clears the old."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

DAYS = 30
FOLDER = re.compile(r"cpu-[0-9a-f]{20}(\.removed-\d+)?")
_DAY = 86400.0


def mark_used(folder: Path) -> None:
    """Let a folder's time of change say that it was used; at most once a day, and not where it cannot be written."""
    try:
        if time.time() - folder.stat().st_mtime > _DAY:
            os.utime(folder)
    except OSError:
        pass


def remove_unused(current: Path) -> None:
    """Remove the folders beside ``current`` that hold objects of other versions and were not used for 30 days.

    A folder is renamed before it is emptied, so that it goes whole: two processes cannot both take it, and one that was
    about to read from it compiles anew. What cannot be removed stays; links are left alone.
    """
    try:
        others = [path for path in current.parent.iterdir() if path != current and FOLDER.fullmatch(path.name)]
    except OSError:
        return
    for folder in others:
        try:
            old = time.time() - folder.stat().st_mtime > DAYS * _DAY
            if not old or folder.is_symlink() or not folder.is_dir():
                continue
            taken = folder.with_name(f"{folder.name.split('.')[0]}.removed-{os.getpid()}")
            folder.rename(taken)
        except OSError:  # another process took it, or it is not ours to take
            continue
        shutil.rmtree(taken, ignore_errors=True)
