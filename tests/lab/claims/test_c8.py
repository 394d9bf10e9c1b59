"""C8: a token among changed neighbours, against statistics taken by hand."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims import c8_neighbours as module
from normkit.lab.claims.c8_neighbours import CHANGES, CLAIMS, STUDY, C, L, N
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C8,) = CLAIMS


def test_every_change_spares_the_token_and_touches_all_others():
    generator = torch.Generator().manual_seed(0)
    tokens, other = (torch.randn(N * L, C, generator=generator) for _ in range(2))
    order = torch.randperm(N * L - 1, generator=generator)
    changed = module._changed(tokens, other, order)
    assert set(changed) == set(CHANGES)
    for name, new in changed.items():
        assert torch.equal(new[0], tokens[0])
        if name == "exchanged":
            assert torch.equal(new.sort(0).values, tokens.sort(0).values)
            assert not torch.equal(new, tokens)
        else:
            assert bool((new[1:] != tokens[1:]).all())


def test_batch_norm_moves_as_its_statistics_do():
    """From (x − μ)/σ to (x − μ′)/σ′, in float64 by hand."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(N * L, C, generator=generator, dtype=torch.float64)
    other = 2 + 3 * torch.randn(N * L, C, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(C, generator=generator, dtype=torch.float64) for _ in range(2))
    new = module._changed(tokens, other, torch.arange(N * L - 1))["replaced"]
    for x in (tokens, new):
        root = (x.var(0, unbiased=False) + module.EPS).sqrt()
        want = (tokens[0] - x.mean(0)) / root * weight + bias
        got = module._NORMS["batch"](x.view(N, L, C), weight, bias)[0, 0]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_claim_holds_and_the_control_fails(backend, monkeypatch, measure_study, judge_claim, told):
    monkeypatch.setenv("NORMKIT_BACKEND", backend)
    cells = [(arm.name, seed) for arm in STUDY.arms(SETTINGS) for seed in SETTINGS.seeds]
    measured = [measure_study.fresh(STUDY, SETTINGS, arm, seed) for arm, seed in cells]
    verdict = judge_claim(C8, C8.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(C8, C8.control.plays, measured).verdict)
    e = Evidence(measured, C8.plays, SETTINGS)
    assert f"0 of {C}" in told(C8, e)
    (chart,) = C8.figures(e)
    assert f"{C} under batch norm, 0 under layer norm" in chart.caption


@pytest.mark.parametrize("change", CHANGES)
def test_one_bit_in_one_change_is_seen(change, measure_study, judge_claim):
    measured = measure_study(STUDY, SETTINGS)
    worst = max(measured, key=lambda m: (m.arm == "rms", m.seed))
    kept = worst.values[f"bits/{change}/bfloat16"]
    worst.values[f"bits/{change}/bfloat16"] = 1
    try:
        assert judge_claim(C8, C8.plays, measured).verdict is Verdict.FAILS
    finally:
        worst.values[f"bits/{change}/bfloat16"] = kept
