"""Moments: exact where the textbook form is not, mergeable, differentiable."""

from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

import normkit as nk
from exact import unit

U = unit(torch.float32)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _mean(m: nk.Moments) -> Tensor:
    return m.mean.double() + m.remainder.double()


def _close_to_whole(m: nk.Moments, x: Tensor, merges: int = 0) -> None:
    """Hold m against float64.

    δ = mean(d) errs by n·u·mean|d|, where |d| ≤ σ + |δ|; a merge adds at most 8 roundings of the step, and the step is
    at most σ because the smaller set makes it.
    """
    wide = x.double()
    n, sigma = wide.numel(), wide.std(unbiased=False)
    slack = (n + 8 * merges) * U
    assert int(m.count) == n
    # The mean of the float64 reference itself errs by n·2^-53 of |x|.
    reference = n * 2.0**-53 * wide.abs().mean()
    reach = sigma + m.remainder.double().abs() + m.mean.double().abs() * 2 * U
    assert (_mean(m) - wide.mean()).abs() <= slack * reach + reference
    square = n * reach**2
    assert (m.m2.double() - ((wide - wide.mean()) ** 2).sum()).abs() <= 2 * (slack + 8 * U) * square


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, -1e6])
@pytest.mark.parametrize("cuts", [(500,), (1, 2, 3), (999,), (10, 500, 510)])
def test_merging_is_as_good_as_seeing_everything(offset: float, cuts: Sequence[int]) -> None:
    x = _random(1000) + offset
    parts = torch.tensor_split(x, list(cuts))
    _close_to_whole(nk.moments(x, axes=0), x)
    for order in (parts, parts[::-1]):
        merged = reduce(lambda a, b: a.merge(b), [nk.moments(p, axes=0) for p in order])
        _close_to_whole(merged, x, merges=len(parts) - 1)


@pytest.mark.parametrize("far", [100.0, 1e4])
def test_a_small_set_far_from_a_large_one(far: float) -> None:
    few, many = _random(3, seed=1) + far, _random(5000, seed=2)
    whole = torch.cat([few, many])
    a, b = nk.moments(few, axes=0), nk.moments(many, axes=0)
    _close_to_whole(a.merge(b), whole, merges=1)
    _close_to_whole(b.merge(a), whole, merges=1)


def test_the_remainder_holds_what_float32_cannot() -> None:
    x = _random(1000) * 0.005 + 1e4
    m = nk.moments(x, axes=0)
    error = (_mean(m) - x.double().mean()).abs()
    assert error < (m.mean.double() - x.double().mean()).abs() / 50
    # E[x²] − E[x]² in float32 would be off by 1e8·u, five orders above the variance itself.
    assert abs(float(m.variance()) / float(x.double().var(unbiased=False)) - 1) < 1e-4


def test_an_empty_side_changes_no_bit() -> None:
    x = _random(50) + 1e4
    m, nothing = nk.moments(x, axes=0), nk.moments(x[:0], axes=0)
    assert (int(nothing.count), float(nothing.mean), float(nothing.m2)) == (0, 0.0, 0.0)
    for merged in (m.merge(nothing), nothing.merge(m)):
        for field in ("count", "mean", "m2", "remainder"):
            assert torch.equal(getattr(merged, field), getattr(m, field)), field
    both = nothing.merge(nothing)
    assert (int(both.count), float(both.mean), float(both.m2)) == (0, 0.0, 0.0)
    assert both.variance().isnan()


def test_uneven_counts_weigh_elements_not_sets() -> None:
    a, b = nk.moments(torch.zeros(2), axes=0), nk.moments(torch.full((6,), 4.0), axes=0)
    merged = a.merge(b)
    assert (float(merged.mean), float(merged.variance())) == (3.0, 3.0)
    assert float(merged.variance(unbiased=True)) == pytest.approx(24 / 7, rel=2 * U)


def test_merging_elementwise_takes_each_statistics_own_counts() -> None:
    x = _random(4, 6, 3)
    mask = torch.rand(4, 6, 1, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0] = False
    a = nk.moments(x, axes=1, mask=mask)
    b = nk.moments(x, axes=1, mask=~mask)
    merged, whole = a.merge(b), nk.moments(x, axes=1)
    assert torch.equal(merged.count, whole.count)
    assert (_mean(merged) - _mean(whole)).abs().max() < 24 * U * 3  # |x| ≤ 3: 6 elements, two paths, 12 roundings each
    assert (merged.m2 - whole.m2).abs().max() < 48 * U * whole.m2.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_statistics(dtype: torch.dtype) -> None:
    x = _random(8, 3).to(dtype)
    m = nk.moments(x, axes=0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (m.count.dtype, m.mean.dtype, m.m2.dtype, m.remainder.dtype) == (torch.int64, wide, wide, wide)
    up = nk.moments(x.to(wide), axes=0)
    assert torch.equal(m.mean, up.mean)
    assert torch.equal(m.m2, up.m2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7.0])
