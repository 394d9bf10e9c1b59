"""measurements.jsonl: one line per measurement, appended whole, synced, and readable after any crash.

A line is written by one ``write`` and followed by ``fsync``, so a process killed at any moment leaves whole
lines and at most one beginning of a line. Reading drops that beginning and says so; opening for append cuts it
off. JSON has no NaN: a non-finite number stands as null, which `normkit.lab.claim.Evidence` reads as NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from normkit.lab.claim import Measurement, Values


class RunError(Exception):
    """A run folder cannot be read, written or used; the message says what to do."""


@dataclass(frozen=True)
class Line:
    """A measurement and the key under which it may be found again."""

    key: str
    measurement: Measurement


@dataclass(frozen=True)
class Parsed:
    """What a file of lines holds: the lines, what was wrong with it, and how many of its bytes are whole lines."""

    lines: tuple[Line, ...]
    notices: tuple[str, ...]
    whole: int


def jsonable(value: Any, where: str = "values") -> Any:
    """Return ``value`` as JSON can hold it, non-finite floats as None.

    Raises:
        TypeError: for anything but numbers, strings, booleans, None, lists, tuples and dicts with string keys.
    """
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return [jsonable(item, f"{where}[{i}]") for i, item in enumerate(items)]
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        for key in entries:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; a measurement's keys are strings")
        return {key: jsonable(item, f"{where}.{key}") for key, item in entries.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}; a measurement returns numbers, strings, lists and dicts of them. "
        "Call .item() or .tolist() on tensors"
    )


def dump(line: Line) -> bytes:
    """Return the line as it stands in the file, newline included."""
    m = line.measurement
    record = {
        "study": m.study,
        "arm": m.arm,
        "seed": m.seed,
        "key": line.key,
        "seconds": round(m.seconds, 6),
        "values": jsonable(m.values),
    }
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def parse(data: bytes) -> Parsed:
    """Read every whole line; say which were not measurements and whether the last was cut short."""
    whole = data.rfind(b"\n") + 1
    lines: list[Line] = []
    notices: list[str] = []
    for number, raw in enumerate(data[:whole].splitlines(), start=1):
        try:
            lines.append(_line(json.loads(raw)))
        except (ValueError, KeyError, TypeError):
            notices.append(f"measurements.jsonl, line {number}: not a measurement, ignored")
    if whole < len(data):
        notices.append(
            f"measurements.jsonl: the last line was cut short ({len(data) - whole} bytes) and is dropped; "
            "its measurement is made again when the run is continued"
        )
    return Parsed(tuple(lines), tuple(notices), whole)


def _line(record: dict[str, Any]) -> Line:
    values = record["values"]
    if not isinstance(values, dict):
        raise TypeError("values is no object")
    return Line(
        str(record["key"]),
        Measurement(
            str(record["study"]),
            str(record["arm"]),
            int(record["seed"]),
            cast("Values", values),
            float(record["seconds"]),
        ),
    )


class Appender:
    """The file open for appending; what stood in it is in ``parsed``.

    Only the holder of the run's lock may have one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.parsed = parse(path.read_bytes())
        self._end = self.parsed.whole
        os.ftruncate(self._fd, self._end)

    def append(self, line: Line) -> None:
        """Write one line and wait until the disk has it.

        Raises:
            RunError: when the disk is full or broken; the file is cut back to its last whole line.
        """
        data = dump(line)
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written")
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):  # a disk that takes no bytes may take no truncation: reading drops the rest
                os.ftruncate(self._fd, self._end)
            raise RunError(
                f"{self.path}: cannot write ({error}). Every whole line is kept: make room, then run again"
            ) from error
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
