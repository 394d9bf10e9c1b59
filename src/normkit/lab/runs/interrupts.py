"""Ctrl-C and SIGTERM as a question the run answers between two steps, so that nothing is ever cut in the middle."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Self


class Interrupts:
    """While open, the first SIGINT or SIGTERM sets ``asked`` and wakes whoever waits on ``wake``; a second one raises.

    Example:
        >>> with Interrupts() as interrupts:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     interrupts.asked
        True
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self.wake, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wake)
        os.close(self._write)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(BlockingIOError):
            os.write(self._write, b"!")
