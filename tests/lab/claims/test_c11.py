"""C11: the three steps against loops over sets of the table of coverage, and verdicts of other forms."""

from __future__ import annotations

import itertools

import pytest
import torch

from normkit.coverage import COVERAGE
from normkit.lab.claim import Evidence
from normkit.lab.claims.c11_one_form import CENTRED, CLAIMS, GROUPS, NORMS, STUDY, C, L, N
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C11,) = CLAIMS


@pytest.mark.parametrize("name", CENTRED)
def test_the_sets_are_those_of_the_table(name):
    ids = NORMS[name][1](torch.arange(N * L * C).view(N, L, C))
    places = list(itertools.product(range(N), range(L), range(C)))
    for row in ids[:: max(1, len(ids) // 4)]:
        first = places[int(row[0])]
        want = {i for i, place in enumerate(places) if COVERAGE[name].covers(first, place, C // GROUPS)}
        assert set(row.tolist()) == want


def test_the_claim_holds_with_its_correction_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(C11, C11.plays, measured).verdict
    assert verdict is Verdict.CORRECTED
    assert flips(verdict, judge_claim(C11, C11.control.plays, measured).verdict)
    e = Evidence(measured, C11.plays, SETTINGS)
    assert told(C11, e)
    assert C11.figures(e)


def test_without_the_rms_norm_the_sentence_would_stand(measure_study, judge_claim):
    plays = {**C11.plays, "rms": "layer"}
    assert judge_claim(C11, plays, measure_study(STUDY, SETTINGS)).verdict is Verdict.HOLDS


def test_a_form_that_is_off_is_seen(measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), "centred", lambda v: v + 1e-11)
    assert judge_claim(C11, C11.plays, wrong).verdict is Verdict.FAILS
