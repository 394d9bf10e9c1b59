"""`fold_`: γ and β of a norm into the linear layers that read it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.folding import linears
from surgery.fold_models import Net, Tower, identified_once, in_float64, same, state, stirred

pytestmark = pytest.mark.usefixtures("on_the_reference")

__all__ = ["identified_once"]  # a fixture: pytest finds it by its name here

U32 = torch.finfo(torch.float32).eps / 2


def refusals(report: nk.FoldReport) -> str:
    return "\n".join(str(r) for r in report.refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("seed", [0, 1])
def test_new_weights_are_the_float64_products_rounded_once(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    model = stirred(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5)), seed).to(dtype)
    (norm, head), x = model, torch.randn(3, 7, dtype=dtype)
    w, b, gamma, beta = (p.detach().double() for p in (head.weight, head.bias, norm.weight, norm.bias))
    keys = list(model.state_dict())
    report = nk.fold_(model, x)
    assert [(f.name, f.what, f.into) for f in report.folded] == [("0", "weight", ("1",))]
    assert torch.equal(head.weight, (w * gamma).to(dtype))
    # W·β is a sum of seven terms, whose order is not promised: one unit of the result's dtype.
    assert torch.allclose(head.bias.double(), b + w @ beta, rtol=torch.finfo(dtype).eps, atol=1e-15)
    assert bool((norm.weight == 1).all())
    assert bool((norm.bias == 0).all())
    assert list(model.state_dict()) == keys
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize(
    "norm",
    [
        nn.RMSNorm,
        nk.RMSNorm,
        nk.LayerNorm,
        lambda dim: nk.RMSNorm(dim, spec=nk.GEMMA),
        pytest.param(lambda dim: nk.RMSNorm(dim, spec=nk.T5), marks=pytest.mark.slow),
        pytest.param(lambda dim: nk.LayerNorm(dim, spec=nk.NEMOTRON, bias=False), marks=pytest.mark.slow),
    ],
)
def test_a_model_computes_what_it_did(norm: Any) -> None:
    torch.manual_seed(2)
    model, ids = stirred(Tower(norm)), torch.randint(0, 17, (2, 5))
    before, own = in_float64(model, ids), model(ids).detach()
    report = nk.fold_(model, ids)
    assert {f.name for f in report.folded if f.what == "weight"} == {"blocks.0.norm", "blocks.1.norm", "final"}
    after = in_float64(model, ids)
    # Five layers in a row, each with weights that are rounded once and, in float32, sums of up to 26 terms.
    size = U32 * float(before.abs().max())
    assert float((after - before).abs().max()) < 5 * size
    assert float((model(ids).detach() - own).abs().max()) < 5 * 26 * size
    gammas = [m.norm.weight for m in model.blocks] + [model.final.weight]
    resting = float(isinstance(model.final, (nk.RMSNorm, nk.LayerNorm)) and model.final.spec.weight.startswith("one"))
    assert all(bool((g == 1 - resting).all()) for g in gammas)
    assert report.error is not None
    assert report.error.float64 <= report.error.bound < 1e-11


def test_several_readers_each_take_the_weight() -> None:
    model = stirred(
        Net(lambda m, x: m.q(y := m.norm(x)) * m.k(y) + m.v(nn.functional.dropout(y, 0.5, m.training)),
            norm=nn.RMSNorm(6), q=nn.Linear(6, 4), k=nn.Linear(6, 4, bias=False), v=nn.Linear(6, 4))
    )  # fmt: skip
    x = torch.randn(5, 6)
    before = in_float64(model, x)
    report = nk.fold_(model, x)
    assert report.folded[0].into == ("q", "k", "v")
    assert torch.allclose(in_float64(model, x), before, atol=1e-5)


PERMUTED = torch.tensor([3, 0, 5, 1, 4, 2])


@pytest.mark.parametrize(
    ("wiring", "parts", "shape"),
    [
        (lambda m, x: m.head(m.norm(x)[..., PERMUTED]), {"head": nn.Linear(6, 3)}, (2, 6)),
        (lambda m, x: m.head(m.norm(x)[..., 2:5]), {"head": nn.Linear(3, 3)}, (2, 6)),
        (lambda m, x: m.head(m.norm(x).flatten(1)), {"head": nn.Linear(24, 3)}, (2, 4, 6)),
        (lambda m, x: m.head(m.norm(x).transpose(1, 2).reshape(2, 24)), {"head": nn.Linear(24, 3)}, (2, 4, 6)),
        (lambda m, x: m.head(torch.cat([m.norm(x), m.norm(2 * x)], -1)), {"head": nn.Linear(12, 3)}, (2, 6)),
        (lambda m, x: m.head(m.norm(x)[[1, 1, 0]]), {"head": nn.Linear(6, 3)}, (2, 6)),
        (lambda m, x: m.head(m.norm(x).mT), {"head": nn.Conv1d(6, 4, 1)}, (2, 5, 6)),
        (lambda m, x: m.head(m.norm(x).mT), {"head": nn.Conv1d(6, 4, 3, groups=2)}, (2, 5, 6)),
        (lambda m, x: m.head(m.norm(x).permute(0, 3, 1, 2)), {"head": nn.Conv2d(6, 6, 3, groups=6)}, (2, 4, 5, 6)),
    ],
)
def test_channels_are_followed_wherever_they_go(wiring: Any, parts: dict[str, nn.Module], shape: Any) -> None:
    torch.manual_seed(3)
    model = stirred(Net(wiring, norm=nn.LayerNorm(6), **copy.deepcopy(parts)))
    x = torch.randn(shape)
    before = in_float64(model, x)
    report = nk.fold_(model, x)
    assert [f.what for f in report.folded] == ["weight"]
    assert bool((model.norm.weight == 1).all())
    assert float((in_float64(model, x) - before).abs().max()) < 100 * U32 * float(before.abs().max())


NEEDS_NO_BIAS = "its bias is not zero"


@pytest.mark.parametrize(
    ("wiring", "reason"),
    [
        (lambda m, x: x + m.head(m.norm(x)) + m.norm(x), "a sum, which is no linear layer"),
        (lambda m, x: m.head(torch.relu(m.norm(x))), "aten.relu.default in the model's forward"),
        (lambda m, x: (m.head(y := m.norm(x)), {"hidden": [y]}), "the model's own output"),
        (lambda m, x: (m.head(y := m.norm(x)), y[0].view(-1)), "the model's own output"),
        (lambda m, x: m.head(m.norm(x)) + m.head(x), "head also reads values that do not come from this norm"),
        (lambda m, x: m.head(m.norm(x)) + m.head(m.mid(x)), "head also reads values that do not come from this norm"),
        (lambda m, x: m.head(torch.cat([m.norm(x), m.mid(x)])), "head reads it mixed with other values"),
        (lambda m, x: m.head(m.other(m.norm(x))), "other, which is no linear layer"),
        (lambda m, x: m.head(m.norm(x)) + m.head(m.norm(x).flip(-1)), "one order in one call and in another"),
        (lambda m, x: m.head(m.norm(x).cumsum(0)), "aten.cumsum.default"),
        (lambda m, x: m.head(m.norm(x) * 2.0), NEEDS_NO_BIAS),
        (lambda m, x: m.head(m.norm(x) * x[..., :1]), NEEDS_NO_BIAS),
        (lambda m, x: m.head(m.norm(x) * x), "aten.mul.Tensor"),
        (lambda m, x: m.head(2.0 / m.norm(x)), "aten.reciprocal.default"),
        (lambda m, x: m.head(m.norm(x).add_(1.0)), "a sum, which is no linear layer"),
        (lambda m, x: m.head(m.norm(x).clamp_(-1, 1)), "aten.clamp_.default"),
        (lambda m, x: m.head(torch.where(x > 0, m.norm(x), x)), "aten.where.self"),
        (lambda m, x: m.head(m.norm(x)) @ m.head.weight, "a parameter of head is also read by aten.mm.default"),
        (lambda m, x: m.head(m.norm(x)) * m.norm.weight.sum(), "a parameter of norm is also read by aten.sum.default"),
        (lambda m, x: nn.functional.linear(m.norm(x), m.free), "no linear layer"),
        (lambda m, x: m.head(x) if bool(m.norm(x).max() > 0) else x, "aten.max.default"),
        (lambda m, x: m.head(torch.cat([m.norm(x), x])), "aten.cat.default"),
        (lambda m, x: m.head(m.norm(x)[..., PERMUTED].view(torch.int32).view(torch.float32)), "aten.view.dtype"),
        (lambda m, x: m.head(m.norm(x).view(-1)[:6].expand(4, 6).T.reshape(4, 6)), "no fixed channels"),
    ],
)  # fmt: skip
def test_every_other_reader_is_refused_by_name(wiring: Any, reason: str) -> None:
    torch.manual_seed(4)
    model = stirred(
        Net(wiring, norm=nn.LayerNorm(6), other=nn.RMSNorm(6), head=nn.Linear(6, 6), mid=nn.Linear(6, 6),
            free=nn.Parameter(torch.ones(2, 6)))
    )  # fmt: skip
    before = state(model)
    report = nk.fold_(model, torch.randn(4, 6))
    assert "norm" not in {f.name for f in report.folded if f.what == "weight"}
    assert reason in refusals(report)
    if not report.folded:
        assert same(state(model), before)


def test_a_factor_is_no_obstacle_without_a_bias() -> None:
    model = stirred(Net(lambda m, x: m.head(m.norm(x) * 3.0 * x[..., :1]), norm=nn.RMSNorm(6), head=nn.Linear(6, 4)))
    x = torch.randn(5, 6)
    before = in_float64(model, x)
    assert nk.fold_(model, x).folded
    assert torch.allclose(in_float64(model, x), before, atol=1e-4)


def test_a_bias_needs_a_reader_with_a_bias() -> None:
    model = stirred(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4, bias=False)))
    x, before = torch.randn(5, 6), state(model)
    report = nk.fold_(model, x)
    assert "give 1 a bias of zeros first" in refusals(report)
    assert same(state(model), before)
    model[1].bias = nn.Parameter(torch.zeros(4))
    assert nk.fold_(model, x).folded


def test_a_bias_does_not_pass_a_border_of_zeros() -> None:
    def net(bias: bool, mode: str) -> nn.Module:
        conv = nn.Conv1d(6, 4, 3, padding=1, padding_mode=mode)
        return stirred(Net(lambda m, x: m.conv(m.norm(x).mT), norm=nn.LayerNorm(6, bias=bias), conv=conv))

    x = torch.randn(2, 5, 6)
    assert "pads with zeros" in refusals(nk.fold_(net(True, "zeros"), x))
    for bias, mode in ((False, "zeros"), (True, "circular")):
        model = net(bias, mode)
        before = in_float64(model, x)
        assert nk.fold_(model, x).folded
        assert torch.allclose(in_float64(model, x), before, atol=1e-5)


def test_weights_tied_to_another_place_are_refused() -> None:
    tower = stirred(Tower(nn.RMSNorm))
    tower.head.weight = tower.tokens.weight
    ids = torch.randint(0, 17, (2, 5))
    report = nk.fold_(tower, ids)
    assert {f.name for f in report.folded} == {"blocks.0.norm", "blocks.1.norm"}
    assert "final: weight stays: head.weight shares its memory with tokens.weight" in refusals(report)
    assert tower.head.weight is tower.tokens.weight

    twin = stirred(Tower(nn.RMSNorm))
    twin.blocks[1].norm.weight = twin.blocks[0].norm.weight
    report = nk.fold_(twin, ids)
    assert {f.name for f in report.folded} == {"final"}
    assert refusals(report).count("shares its memory") == 2


def test_a_module_under_two_names_is_one_module() -> None:
    head = nn.Linear(6, 6)
    model = stirred(Net(lambda m, x: m.a(m.norm(x)) + m.b(m.norm(x)), norm=nn.RMSNorm(6), a=head, b=head))
    x = torch.randn(4, 6)
    before = in_float64(model, x)
    assert len(nk.fold_(model, x).folded) == 1
    assert torch.allclose(in_float64(model, x), before, atol=1e-5)


def test_the_second_call_changes_nothing_and_says_so() -> None:
    model, ids = stirred(Tower(nn.LayerNorm)), torch.randint(0, 17, (2, 5))
    nk.fold_(model, ids)
    before = state(model)
    report = nk.fold_(model, ids)
    assert report.folded == ()
    assert report.refused == ()
    assert set(report.already) == {"blocks.0.norm", "blocks.1.norm", "final"}
    assert str(report).startswith("nothing folded: 0 refused, 3 had nothing left to fold")
    assert same(state(model), before)


def test_half_precision_says_what_it_costs() -> None:
    torch.manual_seed(5)
    model = stirred(Tower(nn.RMSNorm)).to(torch.bfloat16)
    ids = torch.randint(0, 17, (2, 5))
    own, exact = model(ids).detach(), in_float64(model, ids)
    error = nk.fold_(model, ids).error
    assert error is not None
    after, size = model(ids).detach(), float(exact.abs().max())
    assert error.dtype == torch.bfloat16
    assert error.moved == pytest.approx(float((after.double() - own.double()).abs().max()) / size)
    for figure, out in ((error.before, own), (error.after, after)):
        assert figure == pytest.approx(float((out.double() - exact).norm() / exact.norm()), rel=1e-6)
    assert error.float64 < 1e-13 < error.moved


def test_undo_is_bit_exact_and_protects_later_changes() -> None:
    model, ids = stirred(Tower(nn.LayerNorm)), torch.randint(0, 17, (2, 5))
    before, out, members = state(model), model(ids), set(vars(model.final))
    report = nk.fold_(model, ids)
    assert not same(state(model), before)
    report.undo()
    assert same(state(model), before)
    assert torch.equal(model(ids), out)
    assert set(vars(model.final)) == members
    report.undo()

    report = nk.fold_(model, ids)
    with torch.no_grad():
        model.head.weight += 1
    changed = state(model)
    with pytest.raises(ValueError, match=r"head\.weight was written to since the fold"):
        report.undo()
    assert same(state(model), changed)


def test_keyword_inputs_and_inputs_that_are_kept() -> None:
    model = stirred(
        Net(lambda m, *, x, kept: (kept.append(x), m.head(m.norm(x)))[1], norm=nn.RMSNorm(6), head=nn.Linear(6, 4))
    )
    kept: list[Tensor] = []
    assert nk.fold_(model, x=torch.randn(3, 6), kept=kept).folded
    assert kept == []


def test_wrong_algebra_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linears.Linear.along_inputs
    monkeypatch.setattr(linears.Linear, "along_inputs", lambda self, c: right(self, c * (1 + 1e-9)))
    model, ids = stirred(Tower(nn.RMSNorm)), torch.randint(0, 17, (2, 5))
    before = state(model)
    report = nk.fold_(model, ids)
    assert report.folded == ()
    assert "all folds were taken back" in refusals(report)
    assert same(state(model), before)


def test_a_reader_that_no_operator_shows_is_caught_by_the_outputs() -> None:
    def wiring(m: Net, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.head(y) + float(y.numpy().max())

    model = stirred(Net(wiring, norm=nn.RMSNorm(6), head=nn.Linear(6, 4)))
    before = state(model)
    report = nk.fold_(model, torch.randn(3, 6))
    assert "all folds were taken back" in refusals(report)
    assert same(state(model), before)


class Experts(nn.Module):
    """One expert per token, chosen by the sign of a fixed channel; x + expert(norm(x))."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.tokens, self.norm, self.final = nn.Embedding(9, 6), norm, nn.LayerNorm(6)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor, choice: Tensor) -> Tensor:
        x = self.tokens(ids)
        y, rows = self.norm(x), []
        for row, expert in enumerate(choice.tolist()):
            rows.append(x[row] + self.experts[expert](y[row]))
        return self.head(self.final(torch.stack(rows)))


