"""C1: the padding law, by hand on numbers small enough to check."""

from __future__ import annotations

import pytest
import torch

from normkit.functional import moments
from normkit.lab.claims.c1_padding import CLAIMS, DOUBLED, PADS, REAL, STUDY
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

SETTINGS = Settings(seeds=(0, 1, 2))
ENTERS, HALVED = CLAIMS


def test_by_hand():
    """1, 3 and two zeros: mean 2 → 1; variance 1 → ½·1 + ¼·4 = 1.5."""
    padded = torch.tensor([[[1.0], [3.0], [0.0], [0.0]]])
    seen = moments(padded, axes=(0, 1))
    assert (float(seen.mean), float(seen.variance())) == (1.0, 1.5)


def test_doubling_is_the_articles():
    assert REAL[DOUBLED] == 0.5
    assert REAL[PADS.index(0)] == 1.0


def test_masked_arm_ignores_padding(measure_study):
    for m in measure_study(STUDY, SETTINGS):
        if m.arm == "masked":
            assert m.values["ratio/mean-0"] == pytest.approx([1.0] * len(PADS), abs=1e-14)
            assert m.values["mean/mean-2"] == pytest.approx([m.values["mean/mean-2"][0]] * len(PADS), abs=1e-14)


def test_a_deviation_from_the_law_is_seen(measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), "law", lambda row: [v + 1e-11 for v in row])
    assert judge_claim(ENTERS, ENTERS.plays, wrong).verdict is Verdict.FAILS
    assert judge_claim(HALVED, HALVED.plays, wrong).verdict is Verdict.FAILS


def test_a_mask_that_leaks_is_seen(measure_study, judge_claim, altered):
    leaky = [
        m if m.arm == "padded" else altered([m], "ratio", lambda row: [v * (1 + 1e-9) for v in row])[0]
        for m in measure_study(STUDY, SETTINGS)
    ]
    assert judge_claim(ENTERS, ENTERS.plays, leaky).verdict is Verdict.FAILS
