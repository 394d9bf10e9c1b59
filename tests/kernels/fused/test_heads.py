"""Queries and keys as attention has them: slices of a joint projection, transposed, as their gradients are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import INTERPRETED, LONG
from rows import gradient_bounds, plain_norm, randn, true_norm

B, L, H, KV = 2, 3, 4, 2
SPECS = {"rms": nk.TORCH_RMS_NORM, "layer": nk.TORCH_LAYER_NORM}
BF, F = torch.bfloat16, torch.float32


def joint(d: int, dtype: torch.dtype = F, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return q (B, L, H, d) and k (B, L, KV, d), both views of one projection."""
    projected = randn(B, L, (H + 2 * KV) * d, seed=seed, dtype=dtype)
    q, k, _ = projected.split([H * d, KV * d, KV * d], -1)
    return q.unflatten(-1, (H, d)), k.unflatten(-1, (KV, d))


def upstream(like: Tensor, which: str) -> Tensor:
    """Return a gradient of ``like``'s shape that is laid out in one of the ways attention's backward leaves it."""
    heads, d = like.shape[-2:]
    if which == "transposed":
        return randn(B, heads, L, d, seed=9, dtype=like.dtype).transpose(1, 2)
    if which == "padded":
        return randn(B, L, heads, d + 5, seed=9, dtype=like.dtype)[..., 2 : d + 2]
    if which == "apart":
        return randn(B, L, heads, 2 * d, seed=9, dtype=like.dtype)[..., ::2]
    return randn(1, 1, 1, d, seed=9, dtype=like.dtype).expand(like.shape)