def test_an_expert_that_no_token_went_to_may_be_a_reader_and_a_writer() -> None:
    model, ids = stirred(Experts(nn.LayerNorm(6))), torch.tensor([1, 5, 7])
    report = nk.fold_(model, ids, torch.tensor([0, 0, 0]))
    assert {(f.name, f.what) for f in report.folded} == {("final", "weight"), ("norm", "mean")}
    assert "norm: weight stays: experts.1.0 was not called on this example and may read it" in refusals(report)
    assert "final: mean stays: experts.1.2 was not called on this example and may write to it" in refusals(report)
    model, both = stirred(Experts(nn.LayerNorm(6))), torch.tensor([0, 1, 0])
    before = in_float64(model, ids, both)
    report = nk.fold_(model, ids, both)
    assert {(f.name, f.what) for f in report.folded} == {
        (name, what) for name in ("norm", "final") for what in ("weight", "mean")
    }
    assert float((in_float64(model, ids, both) - before).abs().max()) < 4 * 8 * U32 * float(before.abs().max())


def test_an_optional_head_beside_the_one_that_ran() -> None:
    model = stirred(
        Net(lambda m, x: m.head(m.norm(x)), norm=nn.RMSNorm(6), head=nn.Linear(6, 4), value=nn.Linear(6, 1))
    )
    assert "value was not called on this example" in refusals(nk.fold_(model, torch.randn(3, 6)))
    model.value = nn.Linear(5, 1).eval()
    assert nk.fold_(model, torch.randn(3, 6)).folded
