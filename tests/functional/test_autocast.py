"""Autocast: the spec decides a norm's dtype, inside as outside, and gradients come in the dtypes of their leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.conventions import NAMED
from normkit.kernels.rounding import result_dtype
from rows import randn
from traced import CASES, outputs, randomized

HALVES = (torch.bfloat16, torch.float16)


def norm(spec: nk.NormSpec, x: Tensor, w: Tensor | None, gate: Tensor) -> Tensor:
    if spec.gate != "none":
        return nk.gated_rms_norm(x, gate, w, spec=spec)
    if spec == nk.SCALE_NORM and w is not None:
        return nk.scale_norm(x, w[0])
    return nk.normalize(x, spec, w, eps=1e-6)


@pytest.mark.parametrize(
    ("half", "backend", "specs"),
    [
        *((half, "reference", list(NAMED)) for half in HALVES),
        (torch.bfloat16, "cpu", ["LLAMA", "TORCH_LAYER_NORM"]),
        pytest.param(torch.bfloat16, "auto", list(NAMED), marks=pytest.mark.slow),  # compiles a kernel for each
    ],
)
def test_every_convention_gives_the_bits_and_dtype_of_outside(half: torch.dtype, backend: str, specs: list[str]):
    for name in specs:
        spec = NAMED[name]
        for dtype in (half, torch.float32):
            found = []
            for enabled in (True, False):
                x, gate = (randn(4, 16, seed=s, dtype=dtype).requires_grad_() for s in (0, 1))
                w = None if spec.weight == "none" else randn(16, seed=2).requires_grad_()
                with nk.use(backend), torch.autocast("cpu", half, enabled=enabled):
                    y = norm(spec, x, w, gate)
                y.backward(randn(4, 16, seed=3, dtype=y.dtype))
                assert y.dtype == result_dtype(spec, dtype, None if w is None else torch.float32, None), name
                leaves = [t for t in (x, w, *([gate] if spec.gate != "none" else [])) if t is not None]
                assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves], name
                found.append([y, *(t.grad for t in leaves)])
            assert all(map(torch.equal, *found)), name


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("placement")])
def test_modules_do_not_notice_it(name: str):
    """Half activations, float32 parameters; in plain operators, which is what autocast could touch."""
    found = []
    for enabled in (True, False):
        module = randomized(CASES[name].make())
        inputs = [t.bfloat16() if t.is_floating_point() else t for t in CASES[name].inputs(5)]
        with nk.use("reference"), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(outputs(module(*inputs)))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_a_pre_norm_step_keeps_a_float32_stream():
    """The norm hands float32 on, the linear layer under autocast makes bfloat16 of it, the stream stays float32."""
    block = randomized(nk.PreNorm(16, torch.nn.Linear(16, 16), norm=lambda n: nk.RMSNorm(n, spec=nk.LLAMA)))
    x = randn(3, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
        branch = torch.nn.functional.linear(x, randn(16, 16))
        q, k = nk.QKNorm(4, 4)(branch.view(3, 4, 4), branch.view(3, 4, 4))
    assert y.dtype == torch.float32
    assert (q.dtype, k.dtype) == (torch.bfloat16, torch.bfloat16)  # as v, which attention wants
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())
