"""R1: what each ratio of times would be judged as, without a clock; then the clock itself."""

from __future__ import annotations

import time

import pytest
import torch

from normkit.lab.claim import Bench, Measurement
from normkit.lab.claims.r1_article_benchmark import CLAIMS, STUDY, _seconds
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings()
(CLAIM,) = CLAIMS
NOISE = (0.99, 1.0, 1.01, 1.0, 0.995)


def _world(rms_over_layer: float) -> list[Measurement]:
    """Return measurements of a machine on which nn.RMSNorm takes this multiple of nn.LayerNorm's time."""
    return [
        Measurement(
            STUDY.id,
            arm.name,
            seed,
            {
                "ratio": noise * (rms_over_layer if arm.params["pair"] == "layer-rms" else 1 / rms_over_layer),
                "first_us": 10.0,
                "second_us": 10.0,
            },
        )
        for arm in STUDY.arms(SETTINGS)
        for seed, noise in zip(SETTINGS.seeds, NOISE, strict=True)
    ]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.91, Verdict.HOLDS),
        (0.5, Verdict.FAILS),
        (1.05, Verdict.FAILS),
        (2.0, Verdict.CORRECTED),
        (0.98, Verdict.UNDECIDED),
    ],
)
def test_verdict_of_a_ratio(ratio, expected, judge_claim):
    assert judge_claim(CLAIM, CLAIM.plays, _world(ratio)).verdict is expected


@pytest.mark.parametrize("ratio", [0.93, 2.0])
def test_control_flips_fast_or_slow(ratio, judge_claim):
    world = _world(ratio)
    verdict = judge_claim(CLAIM, CLAIM.plays, world).verdict
    assert flips(verdict, judge_claim(CLAIM, CLAIM.control.plays, world).verdict)


def test_clock():
    assert 0.002 < _seconds(lambda: time.sleep(0.002), 3, "cpu") < 0.2


def test_threads_are_given_back_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            STUDY.measure({"pair": "layer-rms", "shape": 0}, Bench(SETTINGS, Draws(STUDY.id, "x", 0)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
