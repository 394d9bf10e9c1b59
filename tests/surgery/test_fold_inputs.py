"""`fold_`: what it is given that it cannot work with; the model is as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from surgery.fold_models import Net, Tower, identified_once, same, state, stirred

__all__ = ["identified_once"]


def small() -> nn.Module:
    return stirred(nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4)))


def hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks")
    return sum(len(vars(m)[name]) for m in model.modules() for name in names)


def wired(wiring: Any) -> nn.Module:
    return stirred(Net(wiring, norm=nn.RMSNorm(6), head=nn.Linear(6, 4)))


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small().train(), "is in training mode"),
        (small().to("meta"), "0.weight is on meta and has no values"),
        (nn.DataParallel(small()), r"pass DataParallel\.module"),
        (wired(lambda m, x: m.head(m.norm(x[:, :5]))), "Net failed on the example: RuntimeError"),
        (wired(lambda m, x: m.head(m.norm(x)).argmax(-1)), "returned no floating tensor"),
        (wired(lambda m, x: m.head(m.norm(x)) + torch.rand(1)), "returns another result each time"),
        (stirred(nn.Sequential(nn.RMSNorm(6), Uncopyable(6, 4))), r"cannot be copied \(one of a kind\)"),
    ],
)
def test_refused_with_an_error(model: nn.Module, message: str) -> None:
    meta = next(model.parameters()).is_meta
    before, count = state(model), hooks(model)
    with pytest.raises(ValueError, match=message):
        nk.fold_(model, torch.randn(3, 6))
    assert meta or same(state(model), before)
    assert hooks(model) == count


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        nk.fold_(lambda x: x, torch.randn(3, 6))  # type: ignore[arg-type]


def test_a_compiled_model_is_named() -> None:
    part, whole = small(), small()
    part[1] = torch.compile(part[1])
    whole.compile()
    for model in (torch.compile(small()), part, whole):
        with pytest.raises(ValueError, match="the model is compiled"):
            nk.fold_(model, torch.randn(3, 6))


def test_nothing_of_the_forward_stays() -> None:
    model, x = small(), torch.randn(3, 6, requires_grad=True)
    count, drawn = hooks(model), torch.get_rng_state()
    report = nk.fold_(model, x)
    assert report.folded
    assert hooks(model) == count
    assert torch.equal(torch.get_rng_state(), drawn)
    assert x.grad is None
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("index", [0, 1])
def test_hooks_on_a_folded_module_are_a_reason(kind: str, index: int) -> None:
    model = small()
    handle = getattr(model[index], kind)(lambda *_: None)
    before = state(model)
    report = nk.fold_(model, torch.randn(3, 6))
    assert f"{index} carries forward hooks" in str(report)
    assert same(state(model), before)
    handle.remove()
    assert nk.fold_(model, torch.randn(3, 6)).folded


def test_a_product_that_its_dtype_cannot_hold_is_refused() -> None:
    model = small().half()
    with torch.no_grad():
        model[0].weight.fill_(300.0)
        model[1].weight.fill_(250.0)
    before = state(model)
    report = nk.fold_(model, 1e-4 * torch.randn(3, 6).half())
    assert "the new 1.weight is larger than its dtype can hold" in str(report)
    assert same(state(model), before)


def test_a_product_that_vanishes_in_its_dtype_is_refused() -> None:
    # Each of 64 products 1e-8 is too small for float16, their sum is not: what was finite becomes 1/0.
    model = stirred(
        Net(lambda m, x: 1 / m.head(m.norm(x)).float(), norm=nn.RMSNorm(64), head=nn.Linear(64, 4, bias=False))
    )
    model = model.half()
    with torch.no_grad():
        model.norm.weight.fill_(1e-4)
        model.head.weight.fill_(1e-4)
    before = state(model)
    report = nk.fold_(model, torch.ones(3, 64).half())
    assert "outputs are finite in other places than before" in str(report)
    assert same(state(model), before)


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


def test_a_layer_is_linear_by_its_forward_not_by_its_class() -> None:
    report = nk.fold_(stirred(nn.Sequential(nn.RMSNorm(6), Loud(6, 4))), torch.randn(3, 6))
    assert report.folded == ()
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    assert nk.fold_(stirred(nn.Sequential(nn.RMSNorm(6), normed)), torch.randn(3, 6)).folded == ()
    gained = stirred(nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4)))
    nn.utils.parametrize.register_parametrization(gained[0], "weight", nn.Softplus())
    assert "0: norm stays: contains modules" in str(nk.fold_(gained.eval(), torch.randn(3, 6)))
    made = stirred(nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4)))
    del made[1].weight
    made[1].weight = torch.randn(4, 6)
    assert "1.weight is computed from other tensors" in str(nk.fold_(made, torch.randn(3, 6)))
    patched = nn.Linear(6, 4)
    patched.forward = torch.sin  # type: ignore[method-assign]
    assert nk.fold_(stirred(nn.Sequential(nn.RMSNorm(6), patched)), torch.randn(3, 6)).folded == ()


def test_norms_without_a_module_and_norms_not_called_are_named() -> None:
    def wiring(m: Net, x: Tensor) -> Tensor:
        return m.head(nn.functional.layer_norm(x, (6,)))

    report = nk.fold_(wired(wiring), torch.randn(3, 6))
    lines = [str(r) for r in report.refused]
    assert any("the model's forward: norm stays: its forward calls aten.native_layer_norm" in line for line in lines)
    assert any(line.startswith("norm: norm stays: it was not called") for line in lines)


def test_frozen_parameters_fold_and_stay_frozen() -> None:
    model = small().requires_grad_(False)
    assert nk.fold_(model, torch.randn(3, 6)).folded
    assert not any(p.requires_grad for p in model.parameters())


def test_one_row_is_enough() -> None:
    assert nk.fold_(small(), torch.randn(6)).folded


def test_another_model_of_the_same_classes_is_untouched() -> None:
    torch.manual_seed(0)
    model, other = stirred(Tower(nn.LayerNorm)), stirred(Tower(nn.LayerNorm))
    before, ids = state(other), torch.randint(0, 17, (2, 5))
    out = other(ids)
    nk.fold_(model, ids)
    assert same(state(other), before)
    assert torch.equal(other(ids), out)
