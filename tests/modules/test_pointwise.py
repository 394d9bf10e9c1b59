"""DyT and Derf."""

import pytest
import torch
from torch import Tensor

import normkit as nk

D = 6


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _draw(module: torch.nn.Module) -> None:
    for seed, p in enumerate(module.parameters()):
        with torch.no_grad():
            p.copy_(_random(*p.shape, seed=seed + 3))


@pytest.mark.parametrize("bias", [True, False])
def test_the_formulas(bias: bool) -> None:
    x = _random(3, 4, D)
    dyt, derf = nk.DyT(D, bias=bias, dtype=torch.float64), nk.Derf(D, bias=bias, dtype=torch.float64)
    _draw(dyt), _draw(derf)
    assert derf.weight is not None
    assert dyt.weight is not None
    shift = 0 if dyt.bias is None else dyt.bias
    assert (dyt(x) - (torch.tanh(dyt.alpha * x) * dyt.weight + shift)).abs().max() < 1e-14
    shift = 0 if derf.bias is None else derf.bias
    assert (derf(x) - (torch.erf(derf.alpha * x + derf.shift) * derf.weight + shift)).abs().max() < 1e-14
    assert torch.autograd.gradcheck(dyt, x[0].requires_grad_())
    assert torch.autograd.gradcheck(derf, x[0].detach().requires_grad_())


def test_every_parameter_learns() -> None:
    for module in (nk.DyT(D), nk.Derf(D)):
        module(_random(4, D).float() + 1).square().sum().backward()
        assert all(p.grad is not None and bool((p.grad != 0).any()) for p in module.parameters())


def test_alpha_starts_where_it_was_told() -> None:
    assert float(nk.DyT(D).alpha.detach()) == 0.5
    module = nk.Derf(D, alpha=0.25)
    _draw(module)
    module.reset_parameters()
    assert (float(module.alpha.detach()), float(module.shift.detach())) == (0.25, 0.0)
    assert "alpha=0.25" in repr(module)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_inputs_round_once(kind: torch.dtype) -> None:
    x = _random(4, D).to(kind)
    for module in (nk.DyT(D), nk.Derf(D)):
        _draw(module)
        assert torch.equal(module(x), module(x.float()).to(kind))


def test_it_is_no_norm() -> None:
    x = _random(2, D).float()
    for module in (nk.DyT(D), nk.Derf(D)):
        assert not torch.allclose(module(x), module(2 * x), atol=0.01)  # scale is not removed
        one = x.clone()
        one[0, 0] += 1
        assert torch.equal(module(one)[0, 1:], module(x)[0, 1:])  # no element reads another
