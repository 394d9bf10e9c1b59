"""D1: invariances, and a table with eleven cells that hold and seven that do not."""

from __future__ import annotations

import pytest

from normkit.lab.claims.d1_invariances import CLAIMS, NORMS, STUDY, TABLE
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
LAYER, WHOLE = CLAIMS


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("column", range(3))
def test_every_cell_counts(row, column, measure_study, judge_claim, altered):
    """The opposite of any single cell fails the claim."""
    stays = TABLE[row][column]
    wrong = [
        altered([m], f"table/{row}", lambda _: 1.0 if stays else 0.0)[0] if m.arm == NORMS[column] else m
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(WHOLE, WHOLE.plays, wrong).verdict is Verdict.FAILS


@pytest.mark.parametrize("key", ["shift", "scale", "flip"])
def test_every_property_counts(key, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, lambda _: 1e-9)
    assert judge_claim(LAYER, LAYER.plays, wrong).verdict is Verdict.FAILS


def test_rms_norm_sees_a_shift_and_batch_norm_does_not(measure_study):
    for m in measure_study(STUDY, SETTINGS):
        assert (m.values["shift"] > 0.1) == (m.arm == "rms")


def test_shift_in_float32_costs_the_rounding_of_the_input(measure_study):
    layer = next(m for m in measure_study(STUDY, SETTINGS) if m.arm == "layer")
    assert 2**-24 * 1e4 / 4 < layer.values["offset/float32"][-1] < 8 * 2**-24 * 1e4
    assert layer.values["offset/float64"][-1] < 8 * 2**-53 * 1e4