def run(x: Tensor, w: Tensor | None, dy: Tensor, spec: nk.NormSpec, axes: tuple[int, ...]) -> list[Tensor]:
    """Return y and the gradients of x and w."""
    leaves = [t.detach().requires_grad_() for t in (x, w) if t is not None]
    y = nk.normalize(leaves[0], spec, *leaves[1:], axes=axes, eps=1e-5)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def in_order(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("which", ["transposed", "padded", "apart", "expanded"])
@pytest.mark.parametrize(("d", "dtype"), [(1, F), (33, BF), (80, F), (127, F)])
@pytest.mark.parametrize("kind", SPECS)
def test_heads_lie_within_the_bound_and_have_the_bits_of_contiguous_ones(
    kind: str, d: int, dtype: torch.dtype, which: str
):
    spec, w = SPECS[kind], randn(d, seed=5, dtype=dtype)
    for x in joint(d, dtype):
        assert not x.is_contiguous()
        dy = upstream(x, which)
        y, dx, dw = run(x, w, dy, spec, (-1,))
        true_norm(x, w, eps=1e-5, centered=spec.centered).check(y)
        wide = [x.double().requires_grad_(), w.double().requires_grad_()]
        exact = torch.autograd.grad(plain_norm(*wide, centered=spec.centered), wide, dy.double())
        for got, e, limit in zip(
            (dx, dw), exact, gradient_bounds(x, w, dy, exact, spec.centered, [dtype, dtype]), strict=False
        ):
            assert ((got.double() - e).abs() <= limit).all()
        for got, expected in zip((y, dx, dw), run(in_order(x), w, in_order(dy), spec, (-1,)), strict=True):
            assert torch.equal(got, expected)
        turned = [x.transpose(1, 2), w, dy.transpose(1, 2)]  # (B, H, L, d), as attention takes them
        for got, expected in zip(run(*turned, spec, (-1,)), (y.transpose(1, 2), dx.transpose(1, 2), dw), strict=True):
            assert torch.equal(got, expected) or got.dim() == 1  # weights collect the rows in another order


@pytest.mark.parametrize("kind", SPECS)
def test_all_heads_in_one_statistic(kind: str):
    q, k = joint(33)
    for x in (q, k):
        w = randn(*x.shape[-2:], seed=5)
        dy = randn(B, L + 1, *x.shape[-2:], seed=9)[:, 1:]  # a row of it, as of x, lies in one piece
        strided = run(x, w, dy, SPECS[kind], (-2, -1))
        flat = run(in_order(x).flatten(-2), w.flatten(), in_order(dy).flatten(-2), SPECS[kind], (-1,))
        for got, expected in zip(strided, flat, strict=True):
            assert torch.equal(got.flatten(), expected.flatten())
        true_norm(x.flatten(-2), w.flatten(), eps=1e-5, centered=SPECS[kind].centered).check(strided[0].flatten(-2))


def test_the_module_and_a_weight_for_every_head():
    q, k = joint(24)
    module = nk.QKNorm(24, H, num_kv_heads=KV, per_head_weight=True)
    for p in module.parameters():
        p.requires_grad_(False).copy_(randn(*p.shape, seed=3))
    for got, x, norm in zip(module(q, k), (q, k), (module.q_norm, module.k_norm), strict=True):
        true_norm(x, norm.weight, eps=1e-6, centered=False).check(got)


@pytest.mark.skipif(not INTERPRETED, reason="asks what Triton was given")
@pytest.mark.parametrize("kind", SPECS)
def test_heads_and_their_gradients_are_read_where_they_lie(kind: str, monkeypatch: pytest.MonkeyPatch):
    """No launch sees a copy: kernels are handed the caller's addresses, and nothing is made contiguous."""
    from normkit.kernels.gpu.launch import Launcher

    given: list[set[int]] = []
    launch = Launcher.__call__
    interpreting = False

    def watched(self: Any, grid: Any, arguments: Any, device: Any) -> None:
        nonlocal interpreting
        given.append({t.data_ptr() for t in arguments if isinstance(t, Tensor)})
        interpreting = True  # the interpreter copies tensors for itself
        launch(self, grid, arguments, device)
        interpreting = False

    def forbidden(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert interpreting, "a copy"
            return method(*args, **options)

        return call

    x, w = joint(33)[0], randn(33, seed=5)
    leaf = x.detach().transpose(1, 2).requires_grad_()
    dy = upstream(x, "padded").transpose(1, 2)
    monkeypatch.setattr(Launcher, "__call__", watched)
    for name in ("contiguous", "clone"):
        monkeypatch.setattr(Tensor, name, forbidden(getattr(Tensor, name)))
    y = nk.normalize(leaf, SPECS[kind], w, eps=1e-5)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert {leaf.data_ptr(), y.data_ptr()} <= given[0]
    assert {leaf.data_ptr(), dy.data_ptr(), dx.data_ptr()} <= given[1]
    assert len(given) == 2


def test_no_heads_and_no_positions():
    for shape in ((2, 0, 4, 33), (0, 3, 4, 33), (2, 3, 0, 33)):
        leaf, w = torch.empty(shape).transpose(1, 2).requires_grad_(), randn(33).requires_grad_()
        y = nk.normalize(leaf, nk.TORCH_RMS_NORM, w, eps=1e-5)
        dx, dw = torch.autograd.grad(y, [leaf, w], torch.empty(y.shape))
        assert y.shape == dx.shape == leaf.shape
        assert torch.equal(dw, torch.zeros(33))


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=LONG)])
def test_more_rows_than_a_grid_axis_has_programs(backward: bool):
    count = 65537
    x = randn(count, 2, 5)[:, 1, 1:4]
    w, dy = randn(3, seed=1), randn(3, count, seed=2).t()
    true_norm(x, w, eps=1e-5, centered=True).check(nk.normalize(x, nk.TORCH_LAYER_NORM, w, eps=1e-5))
    if backward:
        strided = run(x, w, dy, nk.TORCH_LAYER_NORM, (-1,))
        for got, expected in zip(strided, run(in_order(x), w, in_order(dy), nk.TORCH_LAYER_NORM, (-1,)), strict=True):
            assert torch.equal(got, expected)
        assert math.prod(strided[1].shape) == 3 * count
