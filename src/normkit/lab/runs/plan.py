"""What a run will do before it does it: which measurements, in which order, how long, and what is there already."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normkit.environment import cpu_model, usable_cores
from normkit.lab.claim import Arm, Claim, Params, Study
from normkit.lab.runs.code import digest
from normkit.lab.runs.judged import CellId, seeds_of
from normkit.lab.settings import Settings
from normkit.lab.untestable import Entry, Untestable


@dataclass(frozen=True)
class Cell:
    """One measurement to make: an arm of a study at a seed, and the key it is stored under."""

    study: Study
    module: str
    arm: Arm
    seed: int
    key: str
    seconds: float

    @property
    def id(self) -> CellId:
        """The cell's name in a run folder."""
        return (self.study.id, self.arm.name, self.seed)


@dataclass(frozen=True)
class Step:
    """A study of the plan: its cells, the claims that wait for them, and which cells are measured already."""

    study: Study
    claims: tuple[Claim, ...]
    cells: tuple[Cell, ...]
    cached: frozenset[CellId]

    @property
    def missing(self) -> tuple[Cell, ...]:
        """The cells still to be measured, in order."""
        return tuple(cell for cell in self.cells if cell.id not in self.cached)

    @property
    def seconds(self) -> float:
        """Planned seconds of what is missing, on one core."""
        return sum(cell.seconds for cell in self.missing)


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they run, sentences whose verdict needs none, claims left to a full run."""

    steps: tuple[Step, ...]
    untestable: tuple[Untestable, ...] = ()
    full_only: tuple[Claim, ...] = ()

    @property
    def claims(self) -> tuple[Entry, ...]:
        """All claims of the plan, in the order in which their verdicts are due."""
        return (*self.untestable, *self.full_only, *(claim for step in self.steps for claim in step.claims))

    @property
    def cells(self) -> int:
        """Number of measurements, the cached ones included."""
        return sum(len(step.cells) for step in self.steps)

    @property
    def missing(self) -> tuple[Cell, ...]:
        """The cells still to be measured, in order."""
        return tuple(cell for step in self.steps for cell in step.missing)

    def seconds(self, jobs: int) -> float:
        """Planned seconds with ``jobs`` workers; studies that measure time have the machine to themselves."""
        shared = sum(step.seconds for step in self.steps if not step.study.timing)
        alone = sum(step.seconds for step in self.steps if step.study.timing)
        longest = max((cell.seconds for cell in self.missing if not cell.study.timing), default=0.0)
        return max(shared / jobs, longest) + alone


def make_plan(
    claims: Sequence[Entry],
    modules: Sequence[str],
    settings: Settings,
    stored: Collection[tuple[CellId, str]] = (),
) -> Plan:
    """Plan the measurements of ``claims``.

    Cheap studies come first, whatever is cached, so that a continued run keeps its order; studies that measure
    time come last, when all workers are idle. Within a study long measurements come first, so that the last
    worker to finish does not keep the others waiting. In a quick run a study that is ``full_only`` has no step.

    Args:
        claims: what to judge; claims that share a study share its measurements.
        modules: the module in which each claim was found, where a worker finds its study.
        settings: what was asked.
        stored: the cells in the run folder with their keys.
    """
    found: dict[str, list[tuple[Claim, str]]] = {}
    full_only: list[Claim] = []
    for claim, module in zip(claims, modules, strict=True):
        if claim.study is None:
            continue
        if claim.study.skipped(settings):
            full_only.append(claim)
        else:
            found.setdefault(claim.study.id, []).append((claim, module))
    steps: list[Step] = []
    have = frozenset(stored)
    for entries in found.values():
        study, module = entries[0][0].study, entries[0][1]
        cells = _cells(study, module, settings)
        cached = frozenset(cell.id for cell in cells if (cell.id, cell.key) in have)
        steps.append(Step(study, tuple(claim for claim, _ in entries), cells, cached))
    steps.sort(key=lambda step: (step.study.timing, sum(c.seconds for c in step.cells)))
    return Plan(tuple(steps), tuple(claim for claim in claims if claim.study is None), tuple(full_only))


def _cells(study: Study, module: str, settings: Settings) -> tuple[Cell, ...]:
    stamp = _stamp(study, module, settings)
    cells = [
        Cell(study, module, arm, seed, _key(stamp, arm, seed), float(study.seconds(arm.params)))
        for arm in study.arms(settings)
        for seed in seeds_of(study, settings)
    ]
    names = {cell.id for cell in cells}
    assert len(names) == len(cells), f"study {study.id}: two arms of one name"
    return tuple(sorted(cells, key=lambda cell: -cell.seconds))


def _stamp(study: Study, module: str, settings: Settings) -> dict[str, Any]:
    """Return what all measurements of a study depend on, arm and seed apart."""
    modules = {module, _module_of(study.measure), _module_of(study.arms)}
    return {
        "study": study.id,
        "code": digest(sorted(modules)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "mode": settings.mode,
        "device": settings.device,
        "corpus": settings.corpus_sha256 if study.corpus else None,
        # A time belongs to the machine that took it; everything else is only computed there.
        "machine": [cpu_model(), usable_cores()] if study.timing else None,
    }


def _key(stamp: dict[str, Any], arm: Arm, seed: int) -> str:
    parts = stamp | {"arm": arm.name, "params": _plain(arm.params), "seed": seed}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_named).encode()).hexdigest()


def _plain(params: Params) -> dict[str, Any]:
    return dict(params)


def _named(value: Any) -> str:
    """Name a parameter that JSON does not know, without its address in memory."""
    if callable(value):
        return f"{_module_of(value)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    text = repr(value)
    assert " at 0x" not in text, f"the parameter {text} has no stable name; give its type a __repr__"
    return text


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", type(function).__module__))
