"""The workers as the run sees them: started, given one request each, watched, replaced when they die."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from normkit.environment import usable_cores
from normkit.lab.runs.plan import Cell
from normkit.lab.runs.worker import Reply, Request
from normkit.lab.settings import Settings

# The worker finds normkit and the studies where this process found them, installed or not.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from normkit.lab.runs.worker import main; main()"


class Worker:
    """One worker process. ``task`` is what it works on, None when it is idle."""

    def __init__(self, settings: Settings, log: IO[bytes], timing: bool = False) -> None:
        self.timing = timing
        self.task: Cell | None = None
        threads = usable_cores() if timing else 1
        with _signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=os.environ | _environment(threads),
            )
        self._unread = b""
        self._send({"settings": settings.to_json(), "timing": timing, "threads": threads})

    def give(self, task: Cell | None, request: Request) -> None:
        """Start working on a request; ``task`` is the cell it measures, if it measures."""
        assert self.task is None, "a worker has one task at a time"
        self.task = task
        self._send(request)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> Reply | None:
        """Return the reply that is ready, None when it is not whole yet.

        Raises:
            EOFError: the worker died; the message says of what.
        """
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError(f"the worker process {_death(self._process.wait())}")
        self._unread += data
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return json.loads(line)

    def stop(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def _send(self, message: Request) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: reading says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")


class Pool:
    """The workers of one run, and one place to wait for all of them."""

    def __init__(self, settings: Settings, log: IO[bytes], wake: int | None = None) -> None:
        self.workers: list[Worker] = []
        self._settings, self._log = settings, log
        self._selector = selectors.DefaultSelector()
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ)

    def start(self, timing: bool = False) -> Worker:
        """Start one more worker."""
        worker = Worker(self._settings, self._log, timing)
        self.workers.append(worker)
        self._selector.register(worker.fileno(), selectors.EVENT_READ, worker)
        return worker

    def wait(self, timeout: float) -> Iterator[tuple[Worker, Cell | None, Reply]]:
        """Wait for replies; yield each with its worker and the task it answers. A death is one with an ``error``."""
        for key, _ in self._selector.select(timeout):
            worker: Worker | None = key.data
            if worker is None:
                continue
            try:
                reply = worker.read()
            except EOFError as error:
                reply = {"error": str(error), "kind": "EOFError"}
                self._remove(worker)
            if reply is not None:
                task, worker.task = worker.task, None
                yield worker, task, reply

    def stop(self) -> None:
        """End all workers now."""
        for worker in list(self.workers):
            self._remove(worker)
        self._selector.close()

    def _remove(self, worker: Worker) -> None:
        self._selector.unregister(worker.fileno())
        self.workers.remove(worker)
        worker.stop()


@contextmanager
def _signals_held() -> Generator[None]:
    """Start children with SIGINT and SIGTERM blocked: Ctrl-C reaches the whole group, and the parent decides."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",  # sets of strings in one order
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS refuses to be deterministic
    }


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; most often the system ran out of memory)"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}; workers.log has its last words"
