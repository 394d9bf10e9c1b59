"""`fold_`: a batch norm in eval mode into the layer before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from surgery.fold_models import Net, identified_once, in_float64, same, state, stirred

__all__ = ["identified_once"]

U32 = torch.finfo(torch.float32).eps / 2


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """Give batch norms statistics that are far from 0 and 1, then go to eval mode."""
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(3 * x + 1)
    return stirred(model)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)), (4, 3, 6, 6)),
        ((nn.Conv2d(3, 6, 3, groups=3, bias=False), nn.BatchNorm2d(6)), (4, 3, 6, 6)),
        ((nn.Conv1d(3, 5, 2, padding=1, padding_mode="circular"), nn.BatchNorm1d(5)), (4, 3, 6)),
        ((nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), (2, 2, 3, 4, 3)),
        ((nn.Linear(3, 5), nn.BatchNorm1d(5)), (7, 3)),
        ((nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5, eps=0.3)), (7, 3)),
        ((nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False)), (7, 3)),
        ((nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5, affine=False)), (7, 3)),
        ((nn.Linear(3, 5), nk.BatchNorm(5)), (4, 7, 3)),
        ((nn.Conv1d(3, 5, 1), nk.BatchNorm(5, channel_axis=1)), (4, 3, 7)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_layer_takes_scale_and_shift(layers: tuple[nn.Module, nn.Module], shape: Any, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(shape)
    model = trained(nn.Sequential(*copy.deepcopy(layers), nn.ReLU(inplace=True)), x)
    layer, norm = model[0], model[1]
    exact, keys = in_float64(model, x), list(model.state_dict())
    scale = (norm.running_var.double() + norm.eps).rsqrt() * (
        1 if norm.weight is None else norm.weight.detach().double()
    )
    wanted = (layer.weight.detach().double() * scale.reshape(-1, *[1] * (layer.weight.dim() - 1))).float()
    report = nk.fold_(model, x)
    assert [(f.name, f.what, f.into) for f in report.folded] == [("1", "batch norm", ("0",))]
    assert torch.allclose(layer.weight, wanted, rtol=2 * U32, atol=0)  # 1/√ by another route: one unit
    assert list(model.state_dict()) == keys
    size = float(exact.abs().max()) + 1
    assert float((model(x).double() - exact).detach().abs().max()) < (27 + 8) * U32 * size  # at most 27 terms in a sum
    assert report.error is not None
    assert report.error.float64 <= report.error.bound < 1e-10
    again = nk.fold_(model, x)
    assert again.folded == again.refused == ()
    assert again.already == ("1",)


def test_a_layer_without_a_bias_gets_none_and_the_norm_keeps_the_shift() -> None:
    x = torch.randn(5, 3, 8, 8)
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), x)
    nk.fold_(model, x)
    assert model[0].bias is None
    assert bool((model[1].weight == 1).all())
    assert bool((model[1].running_mean == 0).all())
    assert bool(model[1].bias.any())
    assert "forward" not in vars(model[1])


def test_the_norm_comes_back_in_training_mode_and_with_a_checkpoint() -> None:
    x = torch.randn(16, 3)
    model = trained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), x)
    before, out = state(model), model(x)
    nk.fold_(model, x)
    seen = torch.randn(16, 4)
    assert model[1](seen) is seen
    model.train()
    y = model[1](seen).detach()
    # The batch's own statistics: a mean of zero to within a sum of 16 terms.
    assert bool((y.mean(0).abs() <= 32 * U32 * y.abs().max()).all())
    assert bool(model[1].running_mean.any())
    model.eval()
    model.load_state_dict(before)
    assert "forward" not in vars(model[1])
    assert same(state(model), before)
    assert torch.equal(model(x), out)


def test_a_mask_beside_the_input_is_the_norm_s_own_affair() -> None:
    torch.manual_seed(1)
    x, mask = torch.randn(4, 7, 3), torch.rand(4, 7) < 0.5
    plain = trained(nn.Sequential(nn.Linear(3, 5), nk.BatchNorm(5)), x)
    nk.fold_(plain, x)
    y = plain[0](x)
    assert plain[1](y) is y
    assert torch.equal(plain[1](y, mask=mask) == 0, ~mask.unsqueeze(-1).expand(4, 7, 5))


def test_undo() -> None:
    x = torch.randn(16, 3)
    model = trained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), x)
    before, out = state(model), model(x)
    nk.fold_(model, x).undo()
    assert same(state(model), before)
    assert torch.equal(model(x), out)


@pytest.mark.parametrize(
    ("wiring", "reason"),
    [
        (lambda m, x: m.bn(y := m.a(x)) + y, "the output of a is also read by a sum"),
        (lambda m, x: (m.bn(y := m.a(x)), y), "the output of a is also read by the model's own output"),
        (lambda m, x: m.bn(torch.relu(m.a(x))), "is not the output of one linear layer"),
        (lambda m, x: m.bn(m.a(x) + m.b(x)), "is not the output of one linear layer"),
        (lambda m, x: m.bn(m.a(x) * 2), "is not the output of one linear layer"),
        (lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), "is not the output of one linear layer"),
        (lambda m, x: m.bn(m.a(x)) + m.a(x), "the output of a is also read by a sum"),
        (lambda m, x: m.bn(m.a(x).flip(1)), "the channels it normalises are not those"),
        (lambda m, x: m.bn(x), "is not the output of one linear layer"),
        (lambda m, x: m.bn(m.table.expand(3, 4)), "table, which it reads, is no linear layer"),
        (lambda m, x: m.bn(m.a(x)) + m.a.bias, "a parameter of a is also read by aten.add.Tensor"),
    ],
)  # fmt: skip
def test_refused(wiring: Any, reason: str) -> None:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "bn": nn.BatchNorm1d(4), "table": nn.Parameter(torch.randn(4))}
    x = torch.randn(3, 4)
    model = trained(Net(wiring, **parts), x)
    before = state(model)
    report = nk.fold_(model, x)
    assert report.folded == ()
    assert reason in str(report)
    assert same(state(model), before)


def test_statistics_of_the_batch_are_no_fixed_map() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    report = nk.fold_(model, torch.randn(8, 3))
    assert report.folded == ()
    assert report.refused[0].name == "1"
