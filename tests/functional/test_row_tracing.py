"""Row norms under compile, export, autocast and inference mode."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import randn, true_norm

FUNCTIONS: dict[str, Callable[..., Tensor]] = {"layer": nk.layer_norm, "rms": nk.rms_norm}


class Norm(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[kind]

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.function(x, w, eps=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_compiled_with_dynamic_shapes(kind: str, backend: str):
    """One graph, values within the bound, extreme rows too, and gradients as eager's but for the order of sums."""
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[kind], fullgraph=True, dynamic=True, backend=backend)
    for rows, n in [(4, 64), (7, 33)]:
        x, w, dy = randn(rows, n), randn(n, seed=1), randn(rows, n, seed=2)
        x[1] *= 1e20
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = compiled(*leaves, eps=1e-5)
        true_norm(x, w, eps=1e-5, centered=kind == "layer").check(y.detach())
        got = torch.autograd.grad(y, leaves, dy)
        eager = torch.autograd.grad(FUNCTIONS[kind](*leaves, eps=1e-5), leaves, dy)
        for a, b in zip(got, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_exported_with_a_dynamic_batch(kind: str):
    x, w = randn(3, 8), randn(8, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export warns about torch's own internals
        program = torch.export.export(Norm(kind), (x, w), dynamic_shapes=({0: torch.export.Dim("rows")}, None))
    more = randn(11, 8, seed=2)
    got = program.module()(more, w)
    with nk.use("reference"):
        assert torch.equal(got, Norm(kind)(more, w))
    true_norm(more, w, eps=1e-5, centered=kind == "layer").check(got)
    names = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert names == {"aten"} or names <= {"aten", "_operator", "<built-in function getitem>"}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_autocast_does_not_move_the_dtype(kind: str):
    """The rule of faults B9 and B10: x's dtype decides, inside autocast as outside."""
    w = randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            x = randn(4, 8, dtype=dtype)
            y = FUNCTIONS[kind](x, w)
            assert y.dtype == dtype
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(y, FUNCTIONS[kind](x, w))
        projected = torch.nn.functional.linear(randn(4, 8), randn(8, 8))
        assert FUNCTIONS[kind](projected, w).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_inference_mode(kind: str):
    x, w = randn(4, 8), randn(8).requires_grad_()
    with torch.inference_mode():
        y = FUNCTIONS[kind](x, w)
        out = FUNCTIONS[kind](x, w, out=torch.empty(4, 8))
    assert y.is_inference()
    assert torch.equal(y, FUNCTIONS[kind](x, w).detach())
    assert torch.equal(out, y)
    inference_input = FUNCTIONS[kind](y)
    assert not inference_input.requires_grad


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_meta_tensors_get_shape_and_dtype(kind: str):
    y = FUNCTIONS[kind](torch.empty(3, 8, device="meta", dtype=torch.bfloat16), torch.empty(8, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == ((3, 8), torch.bfloat16, "meta")
