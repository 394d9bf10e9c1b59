import math
from dataclasses import replace

import pytest

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import f3_map
from normkit.lab.claims.f3_map import (
    DECADE,
    STUDY,
    WIDER,
    best_rate,
    boundary,
    largest_rise,
    largest_usable,
    share_trained,
    values_of,
)
from normkit.lab.claims.f3_warmup import CLAIMS
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.training import Plateau, Run
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, judge

F3A, F3B, F3C, F3D = CLAIMS
QUICK, FULL = Settings(), Settings(mode="full")
PLATEAU = Plateau(unigram=3.0, margin=0.07, noise=0.03)
CURVE = [4.0, 3.5, 3.2, *[3.0] * 17]

# gain over the plateau by (wiring, warm-up), one number for each learning rate of the wider grid
GAINS = {
    ("post", 0): [0.5, 0.9, 0.9, 0.0, 0.0],
    ("post", 100): [0.4, 0.8, 0.91, 0.6, 0.0],
    ("pre", 0): [0.6, 0.95, 1.0, 0.8, 0.0],
    ("pre", 100): [0.5, 0.8, 1.0, 0.9, 0.5],
}


def run(gain: float = 0.9, excess: list[float] | None = None, diverged_at: int | None = None) -> Run:
    heldout = None if diverged_at is not None else PLATEAU.unigram - gain
    outcome = PLATEAU.outcome(math.nan if heldout is None else heldout)
    return Run(CURVE, excess or [2.0, 1.0, *[0.0] * 18], heldout, outcome, diverged_at, PLATEAU)


def invented(settings: Settings, gains=GAINS, spread: float = 0.01, excess=None) -> list[Measurement]:
    """A map with the given gains; ``excess`` gives other curves to Post-Norm without warm-up."""
    made: list[Measurement] = []
    for (wiring, warmup), row in gains.items():
        for lr, gain in zip(WIDER, row, strict=True):
            if lr not in f3_map.rates(settings):
                continue
            for seed in range(5):
                bent = excess if (wiring, warmup) == ("post", 0) else None
                values = values_of(run(gain + spread * (seed - 2), bent))
                made.append(Measurement(STUDY.id, f"{wiring}/warmup-{warmup}/lr-{lr:g}", seed, values))
    return made


def verdict(claim, settings, measurements, plays=None) -> Verdict:
    e = Evidence(measurements, plays or claim.plays, settings)
    return judge(claim.literal.criteria(e), claim.corrected.criteria(e) if claim.corrected else None).verdict


def changed(**rows: list[float]) -> dict[tuple[str, int], list[float]]:
    names = {"post0": ("post", 0), "post100": ("post", 100), "pre0": ("pre", 0), "pre100": ("pre", 100)}
    return GAINS | {names[name]: row for name, row in rows.items()}


# --- F3a ---


@pytest.mark.parametrize("settings", [QUICK, FULL], ids=["quick", "full"])
def test_a_stall_is_the_correction(settings):
    made = invented(settings)
    assert verdict(F3A, settings, made) == Verdict.CORRECTED
    assert verdict(F3A, settings, made, F3A.control.plays) == Verdict.FAILS


def test_an_oscillation_is_the_sentence():
    made = invented(QUICK, excess=[2.0, 1.0, 0.2, 1.5, 0.1, 1.4, *[0.0] * 14])
    assert verdict(F3A, QUICK, made) == Verdict.HOLDS


def test_a_late_oscillation_is_not_within_tens_of_steps():
    made = invented(QUICK, excess=[2.0, 1.0, *[0.0] * 8, 3.0, *[0.0] * 9])
    assert verdict(F3A, QUICK, made) == Verdict.CORRECTED


def test_post_norm_that_trains_refutes_both():
    assert verdict(F3A, QUICK, invented(QUICK, changed(post0=[0.5, 0.9, 0.9, 0.9, 0.0]))) == Verdict.FAILS


def test_seeds_that_disagree_leave_it_open():
    made = invented(QUICK, changed(post0=[0.5, 0.9, 0.9, 0.1, 0.0]), spread=0.1)
    assert verdict(F3A, QUICK, made) == Verdict.UNDECIDED


# --- F3b ---


