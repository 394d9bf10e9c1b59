"""Readings as they come in: tensors until the next forward begins, then numbers, then lines of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from normkit.watching.reading import Reading
from normkit.watching.taps import Pending


class Log:
    """All readings of a watch.

    Args:
        path: a JSON-lines file to append to; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._steps: list[tuple[int, bool, list[Pending]]] = []
        self._done: list[Reading] = []
        self._file = None if path is None else path.open("a", encoding="utf-8")

    @property
    def readings(self) -> list[Reading]:
        """Every reading so far."""
        return [*self._done, *(r for step in self._steps for r in _resolved(*step))]

    def begin(self, step: int, training: bool, pending: list[Pending]) -> None:
        """Settle what came before and keep the list that a forward's readings go into."""
        self.settle()
        self._steps.append((step, training, pending))

    def settle(self) -> None:
        """Turn what is complete into numbers and append it to the file."""
        fresh = [r for step in self._steps for r in _resolved(*step)]
        self._steps.clear()
        self._done += fresh
        if self._file is not None:
            self._file.writelines(map(line, fresh))
            self._file.flush()

    def close(self) -> None:
        """Settle the rest and close the file."""
        self.settle()
        if self._file is not None:
            self._file.close()
            self._file = None


def _resolved(step: int, training: bool, pending: Sequence[Pending]) -> Iterator[Reading]:
    """Fetch all numbers of a forward from the device at once."""
    tensors = [t for p in pending for t in (*p.numbers.values(), *p.squares)]
    if not tensors:
        return
    numbers = iter(torch.stack([t.detach().to(tensors[0].device, torch.float64) for t in tensors]).tolist())
    for order, p in enumerate(pending):
        values = {name: next(numbers) for name in p.numbers}
        squares = [next(numbers) for _ in p.squares]
        known = [values[k] for k in ("x_rms", "x_max", "y_rms", "x_mean") if k in values]
        yield Reading(
            step,
            p.name,
            training,
            p.position,
            order,
            gradient=math.sqrt(sum(squares)) if squares else None,
            finite=all(map(math.isfinite, known)) and not math.isnan(values.get("largest_logit", 0.0)),
            dtype=p.dtype,
            **values,
        )


def line(reading: Reading) -> str:
    """Return a reading as a line of JSON; numbers that are not finite become null."""
    values = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in vars(reading).items()}
    return json.dumps(values, allow_nan=False) + "\n"
