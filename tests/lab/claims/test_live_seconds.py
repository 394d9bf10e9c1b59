"""The claims that take seconds, run as the lab runs them: their verdicts, and controls that must turn them over."""

from __future__ import annotations

import json
import math

import pytest

import normkit as nk
from normkit.lab.claim import Claim, Evidence
from normkit.lab.claims import find
from normkit.lab.figures import Chart
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
OTHER_SEEDS = Settings(seeds=(100, 101, 102))
HOLDS, CORRECTED = Verdict.HOLDS, Verdict.CORRECTED
EXPECTED = {
    "A1": HOLDS,
    "A2": CORRECTED,
    "C1": HOLDS,
    "C1b": CORRECTED,
    "C4": HOLDS,
    "C6": HOLDS,
    "D1": HOLDS,
    "D1b": HOLDS,
    "D2": CORRECTED,
    "D2b": HOLDS,
    "D3": CORRECTED,
    "D3b": CORRECTED,
    "L3": CORRECTED,
}
QUICK = [name for name in EXPECTED if name not in ("A1", "A2", "L3")]


def _claim(name: str) -> Claim:
    (claim,) = find([name])
    return claim


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_control(name, measure_study, judge_claim):
    claim = _claim(name)
    measurements = measure_study(claim.study, SETTINGS)
    verdict = judge_claim(claim, claim.plays, measurements).verdict
    control = judge_claim(claim, claim.control.plays, measurements).verdict
    assert verdict is EXPECTED[name]
    assert flips(verdict, control)


@pytest.mark.parametrize("name", QUICK)
def test_other_seeds_say_the_same(name, measure_study, judge_claim):
    claim = _claim(name)
    verdict = judge_claim(claim, claim.plays, measure_study(claim.study, OTHER_SEEDS)).verdict
    assert verdict is EXPECTED[name]


CHEAP = ("C5", "C8", "C11", "D4", "D5", "H4", "J2", "K2", "M1", "P2")  # with kernels in every one of them


@pytest.mark.parametrize("name", [*QUICK, *CHEAP])
def test_the_reference_says_the_same(name, measure_study, judge_claim):
    """A verdict is about norms, not about our kernels: without them it is the same, and so is the control's."""
    claim = _claim(name)
    with nk.use("reference"):
        measurements = [
            measure_study.fresh(claim.study, SETTINGS, arm.name, seed)
            for arm in claim.study.arms(SETTINGS)
            for seed in SETTINGS.seeds[: claim.study.seeds]
        ]
    fused = measure_study(claim.study, SETTINGS)
    for plays in (claim.plays, claim.control.plays):
        assert judge_claim(claim, plays, measurements).verdict is judge_claim(claim, plays, fused).verdict


@pytest.mark.slow
def test_benchmark_on_this_machine(measure_study, judge_claim):
    """Times on a busy machine may leave the benchmark open; what is decided must flip."""
    claim = _claim("R1")
    measurements = measure_study(claim.study, SETTINGS)
    assert all(m.values["first_us"] > 0 and m.values["second_us"] > 0 for m in measurements)
    verdict = judge_claim(claim, claim.plays, measurements).verdict
    control = judge_claim(claim, claim.control.plays, measurements).verdict
    assert Verdict.UNDECIDED in (verdict, control) or flips(verdict, control)


@pytest.mark.parametrize("name", [*EXPECTED, pytest.param("R1", marks=pytest.mark.slow)])
def test_what_the_report_needs(name, measure_study, told):
    claim = _claim(name)
    measurements = measure_study(claim.study, SETTINGS)
    json.dumps([m.values for m in measurements], allow_nan=False)
    evidence = Evidence(measurements, claim.plays, SETTINGS)
    assert told(claim, evidence)
    for figure in claim.figures(evidence):
        assert isinstance(figure, Chart)
        for panel in figure.panels:
            for series in panel.series:
                assert len(series.x) == len(series.y), series.label
                assert all(map(math.isfinite, series.y)), series.label
                assert panel.y_scale == "linear" or min(series.y) > 0, series.label
                assert panel.x_scale == "linear" or min(series.x) > 0, series.label


@pytest.mark.parametrize("name", QUICK)
def test_measurements_are_reproducible(name, measure_study):
    claim = _claim(name)
    arm = claim.study.arms(SETTINGS)[0]
    kept = next(m for m in measure_study(claim.study, SETTINGS) if m.arm == arm.name and m.seed == 0)
    again = measure_study.fresh(claim.study, SETTINGS, arm.name, 0)
    assert kept.values == again.values
