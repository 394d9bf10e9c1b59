"""C3: a domain's mean and deviation against its own samples, and verdicts without the shift."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Bench, Evidence
from normkit.lab.claims import c3_running_statistics as module
from normkit.lab.claims.c3_running_statistics import AWAY, CLAIMS, LONG, STUDY, C
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C3,) = CLAIMS


def _domain(tokens: str = "home", length: int = 32) -> module.Domain:
    return module._domain(Bench(SETTINGS, Draws("test", "arm", 0)), tokens, length)


@pytest.mark.parametrize(("tokens", "length"), [("home", 32), ("other", 32), ("home", LONG)])
def test_a_domains_moments_are_those_of_its_samples(tokens, length):
    domain = _domain(tokens, length)
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([domain.batch(generator) for _ in range(20)]).double()
    # 20 480 tokens and more: a mean is off by σ/√n = .007 σ, a deviation by less; six of those over 64 channels
    assert float(((x.mean((0, 1)) - domain.mean()) / domain.deviation()).abs().max()) < 0.042
    assert float((x.std((0, 1)) / domain.deviation() - 1).abs().max()) < 0.042


def test_noise_at_home_is_that_of_a_moving_average():
    """A moving average of white noise by hand: √(2/π) of the deviation of (average − one more draw)."""
    domain = _domain()
    batches = [domain.batch(torch.Generator().manual_seed(s)).mean((0, 1)) for s in range(400)]
    average, gaps = domain.mean(), []
    for i, mean in enumerate(batches):
        if i > 20:
            gaps.append(((average - mean) / domain.deviation()).abs().mean())
        average = 0.9 * average + 0.1 * mean
    assert float(torch.stack(gaps).mean()) == pytest.approx(module.at_home(domain), rel=0.05)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(C3, C3.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(C3, C3.control.plays, measured).verdict)
    e = Evidence(measured, C3.plays, SETTINGS)
    assert told(C3, e)
    (chart,) = C3.figures(e)
    assert len(chart.panels) == 3
    assert C == 64


@pytest.mark.parametrize("place", AWAY)
def test_without_the_shift_it_fails(place, measure_study, judge_claim):
    stayed = {**C3.plays, f"norm/{place}": "batch/home"}
    assert judge_claim(C3, stayed, measure_study(STUDY, SETTINGS)).verdict is Verdict.FAILS


@pytest.mark.parametrize("key", ["mean", "deviation"])
def test_away_from_home_the_distance_is_that_of_the_distributions(key, measure_study):
    for m in measure_study(STUDY, SETTINGS):
        if m.arm in ("batch/domain", "batch/length"):
            assert m.values[key] == pytest.approx(m.values[f"law/{key}"], abs=2 * m.values["noise"])