@pytest.mark.parametrize("settings", [QUICK, FULL], ids=["quick", "full"])
def test_stuck_where_pre_norm_trains_is_the_correction_and_the_control_flips(settings):
    made = invented(settings)
    assert verdict(F3B, settings, made) == Verdict.CORRECTED
    assert verdict(F3B, settings, made, F3B.control.plays) == Verdict.FAILS


def test_nothing_without_warmup_is_the_sentence():
    made = invented(FULL, changed(post0=[0.0] * 5))
    assert verdict(F3B, FULL, made) == Verdict.HOLDS
    assert verdict(F3B, FULL, made, F3B.control.plays) == Verdict.FAILS


def test_post_norm_that_trains_wherever_pre_norm_does_refutes_both():
    assert verdict(F3B, QUICK, invented(QUICK, changed(post0=[0.5, 0.9, 0.9, 0.8, 0.0]))) == Verdict.FAILS


def test_seeds_that_disagree_at_the_largest_rate_leave_it_open_whether_post_norm_is_stuck():
    made = invented(QUICK, changed(post0=[0.5, 0.9, 0.9, 0.1, 0.0]), spread=0.1)
    assert verdict(F3B, QUICK, made) == Verdict.UNDECIDED


def test_warmup_has_no_part_in_it():
    made = invented(QUICK, changed(post100=[0.0] * 5, pre100=[0.0] * 5))
    assert verdict(F3B, QUICK, made) == Verdict.CORRECTED


# --- F3d ---


def with_trained(made: list[Measurement], arm: str, seeds: int) -> list[Measurement]:
    """Return ``made`` with this many seeds of an arm off the plateau, the others on it."""
    return [replace(m, values=m.values | {"trained": m.seed < seeds}) if m.arm == arm else m for m in made]


def test_a_higher_limit_inside_the_grid_holds_and_the_control_flips():
    made = invented(FULL)
    assert verdict(F3D, FULL, made) == Verdict.HOLDS
    assert verdict(F3D, FULL, made, F3D.control.plays) == Verdict.FAILS


def test_a_limit_on_the_edge_is_not_decided():
    assert verdict(F3D, QUICK, invented(QUICK)) == Verdict.UNDECIDED
    beyond = changed(post100=[0.4, 0.8, 0.9, 0.6, 0.5])
    assert verdict(F3D, FULL, invented(FULL, beyond)) == Verdict.UNDECIDED
    assert verdict(F3D, FULL, invented(FULL, changed(post0=[0.0] * 5))) == Verdict.UNDECIDED


def test_a_limit_that_warmup_does_not_raise_refutes_it():
    assert verdict(F3D, FULL, invented(FULL, changed(post100=[0.4, 0.8, 0.9, 0.0, 0.0]))) == Verdict.FAILS
    assert verdict(F3D, FULL, invented(FULL, changed(post100=[0.4, 0.8, 0.0, 0.0, 0.0]))) == Verdict.FAILS


@pytest.mark.parametrize(
    ("seeds", "wanted"),
    [(0, Verdict.FAILS), (1, Verdict.FAILS), (2, Verdict.UNDECIDED), (3, Verdict.UNDECIDED), (4, Verdict.HOLDS)],
)
def test_a_limit_that_some_seeds_pass_is_only_known_to_lie_between(seeds, wanted):
    """Up to 3e-3 both arms train; of the seeds with warm-up this many train at 1e-2."""
    made = invented(FULL, changed(post100=[0.4, 0.8, 0.9, 0.0, 0.0]))
    made = with_trained(made, "post/warmup-100/lr-0.01", seeds)
    assert verdict(F3D, FULL, made) == wanted
    low, high = boundary(Evidence(made, F3D.plays, FULL), "with")
    assert (low, high) == {0: (3e-3, 3e-3), 1: (3e-3, 3e-3), 4: (1e-2, 1e-2)}.get(seeds, (3e-3, 1e-2))


def test_a_blurred_limit_without_warmup_counts_too_and_leaves_the_control_decided():
    made = with_trained(invented(FULL), "post/warmup-0/lr-0.01", 2)
    assert verdict(F3D, FULL, made) == Verdict.UNDECIDED
    assert verdict(F3D, FULL, made, F3D.control.plays) == Verdict.FAILS


