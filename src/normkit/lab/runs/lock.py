"""One writer per run folder. The lock dies with its holder, so a killed run leaves nothing to clean up."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from normkit.lab.runs.lines import RunError

LOCK = "run.lock"


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the folder's lock; the file names the holder's process id.

    The file stays when the lock is released: removing it would let two processes lock two files of one name.

    Raises:
        RunError: at once, when another process holds it, or when the folder takes no lock.
    """
    path = folder / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"{path}: cannot be opened for writing ({error.strerror}). Choose another --out") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise RunError(
                f"{folder}: in use by the process with pid {holder}. Wait for it, stop it, or choose another --out"
            ) from None
        except OSError as error:
            raise RunError(
                f"{path}: this file system gives no lock ({error.strerror}). Choose an --out on a local disk"
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}). Make room or choose another --out"
            ) from error
        yield
    finally:
        os.close(fd)
