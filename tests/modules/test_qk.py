"""QKNorm: what shares a statistic, how weights are laid out, and why it stands before RoPE."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk

B, L, H, KV, D = 2, 5, 4, 2, 8
EPS = 1e-6


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _inputs() -> tuple[Tensor, Tensor]:
    return _random(B, L, H, D) * 3, _random(B, L, KV, D, seed=1) + 1


def _module(**options: Any) -> nk.QKNorm:
    module = nk.QKNorm(D, H, num_kv_heads=KV, dtype=torch.float64, **options)
    for seed, p in enumerate(module.parameters()):
        with torch.no_grad():
            p.copy_(_random(*p.shape, seed=seed + 5))
    return module


def _rms(x: Tensor, *axes: int) -> Tensor:
    return x / (x.square().mean(axes, keepdim=True) + EPS).sqrt()


def _rope(x: Tensor, start: int = 0) -> Tensor:
    """Rotate (…, L, H, D) in pairs (i, i + D/2)."""
    length, half = x.shape[-3], x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (torch.arange(length, dtype=x.dtype) + start).unsqueeze(-1) * rates
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def test_per_head_with_a_shared_weight() -> None:
    module, (q, k) = _module(), _inputs()
    got = module(q, k)
    for x, y, norm in zip((q, k), got, (module.q_norm, module.k_norm), strict=True):
        assert norm.weight.shape == (D,)
        assert (y - _rms(x, -1) * norm.weight).abs().max() < 1e-13
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {"q_norm.weight": (D,), "k_norm.weight": (D,)}


def test_per_head_weights() -> None:
    module, (q, k) = _module(per_head_weight=True), _inputs()
    for x, y, norm in zip((q, k), module(q, k), (module.q_norm, module.k_norm), strict=True):
        assert norm.weight.shape == x.shape[-2:]
        assert (y - _rms(x, -1) * norm.weight).abs().max() < 1e-13


def test_full_width_is_rms_norm_before_the_split_into_heads() -> None:
    module, (q, k) = _module(coverage="full"), _inputs()
    for x, y, norm in zip((q, k), module(q, k), (module.q_norm, module.k_norm), strict=True):
        flat = nk.RMSNorm(x.shape[-2] * D, EPS, dtype=torch.float64)
        flat.load_state_dict(norm.state_dict(), strict=True)
        assert (y.flatten(-2) - flat(x.flatten(-2))).abs().max() < 1e-13
        assert (y - _rms(x, -1) * norm.weight.unflatten(0, (-1, D))).abs().max() > 0.01  # per head is another norm


def test_full_width_loads_flat_checkpoints() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.k_norm = nn.RMSNorm(H * D, EPS), nn.RMSNorm(KV * D, EPS)

    theirs = Attention()
    for seed, p in enumerate(theirs.parameters()):
        with torch.no_grad():
            p.copy_(_random(*p.shape, seed=seed))
    ours = nk.QKNorm(D, H, num_kv_heads=KV, coverage="full", spec=nk.OLMO2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    q, k = (t.float() for t in _inputs())
    # Each is within (n/2 + 8)·u of y = at most 4·4, with n = 32 elements a statistic.
    for y, want in zip(ours(q, k), (theirs.q_norm(q.flatten(-2)), theirs.k_norm(k.flatten(-2))), strict=True):
        assert (y.flatten(-2) - want).abs().max() <= 2 * 24 * 2.0**-24 * 16


def test_weightless_and_one_plus() -> None:
    q, k = _inputs()
    for coverage, axes in (("head", (-1,)), ("full", (-2, -1))):
        module = nk.QKNorm(D, H, num_kv_heads=KV, coverage=coverage, spec=nk.WEIGHTLESS_RMS)
        assert module.state_dict() == {}
        for x, y in zip((q, k), module(q, k), strict=True):
            assert (y - _rms(x, *axes)).abs().max() < 1e-13
    gemma = _module(spec=nk.GEMMA)
    assert (gemma(q, k)[0] - _rms(q, -1) * (1 + gemma.q_norm.weight)).abs().max() < 1e-13
    assert not nk.QKNorm(D, H, spec=nk.GEMMA).q_norm.weight.any()


@pytest.mark.parametrize("per_head", [True, False])
def test_layer_norm_spec(per_head: bool) -> None:
    module, (q, k) = _module(spec=nk.TORCH_LAYER_NORM, per_head_weight=per_head), _inputs()
    d = q - q.mean(-1, keepdim=True)
    assert (module(q, k)[0] - _rms(d, -1) * module.q_norm.weight).abs().max() < 1e-12


def _logits(norm_first: bool, module: nk.QKNorm, start: int) -> Tensor:
    """Return q·k of the same two vectors at every pair of positions, the sequence beginning at ``start``."""
    q, k = _random(1, 1, H, D).expand(1, L, H, D), _random(1, 1, KV, D, seed=1).expand(1, L, KV, D)
    if norm_first:
        q, k = (_rope(t, start) for t in module(q, k))
    else:
        q, k = module(_rope(q, start), _rope(k, start))
    return torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(H // KV, dim=2))


def test_after_rope_logits_depend_on_the_absolute_position() -> None:
    module = _module()
    before = _logits(True, module, 0) - _logits(True, module, 7)
    after = _logits(False, module, 0) - _logits(False, module, 7)
    assert before.abs().max() < 1e-12
    assert after.abs().max() > 0.1


@pytest.mark.parametrize("options", [{"spec": nk.WEIGHTLESS_RMS}, {"spec": nk.WEIGHTLESS_RMS, "coverage": "full"}])
def test_without_a_weight_per_dimension_the_order_does_not_matter(options: dict[str, Any]) -> None:
    module = nk.QKNorm(D, H, num_kv_heads=KV, **options)
    assert (_logits(True, module, 3) - _logits(False, module, 3)).abs().max() < 1e-12


def test_layer_norm_does_not_commute_even_without_a_weight() -> None:
    module = nk.QKNorm(D, H, num_kv_heads=KV, spec=nk.OLMO)
    assert (_logits(True, module, 3) - _logits(False, module, 3)).abs().max() > 0.01


def test_views_of_one_projection() -> None:
    packed = _random(B, L, (H + 2 * KV) * D, dtype=torch.float32)
    q, k, _ = packed.split([H * D, KV * D, KV * D], dim=-1)
    module = nk.QKNorm(D, H, num_kv_heads=KV)
    views = (q.unflatten(-1, (H, D)), k.unflatten(-1, (KV, D)))
    for one, other in zip(module(*views), module(*(v.contiguous() for v in views)), strict=True):
        assert torch.equal(one, other)
    q, k = (v.bfloat16() for v in views)
    assert [t.dtype for t in module(q, k)] == [torch.bfloat16] * 2


def test_gradients_reach_both_weights() -> None:
    module, (q, k) = _module(coverage="full"), _inputs()
    assert torch.autograd.gradcheck(module, (q[:1, :1].requires_grad_(), k[:1, :1].requires_grad_()))
    sum(t.square().sum() for t in module(q, k)).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"coverage": "all"}, ValueError, "'head' or 'full'"),
        ({"spec": nk.MAMBA2}, ValueError, "ungated"),
        ({"coverage": "full", "per_head_weight": True}, ValueError, "drop per_head_weight"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1"),
        ({"eps": None}, ValueError, "eps=None"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nk.QKNorm(D, H, **options)


def test_unsplit_projections_are_refused() -> None:
    module, (q, k) = nk.QKNorm(D, H, num_kv_heads=KV), _inputs()
    for wrong in ((q.flatten(-2), k), (q.transpose(1, 2), k), (q, q), (q[..., :4], k)):
        with pytest.raises(ValueError, match="split the projection into heads first"):
            module(*wrong)