def test_masked_values_reach_nothing(bad: float) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0] + [bad] * 5).requires_grad_()
    m = nk.moments(x, axes=0, mask=torch.arange(10) < 5)
    assert (int(m.count), float(m.mean), float(m.variance().detach())) == (5, 3.0, 2.0)
    (m.m2 + m.remainder).backward()
    assert x.grad is not None
    assert torch.equal(x.grad[5:], torch.zeros(5))
    assert torch.equal(x.grad[:5], torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0]) + 0.2)


def test_gradients_flow_through_remainder_and_m2_alone() -> None:
    x = (_random(9, dtype=torch.float64) + 3).requires_grad_()
    m = nk.moments(x, axes=0)
    assert not m.mean.requires_grad
    (dmean,) = torch.autograd.grad(m.mean + m.remainder, x, retain_graph=True)
    (dm2,) = torch.autograd.grad(m.m2, x)
    assert (dmean - 1 / 9).abs().max() < 1e-15
    assert (dm2 - 2 * (x - x.mean())).abs().max() < 1e-13


def test_gradients_flow_through_a_merge() -> None:
    x = (_random(9, dtype=torch.float64) + 3).requires_grad_()
    for cut in (2, 7):
        m = nk.moments(x[:cut], axes=0).merge(nk.moments(x[cut:], axes=0))
        assert not m.mean.requires_grad
        (dmean,) = torch.autograd.grad(m.mean + m.remainder, x, retain_graph=True)
        (dvar,) = torch.autograd.grad(m.variance(unbiased=True), x)
        assert (dmean - 1 / 9).abs().max() < 1e-15
        assert (dvar - 2 * (x - x.mean()) / 8).abs().max() < 1e-13


def test_axes_and_shapes() -> None:
    x = _random(2, 3, 4)
    assert nk.moments(x, axes=(0, -1)).mean.shape == (3,)
    assert nk.moments(x, axes=1, mask=torch.tensor([True, False, True]).unsqueeze(1)).count.shape == (2, 4)
    with pytest.raises(ValueError, match="out of range"):
        nk.moments(x, axes=3)
    with pytest.raises(ValueError, match="does not broadcast"):
        nk.moments(x, axes=0, mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not broadcast"):
        nk.moments(x, axes=0, mask=torch.ones(9, 2, 3, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="bool"):
        nk.moments(x, axes=0, mask=torch.ones(2, 3, 4))
    with pytest.raises(TypeError, match="int64"):
        nk.moments(torch.arange(3), axes=0)


@pytest.mark.parametrize("axes", [(0, 1), (1,), (0, 2), (2,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_and_the_reference_agree(axes: tuple[int, ...], masked: bool) -> None:
    x = _random(3, 70, 5) + 100
    shape = [1 if a not in axes and a != 0 else n for a, n in enumerate(x.shape)]
    mask = _random(*shape, seed=1) < 0.5 if masked and 0 in axes else None
    with nk.use("reference"):
        want = nk.moments(x, axes=axes, mask=mask)
    got = nk.moments(x, axes=axes, mask=mask)
    assert got.count.shape == want.count.shape
    assert torch.equal(got.count, want.count)
    # Each sums at most 1050 values, no term through more than 128 additions: twice that bound lies between them.
    sigma = (want.m2 / want.count.clamp(min=1)).sqrt()
    assert ((_mean(got) - _mean(want)).abs() <= 2 * 132 * U * (sigma + 100 * 132 * U)).all()
    assert ((got.m2 - want.m2).abs() <= 4 * 132 * U * want.m2).all()


def test_which_moments_the_kernels_compute() -> None:
    x = _random(3, 70, 5)
    with nk.use("cpu"):
        for axes in [(0, 1), (1,), (0, 1, 2)]:
            nk.moments(x, axes=axes)
        nk.moments(x[:, 0], axes=1)
        nk.moments(x[:, 0], axes=0)
        for call, why in [
            (lambda: nk.moments(x, axes=0), "keep one axis"),
            (lambda: nk.moments(x, axes=(0, 1), mask=x > 0), "mask differs"),
            (lambda: nk.moments(x.clone().requires_grad_(), axes=(0, 1)), "gradient"),
            (lambda: nk.moments(x.double(), axes=(0, 1)), "float64"),
        ]:
            with pytest.raises(ValueError, match=why):
                call()
