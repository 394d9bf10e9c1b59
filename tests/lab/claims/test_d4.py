"""D4: spectra against the projection written down, and which directions are the blind ones."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims import d4_geometry as module
from normkit.lab.claims.d4_geometry import CLAIMS, STUDY, WIDTH, spectrum
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(D4,) = CLAIMS


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_the_jacobian_is_the_projection(name):
    x = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3 + 1
    ones = torch.ones_like(x)
    centred = x - x.mean() if name == "layer" else x
    divisor = centred.square().mean().sqrt()
    want = torch.eye(WIDTH, dtype=torch.float64) - torch.outer(centred, centred) / divisor**2 / WIDTH
    if name == "layer":
        want -= torch.outer(ones, ones) / WIDTH
    got = torch.autograd.functional.jacobian(module._NORMS[name], x)
    torch.testing.assert_close(got * divisor, want, rtol=0, atol=1e-13)
    assert torch.linalg.vector_norm(got @ x) < 1e-13
    assert (torch.linalg.vector_norm(got @ ones) < 1e-13) == (name == "layer")


def test_a_spectrum_of_a_known_map():
    assert spectrum(lambda v: 2 * v, torch.ones(3), torch.tensor(0.5)) == pytest.approx([1, 1, 1])
    assert spectrum(lambda v: v - v.mean(), torch.ones(3), torch.tensor(1.0)) == pytest.approx([0, 1, 1], abs=1e-6)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(D4, D4.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(D4, D4.control.plays, measured).verdict)
    e = Evidence(measured, D4.plays, SETTINGS)
    assert "has 2 zero singular values, RMSNorm's 1" in told(D4, e)
    assert D4.figures(e)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("spectra", lambda rows: [[*row[:1], row[1] + 1e-11, *row[2:]] for row in rows]),
        ("spectra", lambda rows: [[*row[:-1], row[-1] + 1e-11] for row in rows]),
        ("radius/float32", lambda v: v + 1e-5),
        ("mean/float64", lambda v: v + 1e-11),
    ],
)
def test_another_geometry_is_seen(key, change, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, change)
    assert judge_claim(D4, D4.plays, wrong).verdict is Verdict.FAILS
