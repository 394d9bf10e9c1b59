"""`no_decay`: every norm parameter and bias, whatever its class and name, once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normkit as nk


class Odd(nn.Module):
    """An RMSNorm under another name, with a weight per head."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.kernel * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Table(nn.Module):
    """A matrix of its own, and biases of experts in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.experts_bias = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.experts.T


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(9, 8),
            "layer_norm": nn.LayerNorm(8),
            "ln_f": nn.RMSNorm(8),
            "conv": nn.Conv1d(8, 8, 3),
            "bn": nn.BatchNorm1d(8),
            "scale": nk.ScaleNorm(8),
            "plane": nn.LayerNorm((3, 8)),
            "attention_gain": Odd(),
            "experts": Table(),
            "head": nn.Linear(8, 9, bias=False),
        }
    )


def named(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    ids = [id(p) for p in parameters]
    assert len(set(ids)) == len(ids)
    return [name for name, p in model.named_parameters() if id(p) in ids]


SKIPPED = [
    "layer_norm.weight", "layer_norm.bias", "ln_f.weight", "conv.bias", "bn.weight", "bn.bias", "scale.weight",
    "plane.weight", "plane.bias", "attention_gain.kernel", "experts.experts_bias",
]  # fmt: skip


def test_norms_and_biases_by_what_they_do() -> None:
    net = model()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    assert named(net, nk.no_decay(net)) == SKIPPED
    assert named(net, nk.no_decay(net, embeddings=True)) == ["tokens.weight", *SKIPPED]
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net["ln_f"].requires_grad_(False)
    net["tokens"].requires_grad_(False)
    assert named(net, nk.no_decay(net, embeddings=True)) == [n for n in SKIPPED if n != "ln_f.weight"]


def test_tied_parameters_come_once() -> None:
    net = model()
    net["head"].weight = net["tokens"].weight
    net["ln_f"].weight = net["layer_norm"].weight
    assert named(net, nk.no_decay(net)) == [n for n in SKIPPED if n != "ln_f.weight"]
    groups = nk.decay_groups(net, 0.1, embeddings=True)
    assert sum(p is net["head"].weight for g in groups for p in g["params"]) == 1
    assert any(p is net["head"].weight for p in groups[1]["params"])


def test_groups_hold_every_trained_parameter_once() -> None:
    net = model()
    groups = nk.decay_groups(net, 0.25)
    assert [g["weight_decay"] for g in groups] == [0.25, 0.0]
    together = [id(p) for g in groups for p in g["params"]]
    assert sorted(together) == sorted(id(p) for p in net.parameters())
    assert [len(g["params"]) for g in nk.decay_groups(nn.LayerNorm(4), 0.1)] == [2]
    assert nk.decay_groups(nn.Module(), 0.1) == []


def test_a_step_leaves_them_where_they_were() -> None:
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(nk.decay_groups(net, 0.5), lr=0.1)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        wanted = before[name] if name in SKIPPED else before[name] * (1 - 0.1 * 0.5)
        assert torch.allclose(p, wanted, rtol=1e-6, atol=0), name


def test_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        nk.no_decay([nn.Parameter(torch.ones(2))])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        nk.no_decay(nn.Sequential(nn.LazyLinear(4)))
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="must be 0 or more"):
            nk.decay_groups(model(), wrong)
    flat = nn.Linear(4, 4)
    flat.weight._is_flat_param = True
    with pytest.raises(ValueError, match="holds many parameters in one"):
        nk.no_decay(flat)
