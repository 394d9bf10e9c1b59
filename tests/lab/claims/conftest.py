"""What the tests of claims share: measure a study in this process, judge a claim with given roles."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import pytest

from normkit.lab.claim import Bench, Claim, Evidence, Measurement, Study
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Judgement, judge

ASCII_NUMBER = re.compile(r"\d[eE][-+]?\d|(?<![\w.])-\d")  # 1e-05 and -3, which are written 10⁻⁵ and −3
MANY_DIGITS = re.compile(r"(?<![\d.])0*[1-9]\d*\.\d{4,}|(?<![\d.])0\.0*[1-9]\d{3,}")

JudgeClaim = Callable[[Claim, Mapping[str, str], list[Measurement]], Judgement]


class MeasureStudy:
    """Run every arm and seed of a study, once for each study and settings."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Settings], list[Measurement]] = {}

    def __call__(self, study: Study, settings: Settings) -> list[Measurement]:
        key = (study.id, settings)
        if key not in self._made:
            cells = [(arm.name, seed) for arm in study.arms(settings) for seed in settings.seeds[: study.seeds]]
            self._made[key] = [self.fresh(study, settings, arm, seed) for arm, seed in cells]
        return self._made[key]

    @staticmethod
    def fresh(study: Study, settings: Settings, arm: str, seed: int) -> Measurement:
        """Measure one arm at one seed anew."""
        assert not study.corpus, "a study of text needs a corpus; this helper has none"
        (params,) = [a.params for a in study.arms(settings) if a.name == arm]
        return Measurement(study.id, arm, seed, study.measure(params, Bench(settings, Draws(study.id, arm, seed))))


@pytest.fixture(scope="session")
def measure_text() -> Callable[..., list[Measurement]]:
    """Run a study of text anew, all its arms or those named, with the settings' seeds."""

    def measure(study: Study, settings: Settings, arms: Collection[str] | None = None) -> list[Measurement]:
        corpus = load_corpus()
        cells = [(a, seed) for a in study.arms(settings) for seed in settings.seeds if arms is None or a.name in arms]
        return [
            Measurement(
                study.id, a.name, seed, study.measure(a.params, Bench(settings, Draws(study.id, a.name, seed), corpus))
            )
            for a, seed in cells
        ]

    return measure


@pytest.fixture(scope="session")
def measure_study() -> MeasureStudy:
    return MeasureStudy()


@pytest.fixture(scope="session")
def told() -> Callable[[Claim, Evidence], str]:
    """Return a claim's summary, having checked that it is one short line of numbers written for people."""

    def summary(claim: Claim, evidence: Evidence) -> str:
        text = claim.summary(evidence)
        assert len(text) <= 160, f"{claim.id}: {len(text)} characters: {text}"
        assert "\n" not in text
        assert any(c.isdigit() for c in text)
        assert not ASCII_NUMBER.search(text), text
        assert not MANY_DIGITS.search(text), text
        return text

    return summary


@pytest.fixture(scope="session")
def judge_claim() -> JudgeClaim:
    """Judge a claim on measurements with the given arms in its roles."""

    def judged(claim: Claim, plays: Mapping[str, str], measurements: list[Measurement]) -> Judgement:
        evidence = Evidence(measurements, plays, Settings())
        corrected = claim.corrected.criteria(evidence) if claim.corrected else None
        return judge(claim.literal.criteria(evidence), corrected)

    return judged


@pytest.fixture(scope="session")
def altered() -> Callable[[list[Measurement], str, Callable[[object], object]], list[Measurement]]:
    """Return measurements in which every value whose key begins so is changed: what a broken world would measure."""

    def alter(measurements, prefix, change):
        return [
            Measurement(
                m.study, m.arm, m.seed, {k: change(v) if k.startswith(prefix) else v for k, v in m.values.items()}
            )
            for m in measurements
        ]

    return alter
