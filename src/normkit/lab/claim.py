"""What a claim is: a sentence, a measurement, rules fixed before the first run, a control, a figure.

A `Study` measures; a `Claim` judges what a study measured. Several claims may judge one study, so that one
training run can settle three sentences. Studies name their arms; claims name *roles* and say which arm plays
each. A negative control is the same judgement with other arms in the roles: arms swapped, or an arm whose
mechanism was removed. Nothing else changes, so a control cannot pass by being another test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normkit.lab.corpus import Corpus
from normkit.lab.draws import Draws
from normkit.lab.figures import Figure
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

Params = Mapping[str, Any]
Values = dict[str, Any]  # what a measurement returns: numbers, lists of numbers, short strings; JSON-ready


@dataclass(frozen=True)
class Bench:
    """What a measurement may use: its settings, its random streams, the corpus (None unless the study asks).

    ``folder`` is the run folder, for what shall be read while a measurement goes on; no result may depend on it.
    """

    settings: Settings
    draws: Draws
    corpus: Corpus | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Arm:
    """One condition of a study. ``name`` is a path such as ``"post/warmup-0/lr-0.01"``; roles name its prefix."""

    name: str
    params: Params = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Study:
    """One measuring procedure, run once per arm and seed; each run becomes one line of measurements.jsonl.

    Args:
        id: stable name, used in seeds and in the run folder.
        arms: the conditions under given settings, control arms included.
        measure: runs one arm; pure in (params, bench): no globals, no clock unless ``timing``.
        seconds: measured cost of one run of this arm on one core, for plan and ETA.
        seeds: how many of the settings' seeds it uses; 1 for exact statements, 5 for headlines.
        timing: measures time itself, so it runs alone and its numbers are not reproducible bit for bit.
        corpus: needs text.
        full_only: what it takes minutes to tell, which a quick run leaves to a full one.
    """

    id: str
    arms: Callable[[Settings], Sequence[Arm]]
    measure: Callable[[Params, Bench], Values]
    seconds: Callable[[Params], float]
    seeds: int = 3
    timing: bool = False
    corpus: bool = False
    full_only: bool = False

    def skipped(self, settings: Settings) -> bool:
        """Say whether a run of these settings leaves this study to a full one."""
        return self.full_only and settings.mode == "quick"


@dataclass(frozen=True)
class Rule:
    """A decision rule, written from the sentence or from its theory, never from a pilot run.

    Args:
        text: the rule in words, numbers included.
        origin: where it comes from.
        criteria: turns evidence into criteria; all must pass.
    """

    text: str
    origin: Literal["sentence", "theory"]
    criteria: Callable[[Evidence], Sequence[Criterion]]


@dataclass(frozen=True)
class Control:
    """The negative control: who plays each role when the mechanism is gone, and why that must flip the verdict."""

    text: str
    plays: Mapping[str, str]


@dataclass(frozen=True)
class Explanation:
    """Why it comes out so. ``tested`` when this lab's own arms isolate the cause, else ``conjecture``."""

    text: str
    status: Literal["tested", "conjecture"]


@dataclass(frozen=True)
class Claim:
    """A sentence of the article and all it takes to judge it.

    Args:
        id: name in the catalogue, e.g. ``"A2"``.
        title: a few words.
        sentence: what the article says, in English and in our words.
        sentences: the numbers of the article's sentences it covers.
        source: article section, paper.
        measured: what is measured, one paragraph.
        study: who measures.
        plays: role → arm (or prefix of arm names).
        literal: the rule for the sentence as it stands.
        control: the negative control.
        summary: the measured result in one line with numbers, from the evidence.
        figures: pictures, from the evidence.
        explanation: why it comes out so.
        corrected: the rule for the corrected sentence, where the literal one cannot hold.
        correction: the corrected sentence; required with ``corrected``.
        planted: where the claim may well fail: a control with the effect planted in it, on which the same judgement
            must hold. It takes the negative control's place when the verdict is *fails*, which a control that must
            fail says nothing about.
    """

    id: str
    title: str
    sentence: str
    sentences: tuple[int, ...]
    source: str
    measured: str
    study: Study
    plays: Mapping[str, str]
    literal: Rule
    control: Control
    summary: Callable[[Evidence], str]
    figures: Callable[[Evidence], Sequence[Figure]]
    explanation: Explanation
    corrected: Rule | None = None
    correction: str = ""
    planted: Control | None = None

    def __post_init__(self) -> None:
        assert (self.corrected is None) == (self.correction == ""), f"{self.id}: rule and words go together"
        assert set(self.control.plays) == set(self.plays), f"{self.id}: the control fills the same roles"
        assert dict(self.control.plays) != dict(self.plays), f"{self.id}: a control that changes nothing"
        assert self.planted is None or set(self.plays) <= set(self.planted.plays), f"{self.id}: roles left empty"


@dataclass(frozen=True)
class Measurement:
    """One run of one arm at one seed, as it stands in the run folder."""

    study: str
    arm: str
    seed: int
    values: Values
    seconds: float = 0.0


class Evidence:
    """A study's measurements seen through roles.

    A path is a role, optionally followed by the rest of the arm's name: ``"post/warmup-0"``. Values come in the
    order of the seeds, so lists of two roles are paired.
    """

    def __init__(self, measurements: Iterable[Measurement], plays: Mapping[str, str], settings: Settings) -> None:
        self.settings = settings
        self._plays = dict(plays)
        self._by_arm: dict[str, dict[int, Values]] = {}
        for m in measurements:
            self._by_arm.setdefault(m.arm, {})[m.seed] = m.values
        self.seeds: tuple[int, ...] = tuple(sorted({s for runs in self._by_arm.values() for s in runs}))

    def arm(self, path: str) -> str:
        """Return the name of the arm behind a path. A whole path among the roles stands for itself alone."""
        if path in self._plays:
            return self._plays[path]
        role, _, rest = path.partition("/")
        if role not in self._plays:
            raise KeyError(f"no role {role!r}; roles are {sorted(self._plays)}")
        return self._plays[role] + (f"/{rest}" if rest else "")

    def values(self, path: str, key: str) -> list[Any]:
        """Return ``key`` of every seed's measurement of the arm behind ``path``."""
        runs = self._by_arm[self.arm(path)]
        return [runs[seed][key] for seed in self.seeds if seed in runs]

    def numbers(self, path: str, key: str) -> list[float]:
        """Return `values` as floats; None and missing become NaN, which no criterion passes."""
        return [float("nan") if v is None else float(v) for v in self.values(path, key)]

    def paired(self, a: str, b: str, key: str) -> list[float]:
        """Return the differences a − b of ``key``, seed by seed."""
        return [p - q for p, q in zip(self.numbers(a, key), self.numbers(b, key), strict=True)]

    def lowest(self, paths: Sequence[str], key: str) -> str:
        """Return the path whose ``key`` is lowest in the mean over seeds; one with a NaN never wins."""

        def mean(path: str) -> float:
            found = self.numbers(path, key)
            return math.inf if any(map(math.isnan, found)) else math.fsum(found) / len(found)

        return min(paths, key=mean)

    def first(self, path: str, key: str) -> Any:
        """Return ``key`` at the first seed: for exact statements and for pictures."""
        return self.values(path, key)[0]
