"""BatchNorm over the ranks of a process group: what one process computes of all batches, and what it costs to send."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normkit as nk
from ranks.processes import run
from rows import randn

CHANNELS = 5
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, mask, dy) of nine samples of seven positions, far from 0."""
    x = randn(9, 7, CHANNELS) * randn(CHANNELS, seed=1).abs() + 100 * randn(CHANNELS, seed=2)
    mask = torch.rand(9, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    return x.to(dtype), mask, randn(9, 7, CHANNELS, seed=4).to(dtype)


def shares(ranks: int) -> list[slice]:
    """Return uneven shares of nine samples, the last of none."""
    cuts = [0, 2, 9, 9, 9][: ranks + 1]
    cuts[-1] = 9
    return [slice(a, b) for a, b in pairwise(cuts)]


def step(norm: nk.BatchNorm, x: Tensor, mask: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    y = norm(leaf, mask)
    y.backward(dy)
    return {
        "y": y.detach(), "dx": leaf.grad, "dw": norm.weight.grad, "db": norm.bias.grad,
        "mean": norm.running_mean.clone(), "var": norm.running_var.clone(), "tracked": norm.num_batches_tracked.clone(),
    }  # fmt: skip


def made(group: Any = None, dtype: torch.dtype | None = None) -> nk.BatchNorm:
    norm = nk.BatchNorm(CHANNELS, process_group=group, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(randn(CHANNELS, seed=5))
        norm.bias.copy_(randn(CHANNELS, seed=6))
    return norm


CASES = [(dtype, masked) for dtype in (torch.float32, torch.bfloat16, torch.float64) for masked in (False, True)]


def work(rank: int, ranks: int) -> dict[Any, Any]:
    sent: list[int] = []
    gather = dist.all_gather

    def counting(received: Any, tensor: Tensor, group: Any = None) -> None:
        sent.append(tensor.numel() * tensor.element_size())
        gather(received, tensor, group=group)

    dist.all_gather = counting  # type: ignore[assignment]
    world = dist.group.WORLD
    found: dict[Any, Any] = {}
    for dtype, masked in CASES:
        x, mask, dy = batch(dtype)
        mine = shares(ranks)[rank]
        norm = made(world, torch.float64 if dtype == torch.float64 else None)
        found[dtype, masked] = step(norm, x[mine], mask[mine] if masked else None, dy[mine])
    found["sent"] = list(sent)
    # Rank 0 holds two zeros, rank 1 six fours, all others nothing.
    uneven = nk.BatchNorm(1, momentum=1.0, process_group=world)
    uneven(torch.tensor([0.0] * 2 if rank == 0 else [4.0] * 6 if rank == 1 else [])[:, None])
    found["uneven"] = (uneven.running_mean, uneven.running_var)
    level = nk.BatchNorm(1, momentum=0.5, process_group=world)  # its mean is the running mean already
    level(torch.tensor([[-1.0], [1.0]]))
    found["level"] = (level.running_mean, level.running_var, level.num_batches_tracked)
    nothing = made(world)
    y = nothing(torch.full((3, 2, CHANNELS), torch.nan), torch.zeros(3, 2, dtype=torch.bool))
    found["nothing"] = (y.detach(), nothing.running_mean, nothing.running_var, nothing.num_batches_tracked)
    try:
        nk.BatchNorm(1, process_group=world)(torch.ones(int(rank == 0), 1))
    except ValueError as error:
        found["single"] = str(error)
    found["copied"] = copy.deepcopy(nothing).process_group is world
    found["pickled"] = pickle.loads(pickle.dumps(nothing)).process_group is None
    sync = nk.BatchNorm.from_torch(nn.SyncBatchNorm(CHANNELS))
    found["sync"] = sync.process_group is world and isinstance(sync.to_torch(nn.SyncBatchNorm), nn.SyncBatchNorm)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(work, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("dtype", "masked"), CASES)
def test_all_ranks_together_are_one_process(ranks: list[dict[Any, Any]], dtype: torch.dtype, masked: bool):
    x, mask, dy = batch(dtype)
    whole = step(made(dtype=torch.float64 if dtype == torch.float64 else None), x, mask if masked else None, dy)
    found = [r[dtype, masked] for r in ranks]
    joined = {key: torch.cat([f[key] for f in found]) for key in ("y", "dx")}
    joined |= {key: sum(f[key] for f in found) for key in ("dw", "db")}
    # μ is rounded to units of its own size, `far` times σ at most, and y and dx with it; dw and db are sums of 63 terms
    # of size up to 16 (|dy| ≤ 4, |x̂| ≤ 4). bfloat16: y and dx are rounded once more, the sums are float32's.
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    far = float(x.double().abs().max() / x.double().std((0, 1)).min())
    bounds = {"y": 4 * far * unit, "dx": 4 * far * unit, "dw": 63 * 16 * far * unit, "db": 63 * 4 * unit}
    relative = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    for key, atol in bounds.items():
        torch.testing.assert_close(joined[key], whole[key], rtol=relative, atol=atol)
    for f in found:
        torch.testing.assert_close(f["mean"], whole["mean"], rtol=1e-6, atol=0)
        torch.testing.assert_close(f["var"], whole["var"], rtol=1e-5, atol=0)
        assert torch.equal(f["tracked"], whole["tracked"])
        assert torch.equal(f["mean"], found[0]["mean"])
        assert torch.equal(f["var"], found[0]["var"])
    if masked:
        assert not joined["y"][~mask].any()
        assert not joined["dx"][~mask].any()


def test_what_goes_over_the_wire(ranks: list[dict[Any, Any]]):
    for found in ranks:
        assert found["sent"] == [8 * (2 * CHANNELS + 1), 8 * 2 * CHANNELS] * len(CASES)
    forward, backward = ranks[0]["sent"][:2]
    print(f"\nbatch norm of {CHANNELS} channels: a rank sends {forward} bytes forward, {backward} backward")  # noqa: T201


def test_two_zeros_and_six_fours(ranks: list[dict[Any, Any]]):
    for found in ranks:
        mean, var = found["uneven"]
        assert float(mean) == 3.0
        assert float(var) == pytest.approx(24 / 7, rel=2**-23)


def test_a_batch_that_leaves_the_mean_where_it_is_counts(ranks: list[dict[Any, Any]]):
    values = 2 * len(ranks)
    for found in ranks:
        mean, var, tracked = found["level"]
        assert float(mean) == 0.0
        assert float(var) == pytest.approx(0.5 + 0.5 * values / (values - 1), rel=2**-23)
        assert int(tracked) == 1


def test_nothing_and_a_single_value_on_all_ranks(ranks: list[dict[Any, Any]]):
    for found in ranks:
        y, mean, var, tracked = found["nothing"]
        assert torch.equal(y, torch.zeros(3, 2, CHANNELS))
        assert torch.equal(mean, torch.zeros(CHANNELS))
        assert torch.equal(var, torch.ones(CHANNELS))
        assert int(tracked) == 0
        assert "over all ranks" in found["single"]
        assert found["copied"]
        assert found["pickled"]
        assert found["sync"]


def test_refused_under_a_compiler():
    class Two:
        def size(self) -> int:
            return 2

    x = randn(4, CHANNELS)
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(lambda t: nk.batch_norm(t, None, None, training=True, process_group=Two()), backend="eager")(x)
