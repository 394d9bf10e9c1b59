"""What is read off one forward: values through views and writes, norms by what they compute, streams by their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import normkit as nk
from normkit.surgery.flow.record import LEAVES, Flow, record
from normkit.surgery.flow.sightings import Sighting, sightings
from normkit.surgery.flow.stream import streams
from surgery.stacks import WIDTH, Attention, FeedForward, Stack, ids, wired


class Run(nn.Module):
    """A module around a function; ``work`` is a weight for it to use."""

    def __init__(self, function: Callable[..., Tensor], width: int = 8):
        super().__init__()
        self.function = function
        self.work = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def ran(function: Callable[..., Tensor], *args: Tensor) -> Flow:
    flow = record(Run(function), args or (torch.randn(2, 5, 8),), {})
    assert flow.error is None
    return flow


def operators(flow: Flow) -> list[str]:
    return [node.op for node in flow.nodes if node.op not in LEAVES]


def test_a_view_is_the_value_itself() -> None:
    flow = ran(lambda _, x: x.transpose(0, 1)[1:].exp().unsqueeze(0).transpose(1, 2).neg())
    assert operators(flow) == ["exp", "neg"]
    assert [ref.node for ref in flow.nodes[-1].inputs] == [flow.nodes[-2].index]


def test_a_write_in_place_is_a_new_value_for_every_view() -> None:
    def function(_: Run, x: Tensor) -> Tensor:
        buffer = torch.zeros(2, 5, 8)
        row = buffer[0]
        row += x[0].exp()
        return buffer.sin()

    flow = ran(function)
    add = next(node for node in flow.nodes if node.op == "add")
    last = flow.nodes[-1]
    assert last.op == "sin"
    assert last.inputs[0].node == add.index
    assert last.live


def test_storage_that_is_freed_and_used_again_is_another_value() -> None:
    def function(_: Run, x: Tensor) -> Tensor:
        total = x.exp()
        for _ in range(50):
            x.sin()  # freed at once: the constant below is made without an operator and may lie where this lay
            total = total * torch.tensor(2.0)
        return total

    flow = ran(function)
    products = [node for node in flow.nodes if node.op == "mul"]
    assert len(products) == 50
    assert {len(flow.live_inputs(node)) for node in products} == {1}


def test_only_what_depends_on_the_input_is_live() -> None:
    flow = ran(lambda run, x: x * (run.gain + 1) + torch.arange(8).float())
    live = {node.op: node.live for node in flow.nodes}
    assert live["mul"]
    assert not live["arange"]
    assert [node.live for node in flow.nodes if node.op == "add"] == [False, True]


def test_calls_cover_the_operators_of_the_modules_they_call() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    flow = record(model, (torch.randn(3, 4),), {})
    spans = {call.name: [flow.nodes[i].op for i in range(call.first, call.last)] for call in flow.calls}
    assert [op for op in spans["0"] if op not in LEAVES] == ["addmm", "relu"]
    assert [op for op in spans[""] if op not in LEAVES] == ["addmm", "relu", "addmm"]


def test_an_error_is_recorded_as_far_as_it_went() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("lost")

    flow = record(nn.Sequential(nn.Linear(4, 4), Fails()), (torch.randn(2, 4),), {})
    assert isinstance(flow.error, KeyError)
    assert flow.failed_in == "1"
    assert operators(flow) == ["addmm"]


def test_no_hook_stays() -> None:
    kinds = ("", "_always_called", "_with_kwargs")
    hooks = ("_global_forward_pre_hooks", *(f"_global_forward_hooks{kind}" for kind in kinds))
    before = [len(getattr(torch_module, name)) for name in hooks]
    ran(lambda _, x: x.exp())
    record(nn.Linear(3, 4), (torch.randn(2, 9),), {})
    assert [len(getattr(torch_module, name)) for name in hooks] == before


def written(kind: str) -> Callable[[Run, Tensor], Tensor]:
    """A norm as people write it into a forward, on a value that a layer made."""

    def function(run: Run, x: Tensor) -> Tensor:
        x, w = run.work(x), run.gain
        f = x.float()
        if kind == "rms":
            return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        if kind == "rms, product and root":
            return (f / torch.sqrt((f * f).mean(dim=-1, keepdim=True) + 1e-5)) * w
        if kind == "rms, power":
            return (f * torch.pow(f.square().mean(-1, keepdim=True) + 1e-5, -0.5) * (1 + w)).type_as(x)
        if kind == "rms, mean by hand":
            return f * (f.pow(2).sum(-1, keepdim=True) / 8 + 1e-5).rsqrt() * w
        if kind == "rms of the variance":
            return f * (w * torch.rsqrt(f.var(-1, keepdim=True) + 1e-5))
        if kind == "layer":
            d = f - f.mean(-1, keepdim=True)
            return w * (d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5))
        if kind == "layer, variance":
            d = f - f.mean(-1, keepdim=True)
            return d / torch.sqrt(f.var(-1, keepdim=True, unbiased=False) + 1e-5)
        if kind == "l2":
            return f * torch.rsqrt((f * f).sum(-1, keepdim=True) + 1e-5)
        if kind == "l2, normalize":
            return F.normalize(f, dim=-1, eps=1e-5)
        if kind == "torch rms":
            return F.rms_norm(x, (8,), w, 1e-5)
        assert kind == "torch layer"
        return F.layer_norm(x, (8,), w, None, 1e-5)

    return function


KINDS = [
    "rms", "rms, product and root", "rms, power", "rms, mean by hand", "rms of the variance", "layer",
    "layer, variance", "l2", "l2, normalize", "torch rms", "torch layer",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_seen_however_it_is_written(kind: str, dtype: torch.dtype) -> None:
    model = Run(written(kind)).to(dtype)
    flow = record(model, (torch.randn(2, 5, 8, dtype=dtype),), {})
    assert flow.error is None
    (seen,) = sightings(flow)
    word = kind.removeprefix("torch ").split(",")[0].split(" ")[0]
    assert (seen.kind, seen.eps, seen.size, seen.axes, seen.module) == (word, 1e-5, 8, (-1,), None)
    assert flow.nodes[seen.x.node].op == "addmm"
    assert seen.out == flow.outputs[0].node
    unweighted = kind in ("layer, variance", "l2", "l2, normalize")
    assert seen.weights == (() if unweighted else ("gain",))


@pytest.mark.parametrize(
    "function",
    [
        lambda run, x: run.work(x).softmax(-1),
        lambda run, x: run.work(x) * run.work(x).sigmoid(),
        lambda run, x: x / x.sum(-1, keepdim=True),
        lambda run, x: run.work(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),  # another value's size
        lambda run, x: x.exp() * torch.rsqrt(x.exp().mean(-1, keepdim=True) + 1e-6),
        lambda run, x: (y := run.work(x)) * torch.rsqrt(y.mean(-1, keepdim=True) + 1e-6),  # no square
        lambda run, x: (x - x.mean(-1, keepdim=True)).tanh(),
        lambda run, x: x * x.norm(dim=1, keepdim=True).div(x.norm(dim=1, keepdim=True).mean(-1, keepdim=True) + 1e-6),
    ],
    ids=["softmax", "gate", "share", "another's", "exponential", "no square", "centred", "grn"],
)
def test_what_is_no_norm(function: Any) -> None:
    assert sightings(ran(function)) == []


@pytest.mark.parametrize(
    ("norm", "shape", "kind", "size"),
    [
        (nn.GroupNorm(2, 8), (3, 8, 5), "group", 20),
        (nn.BatchNorm1d(8), (3, 8, 5), "batch", 15),
        (nn.InstanceNorm1d(8), (3, 8, 5), "instance", 5),
        (nn.LayerNorm((8, 5)), (3, 8, 5), "layer", 40),
    ],
)
def test_norms_across_positions(norm: nn.Module, shape: tuple[int, ...], kind: str, size: int) -> None:
    flow = record(nn.Sequential(nn.Identity(), norm).eval(), (torch.randn(shape),), {})
    (seen,) = sightings(flow)
    if kind == "batch":
        assert (seen.module, seen.kind) == ("1", "batch")
    else:
        assert (seen.module, seen.kind, seen.size) == ("1", kind, size)


def stream_of(model: nn.Module, *args: Tensor) -> Any:
    flow = record(model, args, {})
    assert flow.error is None
    found = sightings(flow)
    return streams(flow, found), found


@pytest.mark.parametrize("name", sorted(nk.WIRINGS))
def test_every_row_of_the_table_is_recognised(name: str) -> None:
    kept, _ = stream_of(wired(name, norm=nn.LayerNorm), ids())
    assert [stream.wiring for stream in kept] == [name]
    assert kept[0].commonest.formula == nk.WIRINGS[name].formula
    assert len(kept[0].joins) == (3 if name == "parallel" else 6)
    assert (kept[0].final is not None) == nk.WIRINGS[name].final_norm


class OneAfterTheOther(nn.Module):
    """x + attention + mlp, both of the same normed value: parallel, however it is bracketed."""

    def __init__(self, order: int):
        super().__init__()
        self.norm, self.attention, self.mlp, self.order = nn.LayerNorm(WIDTH), Attention(), FeedForward(), order

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        a, m = self.attention(y), self.mlp(y)
        return (lambda: x + a + m, lambda: x + (a + m), lambda: m + a + x, lambda: (x + m) + a)[self.order]()


@pytest.mark.parametrize("order", range(4))
def test_parallel_however_it_is_bracketed(order: int) -> None:
    kept, _ = stream_of(Stack([OneAfterTheOther(order) for _ in range(2)], nn.LayerNorm(WIDTH)), ids())
    assert [(stream.wiring, len(stream.joins)) for stream in kept] == [("parallel", 2)]


class Experts(nn.Module):
    """Two experts summed are one sublayer, not two in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.first, self.second = Attention(), FeedForward(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + (self.first(y) + self.second(y))


def test_summed_experts_are_not_parallel() -> None:
    kept, _ = stream_of(Stack([Experts() for _ in range(2)], nn.LayerNorm(WIDTH)), ids())
    assert [[join.wiring for join in stream.joins] for stream in kept] == [["pre"] * 4]


class SkipInside(nn.Module):
    """A sublayer with a skip of its own, and rotated queries: neither is a step of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), FeedForward(), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * 0.8 + y.roll(1, -1) * 0.6
        y = y + self.inner(y)
        return x + self.scale * self.out(y).to(torch.float64).to(x.dtype)


def test_skips_inside_a_sublayer_are_left_out() -> None:
    kept, _ = stream_of(Stack([SkipInside() for _ in range(3)], nn.LayerNorm(WIDTH)), ids())
    assert [(stream.wiring, len(stream.joins)) for stream in kept] == [("pre", 3)]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x += self.mlp(self.norm(x))
        return x


def test_residuals_added_in_place() -> None:
    kept, _ = stream_of(Stack([InPlace() for _ in range(3)], nn.LayerNorm(WIDTH)), ids())
    assert [(stream.wiring, len(stream.joins)) for stream in kept] == [("pre", 3)]


def test_pytorchs_own_encoder_layers() -> None:
    for first, wiring in ((True, "pre"), (False, "post")):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        report = nk.audit(encoder, torch.randn(2, 5, 16))
        assert [(stream.wiring, len(stream.joins)) for stream in report.streams] == [(wiring, 4)]


def test_sightings_are_in_order_and_owned() -> None:
    flow = record(wired("sandwich", 1, nn.LayerNorm), (ids(),), {})
    found: list[Sighting] = sightings(flow)
    assert [s.out for s in found] == sorted(s.out for s in found)
    assert [s.module for s in found] == [
        "layers.0.norm_in", "layers.0.norm_branch", "layers.1.norm_in", "layers.1.norm_branch", "norm",
    ]  # fmt: skip


class Ours(nn.Module):
    """A norm of ours called as a function, between two pieces of work."""

    def __init__(self, norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.into, self.out = norm, nn.Linear(6, 6), nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.into(x), self.gain))


@pytest.mark.parametrize(
    ("norm", "kind", "eps", "size"),
    [
        (lambda x, g: nk.rms_norm(x, g, eps=1e-3), "rms", 1e-3, 6),
        (lambda x, g: nk.layer_norm(x, g, eps=1e-3), "layer", 1e-3, 6),
        (lambda x, g: nk.l2_norm(x, eps=1e-3) * g, "l2", 1e-3, 6),
        (lambda x, g: nk.add_rms_norm(x, x, g, eps=1e-3)[0], "rms", 1e-3, 6),
        (lambda x, g: nk.gated_rms_norm(x, x, g, eps=1e-3), "rms", 1e-3, 6),
        (lambda x, g: nk.group_norm(x, 2, g, eps=1e-3), "group", 1e-3, 15),
        (lambda x, g: nk.instance_norm(x, g, eps=1e-3), "instance", 1e-3, 5),
        (lambda x, g: nk.batch_norm(x, None, None, g, training=True, eps=1e-3), "batch", 1e-3, 20),
    ],
)
def test_our_own_functions_are_seen(norm: Callable[[Tensor, Tensor], Tensor], kind: str, eps: float, size: int) -> None:
    x = torch.randn(4, 5, 6)
    x[0] *= 1e30  # a row that our formula rescales
    found = sightings(record(Ours(norm), (x,), {}))
    assert [(s.kind, s.eps, s.size, s.module) for s in found] == [(kind, eps, size, None)]
    assert kind == "l2" or found[0].weights == ("gain",)
