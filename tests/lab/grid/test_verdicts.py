"""Verdicts of a grid on measurements made up for the purpose: what they must say when the truth is known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normkit.lab.claim import Claim, Measurement
from normkit.lab.grid.options import Grid
from normkit.lab.grid.reading import FREQUENCIES
from normkit.lab.grid.study import STUDY, arms
from normkit.lab.grid.verdicts import claims
from normkit.lab.report.grid_page import grid_page
from normkit.lab.runs.judged import Judged, Run, judge_claim
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

UNIGRAM, MARGIN = 3.0, 0.08
GRID = Grid(wirings=("pre", "post", "deepnorm"), norms=("rms",), lrs=(3e-3, 1e-3, 1e-2), warmups=(0, 20))
SETTINGS = Settings(seeds=(0, 1, 2, 3), grid=GRID.to_text())
NOISE = (0.02, -0.01, 0.0, -0.012)  # of a seed, shared by all arms
Loss = float | None


def made(losses: dict[str, Any], settings: Settings = SETTINGS) -> Run:
    """Return a run: the loss of the longest beginning of an arm's name, or a list of one for each seed."""
    found: list[Measurement] = []
    for arm in arms(settings):
        beginning = max((b for b in losses if arm.name.startswith(b)), key=len, default="")
        for i, seed in enumerate(settings.seeds):
            at = losses.get(beginning, 2.5)
            loss: Loss = at[i] if isinstance(at, list) else at
            if arm.name == FREQUENCIES:
                loss = UNIGRAM + 0.05
            elif loss is not None and not isinstance(at, list):
                loss += NOISE[i]
            found.append(Measurement(STUDY.id, arm.name, seed, values(loss)))
    return Run(Path("run"), settings, {}, tuple(found))


def values(loss: Loss) -> dict[str, Any]:
    outcome = "diverged" if loss is None else "trained" if loss < UNIGRAM - MARGIN else "stuck"
    return {
        "outcome": outcome,
        "trained": outcome == "trained",
        "heldout": loss,
        "gain": 0.0 if loss is None else UNIGRAM - loss,
        "curve": [4.0, 3.5, 3.2],
        "unigram": UNIGRAM,
        "margin": MARGIN,
        "flags": [],
    }


def judged(losses: dict[str, Any], one: str, settings: Settings = SETTINGS) -> Judged:
    (claim,) = [c for c in claims(settings) if c.title.startswith(one)]
    return judge_claim(claim, made(losses, settings))


def swapped(claim: Claim, run: Run) -> Verdict:
    """Judge with candidate and reference exchanged and nothing else."""
    a, b = claim.plays["candidate"], claim.plays["reference"]
    other = replace(claim, plays={"candidate": b, "reference": a, "learner": b}, control=claim.control)
    found = judge_claim(replace(other, control=replace(claim.control, plays=claim.plays)), run)
    assert found.judgement is not None
    return found.judgement.verdict


def test_there_is_a_claim_for_every_contender_and_every_warm_up():
    assert [c.title for c in claims(SETTINGS)] == [
        "pre rms trains",
        "post rms against pre rms",
        "deepnorm rms against pre rms",
        "pre rms, warm-up 20 against pre rms, no warm-up",
        "post rms, warm-up 20 against post rms, no warm-up",
        "deepnorm rms, warm-up 20 against deepnorm rms, no warm-up",
    ]


@pytest.mark.parametrize(
    ("loss", "verdict", "other"),
    [
        (2.4, Verdict.HOLDS, Verdict.FAILS),
        (2.6, Verdict.FAILS, Verdict.HOLDS),
        (2.501, Verdict.CORRECTED, Verdict.CORRECTED),  # two equals stay equal when they are exchanged
    ],
)
def test_better_worse_and_equal_are_told_apart_and_every_control_flips(loss: float, verdict: Verdict, other: Verdict):
    losses = {"pre": 2.5, "post": loss}
    found = judged(losses, "post rms against")
    assert found.judgement is not None
    assert found.judgement.verdict is verdict
    assert found.flipped is True
    assert isinstance(found.claim, Claim)
    assert swapped(found.claim, made(losses)) is other


def test_each_stands_at_its_own_best_rate_and_warm_up():
    losses = {"pre": 2.8, "pre/rms/warmup-20/lr-0.003": 2.3, "post": None, "post/rms/warmup-0/lr-0.001": 2.2}
    found = judged(losses, "post rms against")
    assert found.judgement is not None
    assert found.judgement.verdict is Verdict.HOLDS
    text = found.claim.summary(found.evidence)  # pyright: ignore
    assert "post rms: 2.20 ± 0.02 at lr 0.001, stable at 0.001;" in text
    assert "pre rms: 2.30 ± 0.02 at lr 0.003 (warm-up 20), stable at 0.001 to 0.01;" in text
    assert "difference −0.1 nats/byte" in text


