"""L2: running sums against NumPy's own scalar arithmetic, the stops, and what a float32 sum must not lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Evidence
from normkit.lab.claims.l2_low_precision_sums import CLAIMS, STUDY, running_sum
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
(L2,) = CLAIMS


def test_verdict_control_and_summary(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(L2, L2.plays, measured).verdict is Verdict.HOLDS
    assert judge_claim(L2, L2.control.plays, measured).verdict is Verdict.FAILS
    assert "256" in told(L2, Evidence(measured, L2.plays, SETTINGS))
    check_pictures(L2, measured, SETTINGS)


def test_running_sum_is_the_scalar_loop():
    x = torch.rand(3, 301, generator=torch.Generator().manual_seed(1)).half()
    ours = running_sum(x, torch.float16)
    for row, sums in zip(x.numpy(), ours.numpy(), strict=True):
        total = np.float16(0)
        for value, partial in zip(row, sums, strict=True):
            total = np.float16(total + value)
            assert total == partial


def test_every_format_stops_where_its_integers_end():
    """Also float32, started below its own end: the law, not a table of two numbers."""
    for dtype, stop in ((torch.bfloat16, 2.0**8), (torch.float16, 2.0**11), (torch.float32, 2.0**24)):
        start = torch.full((1, 1), stop - 5, dtype=dtype)
        sums = running_sum(torch.cat([start, torch.ones(1, 9, dtype=dtype)], 1), dtype)
        assert float(sums.max()) == stop


def test_pilot_shares(measure_study):
    by_arm = {m.arm: m.values for m in measure_study(STUDY, SETTINGS) if m.seed == 0}
    assert by_arm["own/bfloat16"]["share"] == pytest.approx(0.49, abs=0.02)
    assert by_arm["own/bfloat16"]["length of ones"] == 4.0  # a sum of 256 instead of 4096
    assert by_arm["own/float16"]["length of ones"] == pytest.approx(2**0.5)


@pytest.mark.parametrize(("key", "wrong"), [("stop", 2050.0), ("worst", 1e-3), ("length of ones", 1.01)])
def test_other_numbers_fail(key, wrong, measure_study, judge_claim, altered):
    measured = altered(measure_study(STUDY, SETTINGS), key, lambda _: wrong)
    assert judge_claim(L2, L2.plays, measured).verdict is Verdict.FAILS
