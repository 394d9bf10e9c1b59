"""No rows, or rows of no elements: an empty result under every backend, and gradients of nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import FLOATS, randn

SHAPES = [(0, 8), (3, 0), (2, 0, 8), (0,), (0, 0)]
ONE: dict[str, Callable[..., Tensor]] = {
    "layer": lambda x, w: nk.layer_norm(x, w, w),
    "rms": nk.rms_norm,
    "llama": lambda x, w: nk.rms_norm(x, w, spec=nk.LLAMA),
    "l2": lambda x, w: nk.l2_norm(x) * w,
    "scale": lambda x, w: nk.scale_norm(x, w.sum()),
    "gemma": lambda x, w: nk.normalize(x, nk.GEMMA, w, eps=1e-6),
    "add rms": lambda x, w: sum(nk.add_rms_norm(x, x, w)),
    "add layer": lambda x, w: sum(nk.add_layer_norm(x, x, w, w)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("name", ONE)
def test_nothing_comes_of_nothing(name: str, backend: str, dtype: torch.dtype):
    for shape in SHAPES:
        x, w = torch.empty(shape, dtype=dtype), randn(shape[-1], dtype=dtype)
        with nk.use(backend):
            plain = ONE[name](x, w)
            x.requires_grad_()
            w.requires_grad_()
            y = ONE[name](x, w)
            dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert plain.shape == y.shape == dx.shape == shape
        assert plain.dtype == y.dtype == dx.dtype == dw.dtype == dtype
        assert dw.shape == w.shape
        assert not dw.any()


@pytest.mark.parametrize("module", [nk.RMSNorm, nk.LayerNorm])
def test_a_module_meets_no_rows(module: type[torch.nn.Module]):
    norm = module(8)
    with nk.use("cpu"):
        norm(torch.empty(0, 8)).sum().backward()
    for p in norm.parameters():
        assert p.grad is not None
        assert not p.grad.any()


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_a_given_output_and_rows_across_axes(backend: str):
    with nk.use(backend):
        for shape, axis in (((0, 4, 6), (1, 2)), ((4, 0, 6), (0,)), ((4, 0), (0,)), ((4, 6, 0), (0, 1))):
            x = torch.empty(shape)
            out = torch.empty(shape)
            assert nk.rms_norm(x, axis=axis, out=out) is out
            assert nk.layer_norm(x, axis=axis).shape == shape


def test_what_is_wrong_is_said_of_an_empty_x_too():
    with nk.use("cpu"), pytest.raises((TypeError, ValueError)):
        nk.rms_norm(torch.empty(0, 8), torch.ones(7))
    with nk.use("cpu"), pytest.raises(TypeError):
        nk.rms_norm(torch.empty(0, 8, dtype=torch.int64))