def test_the_difference_is_paired_by_seed():
    """A spread over seeds ten times the difference does not hide it, where both sides share it."""
    seeds = [2.0, 2.3, 2.6, 2.9]
    found = judged({"pre": seeds, "post": [s - 0.03 for s in seeds]}, "post rms against")
    assert found.judgement is not None
    assert found.judgement.verdict is Verdict.HOLDS


def test_labels_shuffled_seed_by_seed_decide_nothing():
    a, b = 2.5, 2.4
    found = judged({"pre": [a, b, a, b], "post": [b, a, b, a]}, "post rms against")
    assert found.judgement is not None
    assert found.judgement.verdict is Verdict.UNDECIDED


def test_one_seed_decides_nothing():
    settings = replace(SETTINGS, seeds=(5,))
    losses = {"pre": 2.5, "post": 2.0}
    for title in ("post rms against", "pre rms trains"):
        found = judged(losses, title, settings)
        assert found.judgement is not None
        assert found.judgement.verdict is Verdict.UNDECIDED


def test_a_difference_about_as_large_as_the_tolerance_is_not_decided():
    found = judged({"pre": 2.5, "post": 2.4875}, "post rms against")  # 1.25 tolerances: better, but not at twice
    assert found.judgement is not None
    assert found.judgement.verdict is Verdict.UNDECIDED


def test_two_that_are_stuck_are_no_equals():
    found = judged({"pre": 3.0, "post": 3.0}, "post rms against")
    assert found.judgement is not None
    assert found.judgement.verdict is Verdict.FAILS
    assert found.flipped is False


def test_a_reference_that_trains_and_one_that_does_not():
    assert judged({}, "pre rms trains").judgement.verdict is Verdict.HOLDS  # pyright: ignore
    assert judged({}, "pre rms trains").flipped is True
    stuck = judged({"pre": 3.01}, "pre rms trains")
    assert stuck.judgement is not None
    assert stuck.judgement.verdict is Verdict.FAILS


def test_the_stable_range_ends_where_a_seed_in_five_and_more_is_lost():
    losses = {"pre/rms/warmup-0/lr-0.01": [None, 2.5, 2.5, 2.5], "pre/rms/warmup-0/lr-0.001": 3.2, "pre": 2.9}
    losses |= {"pre/rms/warmup-0/lr-0.003": 2.4}
    found = judged(losses, "pre rms trains")
    assert "at lr 0.003, stable at 0.003;" in found.claim.summary(found.evidence)  # pyright: ignore


def test_the_page_draws_the_three_outcomes_differently_and_refers_to_nothing_outside():
    losses = {"pre": 2.5, "post": 3.0, "post/rms/warmup-0/lr-0.01": None, "deepnorm": 2.4}
    run = made(losses)
    page = grid_page(run, [judge_claim(claim, run) for claim in claims(SETTINGS)])
    assert page == grid_page(run, [judge_claim(claim, run) for claim in claims(SETTINGS)])
    overview = page[: page.index('id="verdicts"')]
    runs = 4 * 2 * 3  # seeds, warm-ups, rates of one contender; and a mark of each kind in the legend
    assert overview.count('fill="var(--holds)"') == 2 * runs + 1
    assert overview.count("<circle") - overview.count('fill="var(--holds)"') == runs - 4 + 1
    assert overview.count('stroke="var(--fails)"') == 4 + 1
    assert "4 diverged" in overview
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert "could not be" not in page
    assert "--wiring pre,post,deepnorm --norm rms" in page


def test_a_page_of_a_run_that_has_just_begun():
    run = replace(made({}), measurements=made({}).measurements[:5])
    page = grid_page(run, [judge_claim(claim, run) for claim in claims(SETTINGS)])
    assert "waiting" in page


def test_flags_stand_on_the_page_with_the_run_they_belong_to():
    run = made({})
    first = run.measurements[0]
    flagged = replace(first, values=first.values | {"flags": ["danger, not-finite: <side>"]})
    page = grid_page(replace(run, measurements=(flagged, *run.measurements[1:])), [])
    assert f"<code>{first.arm}, seed 0</code>: danger, not-finite: &lt;side&gt;" in page
    assert "not-finite" not in grid_page(run, [])


def test_names_that_look_like_html_are_text_on_the_page():
    settings = replace(SETTINGS, grid=replace(GRID, models=("mine:<b>x",)).to_text())
    run = made({"model": 2.4}, settings)
    page = grid_page(run, [judge_claim(claim, run) for claim in claims(settings)])
    assert "<b>x" not in page
    assert "mine:&lt;b&gt;x" in page
