"""DyT and Derf: values, gradients, dtypes, words."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, vmap

import normkit as nk
from rows import FLOATS, randn, unit

ALPHA, SHIFT = torch.tensor(0.7), torch.tensor(0.2)


def dyt(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return nk.dyt(x, ALPHA, w, b)


def derf(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return nk.derf(x, ALPHA, SHIFT, w, b)


TRUE: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    dyt: lambda x: torch.tanh(ALPHA.double() * x),
    derf: lambda x: torch.erf(ALPHA.double() * x + SHIFT.double()),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("f", TRUE)
def test_values_against_float64(f: Callable[..., Tensor], dtype: torch.dtype):
    """α·x (+ s) is off by 2u of itself, f' ≤ 1.13 carries that on; tanh and erf add 4u, weight and bias u each."""
    x, w, b = 3 * randn(50, 16, dtype=dtype), randn(16, seed=1), randn(16, seed=2)
    wide = TRUE[f](x.double())
    expected = wide * w + b
    u = unit(torch.float32)
    inner = 1.2 * 3 * u * (0.7 * x.double().abs() + 0.2)
    bound = w.abs() * (inner + 5 * u * wide.abs()) + 2 * u * expected.abs() + 2 * u * b.abs()
    bound += unit(dtype) * expected.abs() + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    y = f(x, w, b)
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("f", TRUE)
def test_saturation_zero_and_missing_parameters(f: Callable[..., Tensor]):
    x = torch.tensor([float("-inf"), -1e30, 0.0, 1e30, float("inf"), float("nan")])
    y = f(x)
    assert y[[0, 1, 3, 4]].tolist() == [-1, -1, 1, 1]
    assert y[2] == (0 if f is dyt else torch.erf(SHIFT))
    assert y[5].isnan()
    z = randn(4, 8)
    assert torch.equal(f(z), f(z, torch.ones(8), torch.zeros(8)))
    assert f(torch.tensor(1.0)).shape == ()
    assert f(torch.zeros(0, 8), torch.ones(8)).shape == (0, 8)


@pytest.mark.parametrize("alpha", [torch.tensor(0.7), torch.tensor([0.7]), torch.tensor(0.7).bfloat16().float()])
def test_alpha_of_either_shape(alpha: Tensor):
    x = randn(4, 8)
    torch.testing.assert_close(nk.dyt(x, alpha), torch.tanh(alpha * x))
    assert nk.dyt(x.bfloat16(), alpha).dtype == torch.bfloat16  # a float32 α does not promote


def test_gradients_and_transforms():
    x, w, b = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate([(3, 4), (4,), (4,)]))
    a, s = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 0.2))
    assert gradcheck(nk.dyt, (x, a, w, b), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(nk.dyt, (x, a, w, b))
    assert gradcheck(nk.derf, (x, a, s, w, b), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(nk.derf, (x, a, s, w, b))
    row = x[0].detach()
    torch.testing.assert_close(
        hessian(lambda t: nk.dyt(t, a.detach()).sum())(row), hessian(lambda t: torch.tanh(a.detach() * t).sum())(row)
    )
    alphas = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(vmap(nk.dyt)(x, alphas), torch.tanh(alphas[:, None] * x))


def test_half_gradients_of_float32_parameters():
    x, a, w = randn(4, 8, dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True), randn(8).requires_grad_()
    nk.dyt(x, a, w).sum().backward()
    assert (a.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(w.grad, torch.tanh(0.5 * x.float()).sum(0))


@pytest.mark.parametrize("f", TRUE)
def test_bad_input_in_words(f: Callable[..., Tensor]):
    name = f.__name__
    x = randn(2, 4)
    for error, message, call in [
        (TypeError, f"{name}: x must be float16.*int64", lambda: f(x.long())),
        (TypeError, f"{name}: weight must be.*int64", lambda: f(x, torch.ones(4, dtype=torch.int64))),
        (ValueError, f"{name}: weight of shape", lambda: f(x, torch.ones(3))),
        (ValueError, f"{name}: bias of shape", lambda: f(x, None, torch.ones(3))),
    ]:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(TypeError, match=r"dyt: alpha must be a torch\.Tensor, got float"):
        nk.dyt(x, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dyt: alpha of shape \(3,\)"):
        nk.dyt(x, torch.ones(3))
    before = x.clone()
    f(x).zero_()
    assert torch.equal(x, before)
