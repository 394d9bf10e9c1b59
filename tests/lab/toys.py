"""Toy claims in a module of their own file: workers import it as they import the lab's claims."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from normkit.lab.runs.judged import Judged
from normkit.lab.runs.pace import Progress
from normkit.lab.runs.plan import Plan

SOURCE = '''
"""Toy claims."""

import os
import time

import torch

from normkit.lab.claim import Arm, Claim, Control, Explanation, Rule, Study
from normkit.lab.verdict import Criterion

OFFSET = 1.0


def arms(settings):
    return [Arm("low", {"x": 0.0}), Arm("high", {"x": OFFSET})]


def pause():
    time.sleep(float(os.environ.get("TOY_SECONDS", "0")))


def measure(params, bench):
    pause()
    print("noise on stdout")
    data = bench.draws.randn(64)
    for _ in range(20):  # long enough a sum for its order to show in the last bits
        data = torch.nn.functional.softmax(torch.randn(64, 64) @ data, 0)
    return {
        "value": float(data.std()) + params["x"],
        "own": bench.draws.randn(3, own=True).tolist(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def diverge(params, bench):
    return {"value": params["x"] / 0.5 if params["x"] else float("nan"), "loss": [1.0, float("inf")]}


def broken(params, bench):
    raise RuntimeError("the toy is broken")


def clock(params, bench):
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {"value": params["x"], "threads": torch.get_num_threads(), "deterministic": deterministic}


def rule(evidence):
    values = evidence.paired("b", "a", "value")
    return [Criterion("b - a", values, "above", 0.0, 0.25, "a quarter of the step")]


def claim(name, study, plays=("low", "high")):
    a, b = plays
    return Claim(
        name, f"toy {name}", "High is above low.", (1,), "nowhere", "the difference", study,
        {"a": a, "b": b}, Rule("b is above a", "theory", rule), Control("swapped", {"a": b, "b": a}),
        lambda evidence: f"difference {evidence.paired('b', 'a', 'value')[0]:.3f}", lambda evidence: [],
        Explanation("it was added", "tested"),
    )


STEADY = Study("steady", arms, measure, lambda params: 0.01, seeds=3)
DIVERGED = Study("diverged", arms, diverge, lambda params: 0.02, seeds=1)
BROKEN = Study("broken", arms, broken, lambda params: 0.03, seeds=2)
CLOCK = Study("clock", arms, clock, lambda params: 0.001, seeds=1, timing=True)

CLAIMS = (
    claim("T1", STEADY),
    claim("T2", STEADY, ("high", "low")),
    claim("DIV", DIVERGED),
    claim("BAD", BROKEN),
    claim("CLK", CLOCK),
)
'''

# The same, with a sentence among them that nobody can test.
MIXED = (
    SOURCE
    + """
from normkit.lab.untestable import Untestable

CLAIMS = (
    *CLAIMS[:1],
    Untestable("OPEN", "toy OPEN", "Toys are dear.", (7,), "nowhere", "Dear to whom is not said.", ("A toy, 2020.",)),
    *CLAIMS[1:],
)
"""
)

# And one with a study that a quick run leaves to a full one.
LONG = (
    MIXED
    + """
LONG = Study("long", arms, measure, lambda params: 60.0, seeds=1, full_only=True)
CLAIMS = (claim("L1", LONG), *CLAIMS[:2], claim("L2", LONG, ("high", "low")))
"""
)

_numbers = itertools.count()


def toy(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str = SOURCE) -> ModuleType:
    """Write the toy claims under a fresh name and import them."""
    name = f"toy_claims_{next(_numbers)}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


class Recorder:
    """A view that remembers."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.notices: list[str] = []
        self.verdicts: list[str] = []
        self.ticks: list[Progress] = []

    def planned(self, plan: Plan, out: Path, jobs: int) -> None:
        self.plan = plan

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def judged(self, judged: Judged) -> None:
        self.verdicts.append(judged.claim.id)

    def tick(self, progress: Progress) -> None:
        self.ticks.append(progress)
