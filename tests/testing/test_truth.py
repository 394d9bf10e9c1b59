"""The kit's own arithmetic against published values, autograd and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import normkit as nk
from normkit.testing import truth
from normkit.testing.conformance import Error
from normkit.testing.inputs import adversarial, randn, written
from normkit.testing.ulp import ulp

LAYER, RMS = nk.TORCH_LAYER_NORM, nk.TORCH_RMS_NORM


def y(values: list[float], spec: nk.NormSpec, eps: float, dtype: torch.dtype = torch.float32) -> list[float]:
    return truth.forward(torch.tensor([values], dtype=dtype), spec, None, None, eps).exact[0].tolist()


def test_values_worked_out_elsewhere():
    assert y([40000.0, 40001.0, 40002.0, 40003.0], LAYER, 1e-5) == pytest.approx(
        [-1.341635, -0.447212, 0.447212, 1.341635], abs=1e-6
    )
    step = y([256.0] * 10239 + [255.0], LAYER, 1e-5)
    assert (step[-1], step[0]) == (pytest.approx(-96.373, abs=1e-3), pytest.approx(0.0094124, abs=1e-7))
    assert y([1e-3] * 4, RMS, 1e-6)[0] == pytest.approx(0.707107, abs=1e-6)
    assert y([1e-3] * 4, RMS, 1e-5)[0] == pytest.approx(0.301511, abs=1e-6)


@pytest.mark.parametrize(
    ("spec", "right"),
    [(nk.LLAMA, [0.19628906, 0.59375, 0.98828125, 1.3828125]), (nk.OLMO2, [0.19726562, 0.58984375, 0.984375, 1.375])],
)
def test_the_two_cast_orders_leave_one_right_answer_each(spec: nk.NormSpec, right: list[float]):
    x, w = torch.tensor([[1.0, 3.0, 5.0, 7.0]]).bfloat16(), torch.full((4,), 0.90234375).bfloat16()
    found = truth.forward(x, spec, w, None, 1e-6)
    assert found.low.tolist() == found.high.tolist() == [pytest.approx(right, abs=1e-8)]


@pytest.mark.parametrize(
    "spec",
    [
        LAYER,
        RMS,
        nk.GEMMA,
        nk.L2_NORM,
        nk.SCALE_NORM,
        nk.NormSpec(statistic="unbiased"),
        nk.NormSpec(eps="outside"),
        nk.NormSpec(centered=True, statistic="unbiased", eps="outside"),
    ],
    ids=lambda spec: spec.code,
)
def test_exact_gradients_are_those_of_the_plain_formula(spec: nk.NormSpec):
    x, dy = randn(5, 9, dtype=torch.float64), randn(5, 9, seed=1, dtype=torch.float64)
    w = randn(9, seed=2, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = truth.plain(leaves[0], spec, leaves[1], None, 0.1)
    dx, dw = torch.autograd.grad(out, leaves, dy)
    found = truth.backward(x, spec, w, 0.1, dy)
    torch.testing.assert_close(truth.forward(x, spec, w, None, 0.1).exact, out.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.dx.exact, dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.dw.exact.sum(0), dw, rtol=1e-12, atol=1e-13)


def test_a_large_mean_is_allowed_only_what_the_corrected_two_pass_leaves():
    row = adversarial(4096)["1e4 ± .005"].float()
    careful = truth.statistics(row, LAYER, 1e-5).error.max()
    plain = truth.statistics(row, LAYER, 1e-5, corrected=False).error.max()
    assert float(careful) < 0.05
    assert float(plain) > 10 * float(careful)
    torchs = torch.nn.functional.layer_norm(row, (4096,), eps=1e-5)
    right = truth.forward(row, LAYER, None, None, 1e-5)
    assert bool(right.wrong(torchs).any())
    assert not bool(right.wrong(nk.layer_norm(row, eps=1e-5)).any())


def test_one_bit_off_in_a_half_type_is_wrong():
    x = randn(4, 64, dtype=torch.bfloat16)
    right = truth.forward(x, RMS, None, None, 1e-6)
    got = nk.rms_norm(x)
    assert not bool(right.wrong(got).any())
    moved = torch.nextafter(got, torch.full_like(got, torch.inf))
    assert float(right.wrong(moved).double().mean()) > 0.98
    assert bool(right.wrong(torch.full_like(got, torch.nan)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype):
    for value in (1.0, 1.5, 3.0, 0.1, 1000.0):
        t = torch.tensor(value, dtype=dtype)
        following = torch.nextafter(t, torch.tensor(torch.inf, dtype=dtype))
        step = Fraction(float(following)) - Fraction(float(t))
        assert Fraction(float(ulp(t.double(), dtype))) == step
        assert Error.of(following, t.double(), t.double()) == Error(1.0, 1.0)
    tiny = torch.tensor(0.0, dtype=dtype)
    assert float(ulp(tiny.double(), dtype)) == truth.spacing(dtype)


def test_a_wrong_infinity_counts_as_infinite_and_a_right_one_as_none():
    exact, size = torch.tensor([1e6, 1.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert Error.of(torch.tensor([torch.inf, 1.0], dtype=torch.float16), exact, size).largest == 0
    assert Error.of(torch.tensor([torch.inf, torch.inf], dtype=torch.float16), exact, size).largest == torch.inf


@pytest.mark.parametrize(
    "t",
    [
        torch.tensor([[1.0, float("nan"), -float("inf")]]),
        torch.full((2, 40), 0.1, dtype=torch.float16),
        torch.tensor([[256.0] * 30 + [255.0]]),
        torch.tensor([[1e-45, -1e-45] * 9]),
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        randn(3, 5, dtype=torch.bfloat16),
        randn(7, dtype=torch.float64),
    ],
)
def test_what_is_written_reads_as_the_same_tensor(t: torch.Tensor):
    again = eval(written(t), {"torch": torch})
    assert again.dtype == t.dtype
    assert torch.equal(again.isnan(), t.isnan())
    assert torch.equal(again.nan_to_num(), t.nan_to_num())
