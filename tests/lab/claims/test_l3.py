"""L3: the theory's two constants, and verdicts that move with them."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.lab.claims.l3_cast_order import CLAIMS, HEADLINE, MISROUNDED, ONE_ROUNDING, STUDY
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(CLAIM,) = CLAIMS


def test_constants_against_rounding_itself():
    """Round log-uniform numbers once and twice, with PyTorch's own conversion."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(400_000, dtype=torch.float64, generator=generator).exp2() for _ in range(2))
    b = b.bfloat16().double()
    once, twice = (a * b).bfloat16(), (a.bfloat16().double() * b).bfloat16()

    def rms(y: torch.Tensor) -> float:
        return float(((y.double() - a * b) / (a * b)).square().mean().sqrt())

    assert rms(once) == pytest.approx(ONE_ROUNDING, rel=0.01)
    assert rms(twice) / rms(once) == pytest.approx(math.sqrt(2), abs=0.02)
    assert float((once != twice).double().mean()) == pytest.approx(MISROUNDED, abs=0.01)


def test_equal_orders_would_hold(measure_study, judge_claim, altered):
    same = altered(measure_study(STUDY, SETTINGS), f"error/{HEADLINE}", lambda _: ONE_ROUNDING)
    assert judge_claim(CLAIM, CLAIM.plays, same).verdict is Verdict.HOLDS


@pytest.mark.parametrize("key", [f"misrounded/{HEADLINE}", f"error/{HEADLINE}"])
def test_other_numbers_fail(key, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda v: 1.2 * v)
    assert judge_claim(CLAIM, CLAIM.plays, wrong).given is Verdict.FAILS


def test_with_weights_of_one_nothing_is_rounded_twice(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    assert by_arm["llama"]["error/0.0"] == by_arm["olmo2"]["error/0.0"]
    assert by_arm["olmo2"][f"misrounded/{HEADLINE}"] < 1e-3
    assert by_arm["gemma"][f"misrounded/{HEADLINE}"] < 1e-3
