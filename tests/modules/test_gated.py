"""GatedRMSNorm: where the gate acts, over which group, with which activation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import normkit as nk

D, SIZE, EPS = 12, 4, 1e-3


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _module(**options: Any) -> nk.GatedRMSNorm:
    module = nk.GatedRMSNorm(D, EPS, dtype=torch.float64, **options)
    assert module.weight is not None
    with torch.no_grad():
        module.weight.copy_(_random(D, seed=7))
    return module


def _rms(x: Tensor, size: int) -> Tensor:
    parts = x.unflatten(-1, (-1, size))
    return (parts / (parts.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2)


@pytest.mark.parametrize("size", [None, SIZE, 1, D])
@pytest.mark.parametrize("spec", [nk.GATED_RMS, nk.MAMBA2, nk.QWEN3_NEXT_GATED, nk.KIMI_GATED])
def test_the_formula(spec: nk.NormSpec, size: int | None) -> None:
    module = _module(spec=spec, group_size=size)
    x, gate = _random(3, 5, D), _random(3, 5, D, seed=1)
    a = torch.sigmoid(gate) if spec.activation == "sigmoid" else F.silu(gate)
    before = spec.gate == "before"
    want = _rms(x * a if before else x, size or D) * module.weight * (1 if before else a)
    assert (module(x, gate) - want).abs().max() < 1e-13
    neighbour = _rms(x if before else x * a, size or D) * module.weight * (a if before else 1)
    assert (module(x, gate) - neighbour).abs().max() > 0.01


@pytest.mark.parametrize("spec", [nk.GATED_RMS, nk.MAMBA2, nk.QWEN3_NEXT_GATED, nk.KIMI_GATED])
def test_no_gate_is_rms_norm_in_groups(spec: nk.NormSpec) -> None:
    module, x = _module(spec=spec, group_size=SIZE), _random(3, D)
    assert (module(x) - _rms(x, SIZE) * module.weight).abs().max() < 1e-13


def test_gradients() -> None:
    for spec in (nk.GATED_RMS, nk.MAMBA2):
        module = _module(spec=spec, group_size=SIZE)
        inputs = (_random(2, D).requires_grad_(), _random(2, D, seed=1).requires_grad_())
        assert torch.autograd.gradcheck(module, inputs)


def test_a_group_reads_no_other() -> None:
    module, x, gate = _module(group_size=SIZE), _random(1, D), _random(1, D, seed=1)
    other = x.clone()
    other[:, :SIZE] *= 100
    assert torch.equal(module(x, gate)[:, SIZE:], module(other, gate)[:, SIZE:])


@pytest.mark.slow
def test_half_inputs() -> None:
    x, gate = _random(3, D).bfloat16(), _random(3, D, seed=1).bfloat16()
    module = nk.GatedRMSNorm(D, group_size=SIZE)
    assert torch.equal(module(x, gate), module(x.float(), gate.float()).bfloat16())
    assert nk.GatedRMSNorm(D, spec=nk.MAMBA2)(x, gate).dtype == torch.float32  # weight in float32: promoted
    assert nk.GatedRMSNorm(D, spec=nk.QWEN3_NEXT_GATED)(x, gate).dtype == torch.bfloat16


def test_refusals() -> None:
    for size in (0, 5, 24):
        with pytest.raises(ValueError, match="group_size must divide 12"):
            nk.GatedRMSNorm(D, group_size=size)
    for spec in (nk.LLAMA, nk.TORCH_LAYER_NORM):
        with pytest.raises(ValueError, match="gated rms spec"):
            nk.GatedRMSNorm(D, spec=spec)
    module = nk.GatedRMSNorm(D)
    with pytest.raises(ValueError, match="gate must have x's shape"):
        module(torch.ones(2, D), torch.ones(2, 1))
    with pytest.raises(TypeError, match="gate"):
        module(torch.ones(2, D), torch.ones(2, D, dtype=torch.int64))
    assert module(torch.empty(0, D), torch.empty(0, D)).shape == (0, D)
