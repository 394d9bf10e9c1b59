"""`fold_`: the mean of a LayerNorm into everything that writes its input."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from rows import always
from surgery.fold_models import Net, Tower, identified_once, in_float64, same, state, stirred

__all__ = ["identified_once"]

U32 = torch.finfo(torch.float32).eps / 2


def tower(seed: int = 0, offset: float = 0.0) -> tuple[Tower, Tensor]:
    """Return a tower whose stream has a large mean of its own, and ids."""
    torch.manual_seed(seed)
    model = stirred(Tower(nn.LayerNorm), seed)
    with torch.no_grad():
        model.tokens.weight += offset
        model.blocks[0].down.bias += offset
    return model, torch.randint(0, 17, (2, 5))


def reasons(report: nk.FoldReport) -> str:
    return "\n".join(str(r) for r in report.refused if r.what == "mean")


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_every_writer_loses_its_mean_and_the_norm_computes_an_rms(offset: float) -> None:
    model, ids = tower(1, offset)
    exact = in_float64(model, ids)
    report = nk.fold_(model, ids)
    assert {f.name for f in report.folded if f.what == "mean"} == {"blocks.0.norm", "blocks.1.norm", "final"}
    writers = {"tokens.weight", "positions", "blocks.0.down", "blocks.1.down"}
    assert set(next(f.into for f in report.folded if f.what == "mean" and f.name == "final")) == writers
    # The mean of 13 numbers that were each rounded once.
    for values in (model.tokens.weight, model.positions, model.blocks[0].down.weight.T, model.blocks[0].down.bias):
        assert bool((values.mean(-1).abs() <= 2 * U32 * values.abs().max()).all())
    x = torch.randn(4, 13) + 3
    assert torch.equal(model.final(x), model.final(input=x))
    assert torch.equal(model.final(x), nk.rms_norm(x, model.final.weight, model.final.bias, eps=1e-5))
    assert report.error is not None
    assert report.error.float64 <= report.error.bound
    # Rounded weights, and float32 sums of 26 terms in five layers; the offset is gone from the stream.
    assert float((model(ids).double() - exact).detach().abs().max()) < 5 * 26 * U32 * float(exact.abs().max())
    if offset:
        assert report.error.after < report.error.before


def test_the_stream_may_be_cast_scaled_and_joined() -> None:
    def wiring(m: Net, images: Tensor) -> Tensor:
        patches = m.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(images), -1, -1), patches], 1) + m.positions
        x = (x * 3.0).contiguous()
        x += m.extra(images.mean((2, 3))).unsqueeze(1)
        return m.head(m.norm(x)[:, 0])

    torch.manual_seed(2)
    model = stirred(
        Net(wiring, patch=nn.Conv2d(3, 8, 4, 4), extra=nn.Linear(3, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 5),
            token=nn.Parameter(torch.randn(1, 1, 8)), positions=nn.Parameter(torch.randn(1, 5, 8)))
    )  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    exact = in_float64(model, images)
    report = nk.fold_(model, images)
    assert {f.what for f in report.folded} == {"weight", "mean"}
    assert set(report.folded[1].into) == {"patch", "extra", "token", "positions"}
    assert float((in_float64(model, images) - exact).abs().max()) < 5 * 48 * U32 * float(exact.abs().max())


NOBODY = "cannot be made to have mean zero"


@pytest.mark.parametrize(
    ("wiring", "reason"),
    [
        (lambda m, x: m.norm(m.a(x)) + m.a(x).relu(), "a, which writes to it, is also read by aten.relu"),
        (lambda m, x: m.norm(y := m.a(x)) + m.rms(y), "a, which writes to it, is also read by rms"),
        (lambda m, x: m.norm(y := m.a(x)) + m.b(y), "a, which writes to it, is also read by b"),
        (lambda m, x: (m.norm(y := m.a(x)), y), "is also read by the model's own output"),
        (lambda m, x: m.norm(m.a(x) + x), f"{NOBODY}: a value that no linear layer wrote is added"),
        (lambda m, x: m.norm(m.a(x) + 1.0), f"{NOBODY}: a value that no linear layer wrote is added"),
        (lambda m, x: m.norm(m.a(x) + m.a(x).mT), NOBODY),
        (lambda m, x: m.norm(m.a(x) * m.gain), NOBODY),
        (lambda m, x: m.norm(m.a(x).relu()), f"{NOBODY}: a value that no linear layer wrote"),
        (lambda m, x: m.norm(m.a(x) + m.rms(m.b(x))), "rms writes to it"),
        (lambda m, x: m.norm(m.a(x)[:, ::2].repeat(1, 2)), "norm normalises other rows than a writes"),
        (lambda m, x: m.norm(m.a(x).mT), "norm normalises other rows than a writes"),
        (lambda m, x: m.norm(m.a(x)) + m.a.weight, "a parameter of a is also read by aten.add.Tensor"),
        (lambda m, x: m.norm(m.a(x) + m.gain) + m.gain.sin(), "gain, which writes to it, is also read by aten.sin"),
    ],
)  # fmt: skip
def test_a_reader_that_sees_the_mean_keeps_it(wiring: Any, reason: str) -> None:
    torch.manual_seed(3)
    model = stirred(
        Net(wiring, a=nn.Linear(6, 6), b=nn.Linear(6, 6), rms=nn.RMSNorm(6), norm=nn.LayerNorm(6),
            gain=nn.Parameter(torch.ones(6)))
    )  # fmt: skip
    x, before = torch.randn(6, 6), state(model)
    report = nk.fold_(model, x)
    assert reason in reasons(report)
    assert all(f.what != "mean" for f in report.folded)
    if not report.folded:
        assert same(state(model), before)


def test_a_grouped_convolution_is_refused() -> None:
    conv = nn.Conv1d(6, 6, 3, groups=6)
    model = stirred(Net(lambda m, x: m.norm(m.conv(x).mT), conv=conv, norm=nn.LayerNorm(6)))
    assert "conv, which writes to it, is a grouped convolution" in reasons(nk.fold_(model, torch.randn(2, 6, 9)))


def test_a_tied_table_keeps_its_mean() -> None:
    model, ids = tower()
    model.head = nn.Linear(13, 17, bias=False).eval()
    model.head.weight = model.tokens.weight
    report = nk.fold_(model, ids)
    assert reasons(report).count("whose table is also the weight of head") == 3
    assert {(f.name, f.what) for f in report.folded} == {("blocks.0.norm", "weight"), ("blocks.1.norm", "weight")}


@pytest.mark.parametrize(
    "spec",
    always(
        [nk.TORCH_LAYER_NORM, nk.DEBERTA, nk.NEMOTRON, nk.OLMO], lambda spec: spec in (nk.TORCH_LAYER_NORM, nk.DEBERTA)
    ),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_norm_convention_has_its_rms(spec: nk.NormSpec, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    norm = nk.LayerNorm(9, spec=spec, eps=1e-3)
    model = stirred(nn.Sequential(nn.Linear(5, 9), norm, nn.Linear(9, 4))).to(dtype)
    x = torch.randn(6, 5, dtype=dtype)
    exact = in_float64(model, x)
    report = nk.fold_(model, x)
    assert "mean" in {f.what for f in report.folded}
    unit = torch.finfo(dtype).eps / 2
    # Three layers with rounded weights and results, sums of up to 9 terms.
    assert float((model(x).double() - exact).detach().abs().max()) < 3 * (9 + 3) * unit * float(exact.abs().max())


def test_the_instance_is_what_it_was_but_for_its_forward() -> None:
    model, ids = tower()
    members, bystander = set(vars(model.final)), nn.LayerNorm(13)
    nk.fold_(model, ids)
    out = model(ids)
    assert type(model.final) is nn.LayerNorm
    assert set(vars(model.final)) - members == {"forward", "_normkit_fold_hook"}
    assert "forward" not in vars(bystander)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids), out)
        assert twin.final.forward.args[0] is twin.final
        with torch.no_grad():
            twin.final.weight.fill_(2.0)
        assert not torch.equal(twin(ids), out)
    assert torch.equal(model(ids), out)
    out.sum().backward()
    assert model.tokens.weight.grad is not None


def test_loading_a_checkpoint_gives_the_class_its_forward_back() -> None:
    model, ids = tower(5, 3.0)
    plain, out = state(model), model(ids)
    nk.fold_(model, ids)
    folded, after = state(model), model(ids)
    model.load_state_dict(plain)
    assert torch.equal(model(ids), out)
    assert "forward" not in vars(model.final)
    model.load_state_dict(folded)
    # Mean zero to within rounding: a LayerNorm on it and an RMSNorm agree within a few roundings a layer.
    assert float((model(ids) - after).detach().abs().max()) < 5 * 26 * U32 * float(after.detach().abs().max())
    fresh = Tower(nn.LayerNorm).eval()
    fresh.load_state_dict(folded)
    assert torch.equal(fresh(ids), model(ids))
    assert {f.what for f in nk.fold_(model, ids).folded} == {"mean"}


def test_a_forward_set_by_another_tool_stays() -> None:
    model, ids = tower()
    model.final.forward = functools.partial(nn.LayerNorm.forward, model.final)
    report = nk.fold_(model, ids)
    assert {f.name for f in report.folded if f.what == "mean"} == {"blocks.0.norm", "blocks.1.norm"}
    assert "final: mean stays: its forward is set on the instance, by another tool" in reasons(report)
