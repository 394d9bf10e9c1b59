"""Norms of DTensors on two and four ranks: one process's results, and no more on the wire than a row lacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normkit as nk
from ranks.processes import run
from rows import randn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
N, L, H, D = 4, 6, 4, 6
C = H * D

Norm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
NORMS: dict[str, Norm] = {
    "rms": lambda x, w, b: (nk.rms_norm(x, w, eps=1e-3),),
    "llama": lambda x, w, b: (nk.rms_norm(x.bfloat16(), w.bfloat16(), spec=nk.LLAMA),),
    "gemma": lambda x, w, b: (nk.rms_norm(x, w, spec=nk.GEMMA),),
    "layer": lambda x, w, b: (nk.layer_norm(x, w, b, eps=1e-3),),
    "add": lambda x, w, b: nk.add_rms_norm(x, 2 * x, w, alpha=0.5, eps=1e-3),
    "unweighted": lambda x, w, b: (nk.l2_norm(x, eps=1e-3),),
}
NUMBERS = {"layer": 2}  # a row, forward and backward; one for all others


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = randn(N, L, C)
    x[0, 0] *= 1e30  # squares beyond float32, which no rank alone would rescale alike
    x[1, 1] += 1000
    return x, randn(C, seed=1), randn(C, seed=2), randn(N, L, C, seed=3)


def gradients(norm: Norm, x: Tensor, w: Tensor, b: Tensor, dy: Tensor, seen: Callable[[str], Any]) -> list[Any]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    with seen("forward"):
        results = norm(*leaves)
    upstream = [dy.to(y.dtype) for y in results]
    with seen("backward"):
        found = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    return [*(y.detach() for y in results), *found]


class Wire:
    """Counts the bytes that all-reduces send, and refuses every collective that gathers activations."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {"forward": 0, "backward": 0}
        self.phase = ""

    def __call__(self, phase: str) -> Any:
        from torch.distributed.tensor.debug import CommDebugMode

        self.phase = phase
        return CommDebugMode()


def work(rank: int, ranks: int) -> dict[Any, Any]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,))
    wire, reduce = Wire(), dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        wire.sent[wire.phase] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting  # type: ignore[assignment]
    found: dict[Any, Any] = {}
    meshes = {
        "tokens": (mesh, [Shard(1)], [Replicate()]),
        "hidden": (mesh, [Shard(2)], [Shard(0)]),
        "replicated": (mesh, [Replicate()], [Replicate()]),
        "gathered weight": (mesh, [Shard(2)], [Replicate()]),
    }
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2))
        meshes["both"] = (square, [Shard(0), Shard(2)], [Replicate(), Shard(0)])
        meshes["batch and tokens"] = (square, [Shard(0), Shard(1)], [Replicate(), Replicate()])
    for layout, (m, of_x, of_w) in meshes.items():
        x, w, b, dy = (distribute_tensor(t, m, of) for t, of in zip(inputs(), (of_x, of_w, of_w, of_x), strict=True))
        for name, norm in NORMS.items():
            wire.sent = {"forward": 0, "backward": 0}
            results = gradients(norm, x, w, b, dy, wire)
            found[layout, name] = ([None if t is None else t.full_tensor() for t in results], dict(wire.sent))

    # A full-width query norm over heads that are split over ranks.
    q, g = inputs()[0].unflatten(2, (H, D)), inputs()[1].view(H, D)
    sharded = nk.rms_norm(distribute_tensor(q, mesh, [Shard(2)]), distribute_tensor(g, mesh, [Shard(0)]), axis=(2, 3))
    found["query"] = sharded.full_tensor()

    x, w, b, dy = inputs()
    with pytest.raises(ValueError, match="partial sum"):
        nk.rms_norm(DTensor.from_local(x, mesh, [Partial()]))
    with pytest.raises(ValueError, match="NormParallel"):
        nk.rms_norm(distribute_tensor(x, mesh, [Shard(1)]), w)
    with pytest.raises(ValueError, match="residual must lie as x"):
        nk.add_rms_norm(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="needs them whole"):
        nk.rms_norm(distribute_tensor(x, mesh, [Shard(2)]), spec=nk.ROUNDED_ROOT_RMS)
    with pytest.raises(ValueError, match="features"):
        nk.NormParallel("rows")  # type: ignore[arg-type]

    # Modules in a plan: one step of an optimizer, with gradients clipped by their norm.
    for split, of_x in (("tokens", Shard(1)), ("features", Shard(2)), ("torch", Shard(1))):
        model = nn.ModuleDict({"norm": module()})
        style = SequenceParallel() if split == "torch" else nk.NormParallel(split)
        parallelize_module(model, mesh, {"norm": style})
        found["step", split] = trained(model, distribute_tensor(x, mesh, [of_x]), distribute_tensor(dy, mesh, [of_x]))
    frozen = nn.ModuleDict({"norm": module().requires_grad_(False)})
    parallelize_module(frozen, mesh, {"norm": nk.NormParallel("tokens", token_axis=0, local_output=True)})
    leaf = x.chunk(ranks)[rank].clone().requires_grad_()
    y = frozen["norm"](leaf)
    y.backward(dy.chunk(ranks)[rank])
    assert type(y) is Tensor
    assert not frozen["norm"].weight.requires_grad
    found["frozen"] = (y.detach(), leaf.grad)
    return found


