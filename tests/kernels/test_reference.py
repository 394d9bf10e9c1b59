"""Parts of the formula that the public functions do not show on their own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.kernels.reference import apply_statistics, inverse_root, normalize
from normkit.spec import NormSpec
from rows import randn


@pytest.mark.parametrize("layout", ["contiguous", "strided", "single"])
def test_inverse_root_is_ieee_on_the_cpu(layout: str):
    """Every kind of positive float32, subnormals too, against NumPy's IEEE square root and division."""
    bits = torch.randint(1, 0x7F800000, (1_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    v = bits.view(torch.float32)
    v = {"contiguous": v, "strided": v[::3], "single": v[:999].view(-1, 1)}[layout]
    assert np.array_equal(inverse_root(v).numpy(), 1 / np.sqrt(v.numpy()))


def test_inverse_root_is_ieee_in_float64():
    v = randn(100_000, dtype=torch.float64).exp2() * randn(100_000, seed=1, dtype=torch.float64).square()
    assert np.array_equal(inverse_root(v).numpy(), 1 / np.sqrt(v.numpy()))


def run(spec: NormSpec, x: Tensor, eps: float, **rest: Tensor) -> Tensor:
    return normalize(x, spec, None, None, axes=(1,), eps=eps, **rest)


def test_each_axis_of_the_spec_is_its_formula():
    x = randn(16, 33, dtype=torch.float64)
    mean, eps = x.mean(-1, keepdim=True), 0.3
    d = x - mean
    cases = {
        NormSpec(weight="none"): x / (x.square().mean(-1, keepdim=True) + eps).sqrt(),
        NormSpec(weight="none", centered=True): d / (d.square().mean(-1, keepdim=True) + eps).sqrt(),
        NormSpec(weight="none", statistic="sum"): x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        NormSpec(weight="none", statistic="unbiased"): x / (x.var(-1, keepdim=True) + eps).sqrt(),
        NormSpec(weight="none", statistic="unbiased", centered=True): d / (x.var(-1, keepdim=True) + eps).sqrt(),
        NormSpec(weight="none", eps="outside"): x / (x.square().mean(-1, keepdim=True).sqrt() + eps),
        NormSpec(weight="none", eps="outside", centered=True): d / (x.std(-1, keepdim=True, correction=0) + eps),
        NormSpec(weight="none", statistic="sum", eps="max"): x / x.norm(dim=-1, keepdim=True).clamp(min=eps),
    }
    for spec, expected in cases.items():
        roots = ["reciprocal", "divide"] + ["power"] * (spec.eps == "inside")
        for root in roots:
            got = run(replace(spec, root=root), x, eps)
            torch.testing.assert_close(got, expected, rtol=64 * torch.finfo(torch.float64).eps, atol=1e-15)
    values = list(cases.values())
    assert all(not torch.allclose(a, b, rtol=1e-4) for i, a in enumerate(values) for b in values[i + 1 : 7])


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-30, 2.0**30, 2.0**60, 2.0**100])
@pytest.mark.parametrize("eps_place", ["inside", "outside"])
@pytest.mark.parametrize("root", ["reciprocal", "divide"])
@pytest.mark.parametrize("centered", [False, True])
def test_a_row_and_epsilon_scaled_together_keep_every_bit(factor: float, eps_place: str, root: str, centered: bool):
    spec = NormSpec(weight="none", eps=eps_place, root=root, centered=centered)  # type: ignore[arg-type]
    x, eps = randn(8, 65), 2.0**-8
    scaled = eps * factor**2 if eps_place == "inside" else eps * factor
    assert torch.equal(run(spec, x * factor, scaled), run(spec, x, eps))


def test_a_rounded_root_survives_rescaling():
    spec = nk.ROUNDED_ROOT_RMS
    x = randn(8, 64, dtype=torch.bfloat16)
    assert torch.equal(run(spec, x * 2.0**40, 0.0), run(spec, x, 0.0))


@pytest.mark.parametrize("spec", [nk.SCALE_NORM, NormSpec(eps="outside"), NormSpec(eps="outside", centered=True)])
def test_zero_rows_are_zero_with_the_gradient_of_the_epsilon_branch(spec: NormSpec):
    x = torch.zeros(2, 4, requires_grad=True)
    y = run(spec, x, 0.5)
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 0, 0, 0]] * 2))
    assert not y.any()
    expected = [2.0, 0, 0, 0] if not spec.centered else [1.5, -0.5, -0.5, -0.5]
    assert dx[0].tolist() == expected


@pytest.mark.parametrize(
    "spec", [nk.TORCH_LAYER_NORM, nk.TORCH_RMS_NORM, nk.L2_NORM, nk.SCALE_NORM, NormSpec(eps="outside"), nk.DEBERTA]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_spoils_its_row_and_no_other(spec: NormSpec, bad: float):
    x = randn(3, 8)
    clean = run(spec, x, 1e-6)
    x[1, 2] = bad
    y = run(spec, x, 1e-6)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert y[1, 2].isnan()
    if math.isnan(bad):
        assert y[1].isnan().all()


def test_float16_values_gated_out_of_float32s_squares():
    x, gate = randn(2, 8, dtype=torch.float16), torch.full((2, 8), 1e25)
    spec = replace(nk.GATED_RMS, gate="before")
    torch.testing.assert_close(run(spec, x, 0.0, gate=gate), run(nk.TORCH_RMS_NORM, x, 0.0), rtol=1e-3, atol=0)


def test_what_is_masked_out_reaches_nothing():
    x = randn(3, 8)
    mask = torch.tensor([[True], [True], [False]]).expand(3, 8).clone()
    mask[0, 5:] = False
    filled = torch.where(mask, x, math.nan)
    y = run(nk.TORCH_LAYER_NORM, filled, 1e-5, mask=mask)
    expected = torch.nn.functional.layer_norm(x[0, :5], (5,), eps=1e-5)
    torch.testing.assert_close(y[0, :5], expected)
    assert not y[~mask].any()


def test_the_result_is_never_the_input_itself():
    x = torch.zeros(0, 4)
    assert run(nk.WEIGHTLESS_RMS, x, 1e-6) is not x


def test_given_statistics():
    x, mean, var = randn(4, 6), randn(6, seed=1), randn(6, seed=2).square()
    w, b = randn(6, seed=3), randn(6, seed=4)
    y = apply_statistics(x.bfloat16(), mean, var, w, b, eps=0.1)
    expected = ((x.bfloat16().double() - mean) / (var.double() + 0.1).sqrt() * w + b).bfloat16()
    assert y.dtype == torch.bfloat16
    # One rounding to bfloat16, after float32 errors that can move a value across its boundary.
    assert ((y != expected).float().mean()) < 0.1
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-20)
