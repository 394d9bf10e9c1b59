"""F4: the map at two depths, judged on invented runs; labels swapped and shuffled; one cell measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from normkit.lab.claim import Claim, Evidence, Measurement
from normkit.lab.claims import f4_depth, f4_depth_map
from normkit.lab.claims.f3_map import DECADE
from normkit.lab.claims.f4_depth import whole
from normkit.lab.claims.f4_depth_map import DEEP, MAPS, SEEDS, SHALLOW, WARMUPS, WIRINGS
from normkit.lab.figures import Drawing
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips, judge

pytestmark = pytest.mark.slow  # a full run's claim; `make test` has ten minutes for everything

F4A, F4E, F4B, F4C, F4D = f4_depth.CLAIMS
FULL = Settings(mode="full")
UNIGRAM, MARGIN, NOISE = 3.12, 0.073, 0.076
Gain = Callable[[str, int, float], float | None]


def learnt(wiring: str, warmup: int, lr: float) -> float | None:
    """A world like the one that was measured at 6 blocks: gains over the plateau, None for a divergence."""
    if wiring == "pre":
        return 0.5 - 0.001 * warmup
    if lr == DECADE[-1]:
        return 0.4 if warmup == 100 else -0.03
    return 0.5 - 0.004 * warmup


def deep(wiring: str, warmup: int, lr: float) -> float | None:
    return -0.05 if wiring == "post" else 0.4 - 0.001 * warmup


def invented(layers: int, gain: Gain, spread: float = 0.01, rise: float = 0.0) -> list[Measurement]:
    made: list[Measurement] = []
    for wiring in WIRINGS:
        for warmup in WARMUPS:
            for lr in DECADE:
                for seed in range(SEEDS[layers]):
                    found = gain(wiring, warmup, lr)
                    got = None if found is None else found + spread * (seed - 1) * (1 if warmup else -1)
                    outcome = "diverged" if got is None else "trained" if got > MARGIN else "stuck"
                    values = {
                        "outcome": outcome,
                        "trained": outcome == "trained",
                        "heldout": None if got is None else UNIGRAM - got,
                        "gain": 0.0 if got is None else got,
                        "rise": rise if (wiring, warmup) == ("post", 0) else 0.02,
                        "curve": [4.0, 3.2] if got is None else [4.0, 3.2, UNIGRAM - got],
                        "unigram": UNIGRAM,
                        "margin": MARGIN,
                        "noise": NOISE,
                    }
                    made.append(Measurement(MAPS[layers].id, f"{wiring}/warmup-{warmup}/lr-{lr:g}", seed, values))
    return made


def verdict(claim: Claim, made: list[Measurement], plays=None) -> Verdict:
    e = Evidence(made, plays or claim.plays, FULL)
    return judge(claim.literal.criteria(e), claim.corrected.criteria(e) if claim.corrected else None).verdict


# --- 6 blocks ---


def test_warmup_that_helps_above_and_hurts_below_is_the_correction_and_the_arms_turn_it_over():
    made = invented(SHALLOW, learnt)
    assert verdict(F4A, made) is Verdict.CORRECTED
    assert verdict(F4A, made, F4A.control.plays) is Verdict.FAILS
    swapped = {**F4A.plays, "with": "post/warmup-0", "without": "post/warmup-100"}
    assert verdict(F4A, made, swapped) is Verdict.FAILS


def test_warmup_that_helps_at_a_large_rate_holds_and_one_that_does_not_fails():
    made = invented(SHALLOW, learnt)
    assert verdict(F4E, made) is Verdict.HOLDS
    assert verdict(F4E, made, F4E.control.plays) is Verdict.FAILS

    def stuck(wiring: str, warmup: int, lr: float) -> float | None:
        return -0.03 if wiring == "post" and lr == DECADE[-1] else learnt(wiring, warmup, lr)

    made = invented(SHALLOW, stuck, spread=0.002)
    assert verdict(F4E, made) is Verdict.FAILS
    assert F4E.planted is not None
    assert verdict(F4E, made, F4E.planted.plays) is Verdict.HOLDS
    half = [
        replace(m, values=m.values | {"gain": 0.3}) if m.arm == "post/warmup-100/lr-0.01" and m.seed < 2 else m
        for m in made
    ]
    assert verdict(F4E, half) is Verdict.UNDECIDED
    assert verdict(F4A, half) is Verdict.CORRECTED
    assert verdict(F4A, half, F4A.control.plays) is Verdict.FAILS


def test_a_low_rate_that_needs_warmup_refutes_the_correction():
    def needs(wiring: str, warmup: int, lr: float) -> float | None:
        return 0.3 if warmup else -0.05 if lr < DECADE[-1] else 0.4

    assert verdict(F4A, invented(SHALLOW, needs)) is Verdict.FAILS


def test_warmup_that_helps_everywhere_is_the_sentence():
    def helps(wiring: str, warmup: int, lr: float) -> float | None:
        return 0.1 + 0.003 * warmup

    assert verdict(F4A, invented(SHALLOW, helps)) is Verdict.HOLDS


def test_warmup_that_changes_nothing_refutes_both():
    assert verdict(F4A, invented(SHALLOW, lambda *at: 0.4, spread=0.001)) is Verdict.FAILS


def test_shuffled_labels_leave_it_open():
    """Which run had warm-up is forgotten in two seeds of five: the same numbers no longer decide."""
    names = {"post/warmup-0/": "post/warmup-100/", "post/warmup-100/": "post/warmup-0/"}

    def shuffled(m: Measurement) -> Measurement:
        head = next((h for h in names if m.arm.startswith(h)), None)
        return replace(m, arm=names[head] + m.arm.removeprefix(head)) if head and m.seed in (1, 3) else m

    assert verdict(F4A, [shuffled(m) for m in invented(SHALLOW, learnt)]) is Verdict.UNDECIDED


def test_a_divergence_has_gained_nothing():
    def diverges(wiring: str, warmup: int, lr: float) -> float | None:
        return None if (wiring, warmup, lr) == ("post", 0, DECADE[-1]) else learnt(wiring, warmup, lr)

    made = invented(SHALLOW, diverges)
    assert verdict(F4A, made) is Verdict.CORRECTED
    (drawing,) = [f for f in F4A.figures(Evidence(made, F4A.plays, FULL)) if isinstance(f, Drawing)]
    assert "Post-Norm, warm-up 0, lr 0.01: 5 diverged" in drawing.alt
    assert "Post-Norm, warm-up 20, lr 0.01: 5 stuck at the unigram plateau" in drawing.alt
    assert "Pre-Norm, warm-up 0, lr 0.01: 5 trained" in drawing.alt


# --- 24 blocks ---


def test_stalls_and_sentences_at_24_blocks():
    made = invented(DEEP, deep)
    assert verdict(F4B, made) is Verdict.CORRECTED
    assert verdict(F4B, made, F4B.control.plays) is Verdict.FAILS
    assert verdict(F4C, made) is Verdict.FAILS
    assert F4C.planted is not None
    assert verdict(F4C, made, F4C.planted.plays) is Verdict.HOLDS
    assert verdict(F4D, made) is Verdict.HOLDS
    assert flips(Verdict.HOLDS, verdict(F4D, made, F4D.control.plays))


def test_oscillation_is_the_sentence_and_one_run_of_two_is_not_enough():
    made = invented(DEEP, deep, rise=1.5)
    assert verdict(F4B, made) is Verdict.HOLDS
    one = [replace(m, values=m.values | {"rise": 0.02}) if m.seed == 1 else m for m in made]
    assert verdict(F4B, one) is Verdict.CORRECTED


def test_the_rate_judged_is_one_that_every_pre_norm_run_bears():
    made = [
        replace(m, values=m.values | {"gain": -0.05, "trained": False, "outcome": "stuck"})
        if m.seed == 1 and m.arm == "pre/warmup-0/lr-0.01"
        else m
        for m in invented(DEEP, deep)
    ]
    assert verdict(F4B, made) is Verdict.CORRECTED
    assert any("lr-0.003" in c.name for c in F4B.literal.criteria(Evidence(made, F4B.plays, FULL)))


def test_warmup_that_suffices_holds_and_without_it_the_control_fails():
    def suffices(wiring: str, warmup: int, lr: float) -> float | None:
        return 0.3 if warmup == 100 and lr < DECADE[-1] else deep(wiring, warmup, lr)

    made = invented(DEEP, suffices)
    assert verdict(F4C, made) is Verdict.HOLDS
    assert verdict(F4C, made, F4C.control.plays) is Verdict.FAILS
    one = [
        replace(m, values=m.values | {"gain": -0.05, "trained": False, "outcome": "stuck"})
        if m.seed == 1 and m.arm.startswith("post")
        else m
        for m in made
    ]
    assert verdict(F4C, one) is Verdict.FAILS, "every run must converge"


@pytest.mark.parametrize("lr", DECADE)
def test_one_rate_that_pre_norm_does_not_bear_refutes_stability(lr):
    def stuck(wiring: str, warmup: int, rate: float) -> float | None:
        return -0.05 if rate == lr and not warmup else deep(wiring, warmup, rate)

    assert verdict(F4D, invented(DEEP, stuck)) is Verdict.FAILS


def test_warmup_that_pays_refutes_insensitivity_and_one_that_costs_does_not():
    def pays(wiring: str, warmup: int, lr: float) -> float | None:
        return 0.3 + 0.01 * warmup if wiring == "pre" else -0.05

    assert verdict(F4D, invented(DEEP, pays)) is Verdict.FAILS

    def costs(wiring: str, warmup: int, lr: float) -> float | None:
        return 0.9 - 0.003 * warmup if wiring == "pre" else -0.05

    assert verdict(F4D, invented(DEEP, costs)) is Verdict.HOLDS


# --- what they read ---


def test_summaries_and_figures_take_every_outcome(told):
    for claim, layers in ((F4A, SHALLOW), (F4E, SHALLOW), (F4B, DEEP), (F4C, DEEP), (F4D, DEEP)):
        for gain in (learnt, deep, lambda *at: None):
            e = Evidence(invented(layers, gain), claim.plays, FULL)
            assert told(claim, e)
            assert len(claim.figures(e)) >= 2


def test_the_maps_have_every_cell_and_are_for_full_runs():
    for layers, study in MAPS.items():
        arms = study.arms(FULL)
        assert len(arms) == 2 * 3 * 3
        assert {f"pre/{end}" for end in whole("pre").ends} <= {a.name for a in arms}
        assert study.full_only
        assert {a.params["layers"] for a in arms} == {layers}
    assert (MAPS[SHALLOW].seeds, MAPS[DEEP].seeds) == (5, 2)
    cost = {n: sum(s.seconds(a.params) for a in s.arms(FULL)) * s.seeds for n, s in MAPS.items()}
    assert cost[DEEP] <= 480


def test_a_cell_trains_on_real_text(measure_text):
    short = replace(
        MAPS[SHALLOW],
        arms=lambda s: [replace(a, params=dict(a.params) | {"steps": 10, "layers": 1}) for a in MAPS[SHALLOW].arms(s)],
    )
    names = ["pre/warmup-0/lr-0.01", "pre/warmup-100/lr-0.01"]
    runs = {m.arm: m.values for m in measure_text(short, replace(FULL, seeds=(0,)), names)}
    assert runs[names[0]]["gain"] > runs[names[1]]["gain"], "ten steps of a warm-up of a hundred go less far"
    assert f4_depth_map.ROWS * 64 == 256