def module() -> nk.LayerNorm:
    norm = nk.LayerNorm(C, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(randn(C, seed=1))
        norm.bias.copy_(randn(C, seed=2))
    return norm


def trained(model: nn.ModuleDict, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    (model["norm"](x) * dy).sum().backward()
    size = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    whole = [size, x.grad, *model.parameters()]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in whole]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(work, request.param, tmp_path_factory.mktemp("ranks"))


def alike(got: Tensor | None, expected: Tensor | None, what: str, half: bool = False) -> None:
    if got is None or expected is None:
        assert got is None and expected is None, what  # noqa: PT018
        return
    assert got.dtype == expected.dtype
    # float32 statistics against sums split over ranks: a few roundings of values within 1000 of their spread, relative
    # to the largest; through bfloat16 one step, where a sum on the edge of two rounds the other way.
    scale = float(expected.double().abs().max())
    bound = (torch.finfo(torch.bfloat16).eps if half else 1000 * torch.finfo(torch.float32).eps) * scale
    assert float((got.double() - expected.double()).abs().max()) <= bound, what


@pytest.mark.parametrize("name", NORMS)
def test_every_layout_gives_one_process_results(ranks: list[dict[Any, Any]], name: str):
    x, w, b, dy = inputs()
    expected = gradients(NORMS[name], x, w, b, dy, lambda phase: nullcontext())
    layouts = [key[0] for key in ranks[0] if isinstance(key, tuple) and key[1] == name]
    assert {"tokens", "hidden"} <= set(layouts)
    for found in ranks:
        for layout in layouts:
            for i, (got, one) in enumerate(zip(found[layout, name][0], expected, strict=True)):
                alike(got, one, f"{layout}, {name}, result {i}", half=name == "llama")


@pytest.mark.parametrize("name", NORMS)
def test_what_goes_over_the_wire(ranks: list[dict[Any, Any]], name: str):
    rows, each = N * L, 8 * NUMBERS.get(name, 1)
    for found in ranks:
        for layout in ("tokens", "replicated"):
            assert found[layout, name][1] == {"forward": 0, "backward": 0}
        assert found["hidden", name][1] == {"forward": rows * each, "backward": rows * each}
        if ("both", name) in found:  # half the rows on each of two pairs of ranks
            assert found["both", name][1] == {"forward": rows // 2 * each, "backward": rows // 2 * each}
    print(f"\n{name}, {rows} rows of {C} over {len(ranks)} ranks: {ranks[0]['hidden', name][1]} bytes a rank")  # noqa: T201


def test_a_query_norm_over_heads_on_all_ranks(ranks: list[dict[Any, Any]]):
    x, w, _, _ = inputs()
    whole = nk.rms_norm(x, w).unflatten(2, (H, D))
    for found in ranks:
        alike(found["query"], whole, "query")


@pytest.mark.parametrize("split", ["tokens", "features", "torch"])
def test_a_training_step_counts_every_gradient_once(ranks: list[dict[Any, Any]], split: str):
    x, _, _, dy = inputs()
    expected = trained(nn.ModuleDict({"norm": module()}), x, dy)
    for found in ranks:
        for i, (got, one) in enumerate(zip(found["step", split], expected, strict=True)):
            alike(got, one, f"{split}, {i}")


def test_frozen_weights_and_local_tensors(ranks: list[dict[Any, Any]]):
    x, _, _, dy = inputs()
    leaf = x.clone().requires_grad_()
    y = module()(leaf)
    y.backward(dy)
    alike(torch.cat([found["frozen"][0] for found in ranks]), y.detach(), "y")
    alike(torch.cat([found["frozen"][1] for found in ranks]), leaf.grad, "dx")
