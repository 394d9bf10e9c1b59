"""The quick way, for contiguous rows, is the long way with fewer questions: the same bits, the same refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import randn

SHAPES = [(1, 37), (3, 5, 768), (300, 1000)]  # the last is worth two threads and several partials
HALF = torch.bfloat16


def parameters(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", [nk.layer_norm, nk.rms_norm])
def test_rows_and_their_gradients(norm, shape: tuple[int, ...], dtype: torch.dtype):
    x, dy = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=3)
    w, b = parameters(shape[-1], dtype)

    def everything() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, w, b)]
        y = norm(*inputs, eps=1e-5)
        out = torch.full_like(x, float("nan"))
        norm(x, w, b, eps=1e-5, out=out)
        over = x.clone()
        norm(over, w, b, eps=1e-5, out=over)
        return [y, norm(x, w, b, eps=1e-5), out, over, *torch.autograd.grad(y, inputs, dy)]

    quick = everything()
    with nk.use("cpu"):  # asked for by name: the long way
        long = everything()
    assert all(map(torch.equal, quick, long))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", [nk.add_layer_norm, nk.add_rms_norm])
def test_residual_sums_and_their_gradients(norm, shape: tuple[int, ...], dtype: torch.dtype):
    x, r = randn(*shape, dtype=dtype), randn(*shape, seed=4)
    w, b = parameters(shape[-1], dtype)
    dy, ds = randn(*shape, dtype=dtype, seed=3), randn(*shape, seed=5)

    def everything() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, r, w, b)]
        y, s = norm(*inputs, alpha=0.5, branch_scale=3.0, eps=1e-5)
        plain = norm(x, r, w, b, alpha=0.5, branch_scale=3.0, eps=1e-5)
        return [y, s, *plain, *torch.autograd.grad((y, s), inputs, (dy, ds))]

    quick = everything()
    with nk.use("cpu"):
        long = everything()
    assert all(map(torch.equal, quick, long))


def test_what_the_quick_way_may_not_write_the_long_way_refuses_or_copies():
    x, w = randn(4, 16), randn(16, seed=1)
    shared = torch.zeros(5, 16)
    shared[:4] = x
    expected = nk.rms_norm(x, w)
    nk.rms_norm(shared[:4], w, out=shared[1:])  # rows that are read after they were written
    assert torch.equal(shared[1:], expected)
    bundle = torch.cat([w, torch.zeros(48)]).view(4, 16)
    nk.rms_norm(x, bundle[0], out=bundle)  # the weight lies in the output
    assert torch.equal(bundle, expected)
    with pytest.raises(ValueError, match="out must be"):
        nk.rms_norm(x, w, out=torch.empty(4, 16, dtype=HALF))
    with pytest.raises(ValueError, match="cannot record a gradient"):
        nk.rms_norm(x, w, out=torch.empty(4, 16, requires_grad=True))
    with pytest.raises(ValueError, match="cannot record a gradient"):
        nk.rms_norm(x, w.clone().requires_grad_(), out=torch.empty(4, 16))


def test_a_backward_notices_that_out_was_written():
    x, a = randn(4, 16), randn(4, 16, seed=1).requires_grad_()
    y = torch.zeros(4, 16)
    product = a * y
    with torch.no_grad():
        nk.rms_norm(x, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("kind", [nk.LayerNorm, nk.RMSNorm])
def test_modules_take_it_and_still_check_the_width(kind):
    norm = kind(16)
    with pytest.raises(ValueError, match="built for width 16"):
        norm(randn(4, 8))
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    with torch.no_grad():
        norm.parametrizations.weight.original.copy_(randn(16, seed=1))
    x = randn(4, 16)
    expected = kind(16)
    with torch.no_grad():
        expected.weight.copy_(2 * randn(16, seed=1))
    assert torch.equal(norm(x), expected(x))


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", [nk.LayerNorm, nk.RMSNorm])
def test_what_a_module_remembers_ends_when_its_parameters_change(kind):
    x = randn(3, 16)
    norm, function = kind(16), nk.layer_norm if kind is nk.LayerNorm else nk.rms_norm

    def check() -> None:
        for _ in range(2):
            with nk.use("cpu"):
                expected = function(x, norm.weight, norm.bias, eps=norm.eps)
            y = norm(x)
            assert y.dtype == expected.dtype
            assert torch.equal(y, expected)

    with torch.no_grad():
        norm(x)
        assert norm._known is not None
        norm.weight.copy_(randn(16, seed=1))  # in place: nothing to forget
        check()
        norm.weight.data = randn(16, seed=2)
        check()
        norm.weight.data = norm.weight.data.bfloat16()
        check()
        norm.weight = torch.nn.Parameter(randn(16, seed=3))
        check()
        norm.eps = 0.5
        check()
        if norm.bias is not None:
            norm.bias.data = randn(16, seed=4)
            check()
        norm.weight.data = norm.weight.data[:8]  # the same memory, fewer elements
        with pytest.raises(ValueError, match="weight"):
            norm(x)


def test_what_a_module_remembers_stays_with_it():
    norm = nk.RMSNorm(16)
    x = randn(3, 16)
    with torch.no_grad():
        norm(x)
        for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            assert "_known" not in vars(copied)
            copied.weight.fill_(2.0)
            assert torch.equal(copied(x), 2 * norm(x))


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_dtype_of_the_caller_reaches_no_kernel(default: torch.dtype):
    """A partial of another dtype would be read, and written past its end, as float32."""
    inputs = [t.requires_grad_() for t in (randn(70, 40), randn(70, 40, seed=1), randn(40, seed=2), randn(40, seed=3))]
    x, residual, w, b = inputs
    dy = randn(70, 40, seed=4)

    def gradients() -> list[Tensor]:
        y, s = nk.add_layer_norm(x, residual, w, b, eps=1e-5)
        gated = nk.gated_rms_norm(x, residual, w, group_size=20)
        batch = nk.batch_norm(x.view(2, 35, 40), None, None, w, b, training=True).view_as(y)
        return list(torch.autograd.grad(nk.rms_norm(x, w, b, eps=1e-5) + y + s + gated + batch, inputs, dy))

    expected, before = gradients(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = gradients()
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, expected))
