"""Norm modules of DTensors under a compiler, on two ranks: one process's values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normkit as nk
from ranks.processes import run
from rows import randn

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed"),
    pytest.mark.slow,  # two processes compile six modules each: half a minute of a core
]
N, L, C = 3, 4, 20
MODULES: dict[str, Any] = {
    "rms": lambda: nk.RMSNorm(C, eps=1e-3),
    "layer": lambda: nk.LayerNorm(C, eps=1e-3),
    "gemma": lambda: nk.RMSNorm(C, eps=1e-3, spec=nk.GEMMA),
}
LAYOUTS = {"tokens": 1, "features": 2}


def made(name: str) -> nn.Module:
    module: nn.Module = MODULES[name]()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(randn(C, seed=1 + i))
    return module


def outcome(module: nn.Module, run: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = run(leaf)
    (y * dy).sum().backward()
    found = [y, leaf.grad, *(p.grad for p in module.parameters())]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in found]


def work(rank: int, ranks: int) -> dict[Any, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, found = init_device_mesh("cpu", (ranks,)), {}
    for name in MODULES:
        for split, axis in LAYOUTS.items():
            model = nn.ModuleDict({"norm": made(name)})
            parallelize_module(model, mesh, {"norm": nk.NormParallel(split)})
            x, dy = (distribute_tensor(randn(N, L, C, seed=s), mesh, [Shard(axis)]) for s in (5, 6))
            torch._dynamo.reset()
            compiled = torch.compile(model["norm"], backend="aot_eager", fullgraph=True)
            try:
                found[name, split] = outcome(model["norm"], compiled, x, dy)
            except Exception as error:
                found[name, split] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(work, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("split", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_compiled_modules_are_one_process(ranks: list[dict[Any, Any]], name: str, split: str):
    module = made(name)
    expected = outcome(module, module, randn(N, L, C, seed=5), randn(N, L, C, seed=6))
    for found in ranks:
        got = found[name, split]
        assert not isinstance(got, str), got
        for a, b in zip(got, expected, strict=True):
            # Rows of 20 and sums over 12 rows, a few dozen roundings of numbers below 100.
            torch.testing.assert_close(a, b, rtol=0, atol=40 * 100 * torch.finfo(torch.float32).eps)
