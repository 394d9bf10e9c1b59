"""LayerNorm, RMSNorm, ScaleNorm against torch's modules and the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from exact import exact, unit
from rows import always

D = 96
U = unit(torch.float32)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _same_affine(*modules: nn.Module) -> None:
    for module in modules:
        for seed, p in enumerate(module.parameters()):
            with torch.no_grad():
                p.copy_(_random(*p.shape, seed=seed + 10))


def _grads(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_layer_norm_is_torchs(eps: float, offset: float) -> None:
    ours, theirs = nk.LayerNorm(D, eps), nn.LayerNorm(D, eps)
    _same_affine(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, dy = _random(4, 5, D) * 2 + offset, _random(4, 5, D, seed=1)
    assert ours.weight is not None
    assert ours.bias is not None
    truth = exact(x, (-1,), ours.weight, ours.bias, dy, eps=eps)
    for module in (ours, theirs):
        for number, value in zip((truth.y, truth.dx, truth.dw, truth.db), _grads(module, x, dy), strict=True):
            number.check(value)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours_default, theirs_default = nk.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
    assert ours_default.eps == theirs_default.eps
    theirs_default.load_state_dict(ours_default.state_dict(), strict=True)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_torchs(eps: float) -> None:
    """Both sum D squares: (D/2 + 8)·u of y each. A gradient sums D more, against the absolute values of its terms."""
    ours, theirs = nk.RMSNorm(D, eps), nn.RMSNorm(D, eps)
    _same_affine(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, dy = _random(4, 5, D), _random(4, 5, D, seed=1)
    wide = nn.RMSNorm(D, eps, dtype=torch.float64)
    wide.load_state_dict(ours.state_dict())
    want = _grads(wide, x.double(), dy.double())
    rstd = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    size, g = (x * rstd).abs(), (dy * wide.weight).abs().detach()
    terms = rstd * (g + size * (g * size).mean(-1, keepdim=True))
    for module in (ours, theirs):
        y, dx, dw = _grads(module, x, dy)
        assert ((y - want[0]).abs() <= (D / 2 + 8) * U * want[0].abs()).all()
        assert ((dx - want[1]).abs() <= (2 * D + 20) * U * terms).all()
        assert ((dw - want[2]).abs() <= (D + 20 + 20) * U * (dy.abs() * size).sum((0, 1))).all()


def test_rms_norm_takes_torchs_default_eps() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((1, D), 1e-3, dtype=kind)
        ours, theirs = nk.RMSNorm(D, nk.TORCH_DEFAULT, dtype=kind)(x), nn.RMSNorm(D, dtype=kind)(x)
        assert (ours - theirs).abs().max() <= 2 * unit(kind)
        assert float(ours.detach()[0, 0]) == pytest.approx(1 / (1 + 0.1192) ** 0.5, rel=0.01)


@pytest.mark.parametrize("kind", always([torch.float16, torch.bfloat16], lambda kind: kind == torch.bfloat16))
def test_half_inputs_round_once(kind: torch.dtype) -> None:
    x = _random(4, D).to(kind)
    for module in (nk.LayerNorm(D), nk.RMSNorm(D), nk.ScaleNorm(D), nk.RMSNorm(D, spec=nk.GEMMA, bias=True)):
        _same_affine(module)
        assert torch.equal(module(x), module(x.float()).to(kind))


def test_specs_decide() -> None:
    x = _random(3, D)
    gemma, plain = nk.RMSNorm(D, spec=nk.GEMMA), nk.RMSNorm(D)
    assert torch.equal(gemma(x), plain(x))  # 1 + 0 is 1
    with torch.no_grad():
        gemma.weight.fill_(0.5)  # type: ignore[union-attr]
        plain.weight.fill_(1.5)  # type: ignore[union-attr]
    assert torch.equal(gemma(x), plain(x))
    llama = nk.RMSNorm(D, spec=nk.LLAMA)
    assert llama(x.bfloat16()).dtype == torch.float32  # rounded, then weighted in the promoted dtype
    assert llama.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    weightless = nk.RMSNorm(D, spec=nk.WEIGHTLESS_RMS)
    assert weightless.weight is None
    assert torch.equal(weightless(x), nk.RMSNorm(D)(x))
    assert nk.LayerNorm(D, spec=nk.OLMO, bias=False).state_dict() == {}


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (nk.LayerNorm, nk.LLAMA, "use RMSNorm"),
        (nk.LayerNorm, nk.L2_NORM, "centred"),
        (nk.RMSNorm, nk.TORCH_LAYER_NORM, "rms spec"),
        (nk.RMSNorm, nk.L2_NORM, "rms spec"),
        (nk.RMSNorm, nk.MAMBA2, "ungated"),
    ],
)
def test_specs_of_another_kind(make: Any, spec: nk.NormSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(D, spec=spec)


def test_missing_weight_is_one_and_missing_bias_is_zero() -> None:
    x = _random(3, D)
    module = nk.LayerNorm(D)
    assert torch.equal(module(x), nk.layer_norm(x))
    assert torch.equal(module(x), nk.LayerNorm(D, bias=False)(x))
    assert torch.equal(nk.RMSNorm(D, bias=True)(x), nk.rms_norm(x))


def test_scale_norm() -> None:
    x = _random(5, D)
    module = nk.ScaleNorm(D)
    norm = x.double().norm(dim=-1, keepdim=True)
    assert module.weight.shape == ()
    assert ((module(x) - D**0.5 * x / norm).abs() <= (D / 2 + 8) * U * (D**0.5 * x / norm).abs()).all()
    tiny = torch.full((1, D), 1e-9)
    assert torch.allclose(module(tiny), torch.full((1, D), D**0.5 * 1e-9 / 1e-6), rtol=1e-5)
    module(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == ()


@pytest.mark.parametrize("shape", [(D,), (0, D), (2, 0, D), (2, 3, 4, D)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for module in (nk.LayerNorm(D), nk.RMSNorm(D), nk.ScaleNorm(D)):
        assert module(x).shape == shape


def test_views_of_a_larger_tensor() -> None:
    packed = _random(8, 3 * D)
    _, q, _ = packed.split(D, dim=-1)
    for module in (nk.LayerNorm(D), nk.RMSNorm(D)):
        assert torch.equal(module(q), module(q.contiguous()))
        assert torch.equal(module(packed[2:5, :D]), module(packed[2:5, :D].clone()))


def test_repr() -> None:
    assert repr(nk.RMSNorm(4, 1e-5, spec=nk.GEMMA)) == f"RMSNorm(4, eps=1e-05, spec={nk.GEMMA.code})"
    assert repr(nk.LayerNorm(4)).startswith("LayerNorm(4, eps=1e-05")
    assert repr(nk.ScaleNorm(4)) == "ScaleNorm(4, eps=1e-06)"
