import pytest
import torch

from normkit.lab.claim import Evidence
from normkit.lab.claims import c9_causality as module
from normkit.lab.claims.c9_causality import CLAIMS, STUDY, N, T
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict

(C9,) = CLAIMS
SETTINGS = Settings(seeds=(0, 1, 2))


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim):
    measured = measure_study(STUDY, SETTINGS)
    assert judge_claim(C9, C9.plays, measured).verdict == Verdict.HOLDS
    assert judge_claim(C9, C9.control.plays, measured).verdict == Verdict.FAILS


def test_a_layer_norm_that_leaks_is_caught(measure_study, judge_claim):
    leaky = {**C9.plays, "layer": "instance"}
    assert judge_claim(C9, leaky, measure_study(STUDY, SETTINGS)).verdict == Verdict.FAILS


@pytest.mark.parametrize("name", ["batch", "instance", "group", "layer"])
def test_the_jacobian_within_a_set_is_the_formula(name):
    """Off the diagonal −(1 + x̂_i x̂_j)/(mσ) inside a set, nothing between sets."""
    norm, shared = module._NORMS[name]
    x = torch.randn(module.N, module.T, module.C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(norm, x).reshape(x.numel(), x.numel())
    ids = shared(torch.arange(x.numel()).reshape(x.shape))
    expected = torch.zeros_like(jacobian)
    for index, values in zip(ids, shared(x), strict=True):
        sigma = (values.var(unbiased=False) + module.EPS).sqrt()
        hat = (values - values.mean()) / sigma
        m = len(values)
        inside = (torch.eye(m, dtype=torch.float64) - (1 + hat[:, None] * hat) / m) / sigma
        expected[index[:, None], index] = inside
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)


def test_the_picture_shows_the_future_of_one_position(measure_study, told):
    e = Evidence(measure_study(STUDY, SETTINGS), C9.plays, SETTINGS)
    (chart,) = C9.figures(e)
    rows = {s.label: s.y for s in chart.panels[0].series}
    middle = T // 2 - 1
    assert all(v > 0 for v in rows["batch"])
    assert [v > 0 for v in rows["layer"]] == [t == middle for t in range(T)]
    assert N > 1  # otherwise batch and instance norm would be the same
    assert "layer and RMS norm 0" in told(C9, e)