def test_a_blurred_limit_below_a_higher_one_still_holds():
    made = invented(FULL, changed(post0=[0.5, 0.9, 0.0, 0.0, 0.0]))
    made = with_trained(made, "post/warmup-0/lr-0.003", 3)
    assert boundary(Evidence(made, F3D.plays, FULL), "without") == (1e-3, 3e-3)
    assert verdict(F3D, FULL, made) == Verdict.HOLDS


def test_the_share_of_trained_seeds_is_drawn():
    made = with_trained(invented(FULL), "post/warmup-100/lr-0.01", 2)
    e = Evidence(made, F3D.plays, FULL)
    assert share_trained(e, "with", 1e-2) == 0.4
    drawn = {s.label: s.y for s in F3D.figures(e)[0].panels[0].series}
    assert drawn["Post, warm-up 100"] == [100, 100, 100, 40, 0]


# --- F3c ---


@pytest.mark.parametrize("settings", [QUICK, FULL], ids=["quick", "full"])
def test_stable_and_alike_holds_and_the_control_fails(settings):
    made = invented(settings)
    assert verdict(F3C, settings, made) == Verdict.HOLDS
    assert verdict(F3C, settings, made, F3C.control.plays) == Verdict.FAILS


def test_a_rate_at_which_pre_norm_stalls_refutes_it():
    assert verdict(F3C, QUICK, invented(QUICK, changed(pre0=[0.6, 0.95, 1.0, 0.0, 0.0]))) == Verdict.FAILS


@pytest.mark.parametrize(("better", "wanted"), [(1.4, Verdict.FAILS), (1.06, Verdict.UNDECIDED)])
def test_warmup_that_pays_refutes_insensitivity(better, wanted):
    made = invented(QUICK, changed(pre100=[0.5, 0.8, better, 0.9, 0.5]))
    assert verdict(F3C, QUICK, made) == wanted


# --- what they read ---


def test_the_largest_usable_rate_needs_four_of_five():
    made = invented(QUICK)
    e = Evidence(made, F3A.plays, QUICK)
    assert largest_usable(e, "post") == 3e-3
    assert best_rate(e, "pre") == 3e-3
    for stuck, wanted in ((1, 1e-2), (2, 3e-3)):
        some = [
            replace(m, values=m.values | {"trained": False})
            if m.arm == "pre/warmup-0/lr-0.01" and m.seed < stuck
            else m
            for m in made
        ]
        assert largest_usable(Evidence(some, F3A.plays, QUICK), "pre") == wanted


def test_a_rise_is_measured_from_the_lowest_point_before_it():
    assert largest_rise(run(excess=[3.0, 2.0, 2.5, 1.0, 1.2])) == pytest.approx(0.5)
    assert largest_rise(run(excess=[3.0, 2.0, 1.0])) == 0.0
    assert largest_rise(run(excess=[3.0], diverged_at=17)) == pytest.approx(math.log(256))
    assert largest_rise(run(excess=[3.0, *[1.0] * 14], diverged_at=150)) == 0.0


def test_a_diverged_run_has_gained_nothing_and_is_json():
    values = values_of(run(diverged_at=17))
    assert values["gain"] == 0.0
    assert values["heldout"] is None
    assert not values["trained"]
    assert values["outcome"] == "diverged"


def test_the_map_has_every_cell():
    assert len(STUDY.arms(QUICK)) == 2 * 2 * len(DECADE)
    assert len(STUDY.arms(FULL)) == 2 * 2 * len(WIDER)
    assert STUDY.seeds == 5


def test_a_cell_trains_on_real_text(monkeypatch):
    monkeypatch.setattr(f3_map, "STEPS", 20)
    monkeypatch.setattr(f3_map, "LAYERS", 1)
    arm = next(a for a in STUDY.arms(QUICK) if a.name == "pre/warmup-0/lr-0.01")
    values = STUDY.measure(arm.params, Bench(QUICK, Draws(STUDY.id, arm.name, 0), load_corpus()))
    assert len(values["curve"]) == 2
    assert values["curve"][1] < values["curve"][0]
    assert 3.0 < values["unigram"] < 3.3


def test_summaries_and_figures_take_every_outcome(told):
    made = invented(FULL)
    made[0] = replace(made[0], values=values_of(run(diverged_at=17)) | {"curve": CURVE[:1]})
    for claim in CLAIMS:
        e = Evidence(made, claim.plays, FULL)
        assert told(claim, e)
        assert claim.figures(e)
