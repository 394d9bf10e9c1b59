"""H5, H6, H7, M2 and A4b, which judge one table of twelve-block networks: invented tables and short real runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from normkit.lab.claim import Claim, Evidence, Measurement
from normkit.lab.claims import h5_layer_norm_scaling, h5_twelve_blocks, h6_mix_ln, h7_compromises, m2_block_deletion
from normkit.lab.claims.h5_twelve_blocks import CONTENDERS, LAYERS, RATES, SHORTENED, STUDY, made
from normkit.lab.claims.h7_compromises import COMPROMISES, best_losses
from normkit.lab.claims.m2_block_deletion import early, late
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips, judge

pytestmark = pytest.mark.slow  # a full run's claim; `make test` has ten minutes for everything

(H5,), (H6,) = h5_layer_norm_scaling.CLAIMS, h6_mix_ln.CLAIMS
H7A, H7B, H7C = h7_compromises.CLAIMS
M2, A4B = m2_block_deletion.CLAIMS
FULL = Settings(mode="full")
UNIGRAM = 3.12
LOSSES = {
    "post": 3.16, "deepnorm": 2.95, "reordered": 2.8, "lns": 2.55, "pre": 2.7, "pre-scaled": 2.52, "lns-scaled": 2.55
}  # fmt: skip
BLOCKS = range(1, LAYERS + 1)


def profile(contender: str, key: str, trained: bool) -> list[float]:
    """Rows of a world in which theory holds: Pre-Norm grows and falls, DeepNorm is level, Mix-LN lies between."""
    power = {"pre": 0.5, "mix-ln": 0.2}.get(contender, 0.0) * (2 if trained else 1)
    if key == "stream":
        return [(1 + n) ** power for n in range(LAYERS + 1)]
    if key == "deletion":
        return [0.1 * n**-power if contender == "pre" else 0.02 for n in BLOCKS]
    return [n**-power for n in BLOCKS]


def invented(losses: dict[str, float] = LOSSES, spread: float = 0.002, **other: Any) -> list[Measurement]:
    """A table with these losses at the higher rate, worse by 0.2 at the lower one, or diverged for NaN."""
    rows: list[Measurement] = []
    for arm in STUDY.arms(FULL):
        name = str(arm.params["contender"])
        for seed in range(3):
            loss = losses.get(name, 2.6) + spread * (seed - 1) * (-1 if "lns" in name else 1)
            loss += 0.2 * (arm.params["lr"] == RATES[0] and losses.get(name, 2.6) < 3)
            outcome = "diverged" if math.isnan(loss) else "trained" if loss < UNIGRAM - 0.073 else "stuck"
            values: dict[str, Any] = {
                "outcome": outcome,
                "trained": outcome == "trained",
                "heldout": None if math.isnan(loss) else loss,
                "gain": 0.0 if math.isnan(loss) else UNIGRAM - loss,
                "curve": [4.0, 3.3, 3.0],
                "unigram": UNIGRAM,
                "margin": 0.073,
            }
            noise = 1 + 0.01 * seed
            for key in ("stream", "moved", "gradients", "logits"):
                for when in ("fresh", "trained") if outcome != "diverged" else ("fresh",):
                    first, *rest = profile(name, key, trained=when == "trained")
                    values[f"{when} {key}"] = [noise * first, *rest]
            if name in SHORTENED and outcome != "diverged":
                values["deletion"] = [noise * v for v in profile(name, "deletion", trained=True)]
            rows.append(Measurement(STUDY.id, arm.name, seed, values | other.get(name.replace("-", "_"), {})))
    return rows


def verdict(claim: Claim, rows: list[Measurement], plays=None) -> Verdict:
    e = Evidence(rows, plays or claim.plays, FULL)
    return judge(claim.literal.criteria(e), claim.corrected.criteria(e) if claim.corrected else None).verdict


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        (H5, Verdict.HOLDS),
        (H6, Verdict.HOLDS),
        (H7A, Verdict.HOLDS),
        (H7B, Verdict.HOLDS),
        (H7C, Verdict.CORRECTED),
        (M2, Verdict.HOLDS),
        (A4B, Verdict.HOLDS),
    ],
    ids=lambda x: getattr(x, "id", ""),
)
def test_where_theory_holds_the_control_flips(claim, found, told):
    rows = invented()
    assert verdict(claim, rows) is found
    assert flips(found, verdict(claim, rows, claim.control.plays))
    e = Evidence(rows, claim.plays, FULL)
    assert told(claim, e)
    assert claim.figures(e)


@pytest.mark.parametrize(
    ("claim", "losses"),
    [
        (H5, {"lns": 2.8}),  # no help under the plain init
        (H5, {"lns-scaled": 2.4}),  # help under the scaled one
        (H7A, {"deepnorm": 3.15}),
        (H7A, {"post": 2.6}),
        *((H7B, {name: 3.15}) for name in COMPROMISES),
        (H7C, {"reordered-qk": 3.15}),
        (H7C, {"reordered": 2.6}),
    ],
)
def test_what_theory_forbids_refutes(claim, losses):
    rows = invented(LOSSES | losses)
    assert verdict(claim, rows) is Verdict.FAILS
    if claim.planted is not None:
        assert verdict(claim, rows, claim.planted.plays) is Verdict.HOLDS


def test_a_network_that_cannot_do_without_qk_norm_is_the_sentence():
    assert verdict(H7C, invented(LOSSES | {"reordered": 3.15})) is Verdict.HOLDS
    assert verdict(H7C, invented(LOSSES | {"reordered": math.nan})) is Verdict.HOLDS


@pytest.mark.parametrize("when", ["fresh", "trained"])
def test_mix_ln_must_be_more_even_at_both_times(when):
    steep = [2.0 ** -float(n) for n in BLOCKS]
    rows = invented(mix_ln={f"{when} gradients": steep})
    assert verdict(H6, rows) is Verdict.FAILS
    assert H6.planted is not None
    assert verdict(H6, rows, H6.planted.plays) is Verdict.HOLDS


def test_late_blocks_as_dear_as_early_ones_refute_dilution():
    assert verdict(M2, invented(pre={"deletion": [0.05] * LAYERS})) is Verdict.FAILS
    assert verdict(A4B, invented(pre={"trained moved": [0.3] * LAYERS})) is Verdict.FAILS
    assert verdict(A4B, invented(pre={"trained stream": [1.0] * (LAYERS + 1)})) is Verdict.FAILS


def test_thirds_leave_the_first_block_out():
    row = [100.0, 1, 2, 3, *[50.0] * 4, 5, 6, 7, 8]
    assert (early(row), late(row)) == (2.0, 6.5)


def test_a_contender_is_judged_at_its_better_rate_and_a_divergence_on_the_plateau():
    e = Evidence(invented(LOSSES | {"keel": math.nan}), H7B.plays, FULL)
    assert best_losses(e, "pre") == pytest.approx([2.698, 2.7, 2.702])
    assert best_losses(e, "keel") == [UNIGRAM] * 3
    assert H7B.figures(e)


def test_diverged_contenders_are_drawn_and_told(told):
    rows = invented(LOSSES | dict.fromkeys(("post", "mix-ln"), math.nan))
    for claim in (H6, H7A, H7B):
        e = Evidence(rows, claim.plays, FULL)
        assert told(claim, e) if claim is not H6 else claim.summary(e)
        assert claim.figures(e)
    assert verdict(H6, rows) is Verdict.FAILS, "gradients of a network that is not there are not even"


# --- the networks ---


def test_a_scaled_init_is_gpt_2_s():
    plain, scaled = (made(CONTENDERS[name], Draws("t", "a", 0)) for name in ("pre", "pre-scaled"))
    for name, linear in plain.weights().items():
        factor = 1 / (2 * LAYERS) ** 0.5 if name.split("/")[-1] in ("output", "down") else 1.0
        torch.testing.assert_close(scaled.weights()[name].weight, linear.weight * factor)


def test_every_contender_is_another_network():
    windows = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = {name: made(c, Draws("t", "a", 0))(windows) for name, c in CONTENDERS.items()}
    names = list(outputs)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert not torch.allclose(outputs[one], outputs[other], atol=1e-3), (one, other)


@pytest.mark.parametrize("name", ["pre", "keel", "derf"])
def test_a_short_run_is_measured_inside_and_out(name, measure_text, monkeypatch):
    monkeypatch.setattr(h5_twelve_blocks, "LAYERS", 3)
    short = replace(STUDY, arms=lambda s: [replace(a, params={**a.params, "steps": 10}) for a in STUDY.arms(s)])
    (m,) = measure_text(short, replace(FULL, seeds=(0,)), [f"{name}/warmup-0/lr-0.01"])
    assert len(m.values["fresh stream"]) == len(m.values["trained stream"]) == 4
    assert m.values["fresh gradients"] != m.values["trained gradients"]
    assert ("deletion" in m.values) is (name in SHORTENED)
    assert len(m.values.get("deletion", [0] * 3)) == 3


def test_the_table_is_for_full_runs():
    arms = STUDY.arms(FULL)
    assert len(arms) == 2 * len(CONTENDERS)
    assert STUDY.full_only
    assert sum(STUDY.seconds(a.params) for a in arms) * STUDY.seeds <= 360
