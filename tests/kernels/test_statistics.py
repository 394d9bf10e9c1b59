"""The corrected two-pass, rescaling and the moments' exactness."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

from normkit.kernels.statistics import Count, accumulation_dtype, center, moments_of, rescaled_epsilon, rescaling
from rows import randn


def test_accumulation_dtype():
    assert [accumulation_dtype(d) for d in (torch.float16, torch.bfloat16, torch.float32)] == [torch.float32] * 3
    assert accumulation_dtype(torch.float64) == torch.float64


def test_center_keeps_apart_what_rounding_left_in_the_mean():
    """On 1e4 ± .005 the remainder is as large as the deviations; d − δ is right to 1e-6 of them, d alone is not."""
    x = 1e4 + 0.005 * randn(64, 1000)
    true = x.double() - x.double().mean(-1, keepdim=True)
    mean, d, remainder = center(x, (1,), Count.of(x, (1,), None))
    assert (d - remainder - true).abs().max() < 1e-6 * true.std()
    assert (d - true).abs().max() > 1e-3 * true.std()
    folded = x - (mean + remainder)
    assert (folded - true).abs().max() > 1e-3 * true.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rescaling_leaves_ordinary_rows_and_brings_extreme_ones_back(dtype: torch.dtype):
    info = torch.finfo(dtype)
    peaks = torch.tensor(
        [1.0, 1e-4, 6e4, 0.0, math.inf, math.nan, info.max, info.tiny, info.tiny * info.eps], dtype=dtype
    )
    x = torch.stack([peaks, -peaks / 3], -1)
    scale = rescaling(x, (1,), 0.0).squeeze(1)
    assert scale[:6].tolist() == [1.0] * 6
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()  # powers of two round nothing
    scaled = (peaks * scale)[6:8]
    assert (scaled > 2.0**-16).all()
    assert (scaled < (2.0**16 if dtype == torch.float32 else 2.0**128)).all()
    assert (peaks * scale)[8] > 2.0**-60  # the smallest subnormal: its square is representable now


def test_rescaling_counts_epsilon_as_an_element():
    x = torch.full((1, 4), 1e-30)
    assert rescaling(x, (1,), 1e-3).item() == 1.0
    assert rescaling(x, (1,), 1e-10).item() == 2.0**34
    assert rescaling(torch.zeros(1, 4), (1,), 1e20).item() < 2.0**-50


def test_rescaled_epsilon_is_exact_where_epsilon_is_representable():
    scale = torch.tensor([2.0**20, 1.0, 2.0**-20])
    assert torch.equal(rescaled_epsilon(1e-12, scale), torch.tensor(1e-12) * scale**2)
    assert rescaled_epsilon(0.0, scale).tolist() == [0.0] * 3
    tiny = rescaled_epsilon(1e-50, torch.tensor([2.0**83])).double()  # 1e-50 itself is 0 in float32
    assert abs(tiny.item() / (1e-50 * 2.0**166) - 1) < 4 * torch.finfo(torch.float32).eps


def test_rescaling_is_a_constant_to_every_transform():
    x = randn(3, 4) * 1e20

    def f(row: Tensor) -> Tensor:
        return rescaling(row, (0,), 0.0)

    assert torch.equal(vmap(f)(x), rescaling(x, (1,), 0.0))
    _, tangent = jvp(lambda t: t * rescaling(t, (1,), 0.0), (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, rescaling(x, (1,), 0.0).expand_as(x))
    leaf = x.clone().requires_grad_()
    assert not rescaling(leaf, (1,), 0.0).requires_grad


def test_count_with_and_without_a_mask():
    x = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 6.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert Count.of(x, (1,), None).value == 3
    count = Count.of(x, (1,), mask)
    assert isinstance(count.value, Tensor)
    assert count.value.flatten().tolist() == [2, 2]
    assert count.mean(x, (1,)).flatten().tolist() == [1.5, 5.0]
    assert count.drop(x).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 6.0]]
    empty = Count.of(x, (1,), torch.zeros_like(mask))
    assert empty.mean(x, (1,)).flatten().tolist() == [0.0, 0.0]


def test_unbiased_divides_by_one_less():
    x = randn(3, 5)
    square = x.var(-1, correction=0)
    torch.testing.assert_close(Count(None, 5).unbiased(square), x.var(-1))
    assert Count(None, 1).unbiased(torch.zeros(2)).isnan().all()


@pytest.mark.parametrize("chunks", [1, 2, 5, 100])
def test_moments_merge_to_those_of_the_whole(chunks: int):
    x = 1e4 + 0.005 * randn(1000)
    parts = [moments_of(part, (0,), None) for part in x.chunk(chunks)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    true = x.double()
    mean = merged.mean.double() + merged.remainder.double()
    # The mean's own float32 spacing is 1e-3 here; with the remainder it is right to 1e-6 of a deviation of .005.
    assert abs(mean - true.mean()) < 5e-8 * 1.0
    assert abs(merged.variance().double() / true.var(correction=0) - 1) < 1e-5
    assert abs(merged.variance(unbiased=True).double() / true.var() - 1) < 1e-5
    assert merged.count.item() == 1000


def test_moments_carry_the_means_gradient():
    x = randn(6).requires_grad_()
    m = moments_of(x, (0,), None)
    (m.mean + m.remainder).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.full((6,), 1 / 6))
    x.grad = None
    m.m2.backward()
    torch.testing.assert_close(x.grad, 2 * (x - x.mean()).detach())
