"""FSDP2 and DDP around norms on two ranks: what one process computes, buffers untouched by any precision policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normkit as nk
from ranks.processes import run
from rows import randn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
RANKS, SAMPLES, LENGTH, IN, WIDTH = 2, 4, 7, 12, 24
STEPS, RATE = 3, 0.5


def made(group: Any = None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return every parameterised kind of norm between linear layers, all with random weights."""
    model = nn.Sequential(
        nn.Linear(IN, WIDTH), nk.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nk.LayerNorm(WIDTH), nn.Linear(WIDTH, 10),
        nk.GroupNorm(5, 10), nk.BatchNorm(10, process_group=group),
    )  # fmt: skip
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(randn(*p.shape, seed=10 + i) * (1 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return model.to(dtype)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(RANKS * SAMPLES, LENGTH, IN).to(dtype), randn(RANKS * SAMPLES, LENGTH, 10, seed=1).to(dtype)


def share(rank: int) -> slice:
    return slice(rank * SAMPLES, (rank + 1) * SAMPLES)


def whole(t: Tensor) -> Tensor:
    """Return the tensor itself, of a sharded one all of it."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def state(model: nn.Module) -> dict[str, Tensor]:
    kept = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): whole(t) for name, t in kept}


def trained(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """Train by the mean of y·dy; return what the first and last step found, and what they left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        y = model(x)
        (y.to(dy.dtype) * dy).mean().backward()
        if step == 0:
            found["y"] = y.detach()
            found["gradients"] = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    return found | {"state": state(model)}


def fully_sharded(group: Any, dtype: torch.dtype, compute: torch.dtype | None) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh, model = init_device_mesh("cpu", (RANKS,)), made(group, dtype)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# A language model whose residual branch holds a batch norm, on sentences of different lengths.
VOCABULARY = 11
SENTENCES = [randn(n, seed=20 + n).mul(1e4).long().abs() % VOCABULARY for n in (3, 5, 2, 4, 9, 7, 8, 6)]


class Language(nn.Module):
    def __init__(self, group: Any, masked: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nk.BatchNorm(WIDTH, process_group=group)
        self.mix, self.head, self.masked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY), masked
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=40 + i) * 0.3)
        self.double()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        stream = self.embed(tokens)
        stream = stream + torch.tanh(self.mix(self.norm(stream, mask if self.masked else None)))
        return self.head(stream)


def speak(model: nn.Module, sentences: list[Tensor], weight: float) -> dict[str, Tensor]:
    """Train by the mean loss of all predicted tokens; each batch is padded to its own longest sentence."""
    lengths = torch.tensor([len(s) for s in sentences])
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        predicted = model(tokens, mask)[:, :-1][mask[:, 1:]]
        # The optimizer's gradient is the mean over ranks of each rank's loss, so a rank weighs by its tokens.
        loss = nn.functional.cross_entropy(predicted, tokens[:, 1:][mask[:, 1:]], reduction="sum") * weight
        loss.backward()
        optimizer.step()
    return state(model)


def predicted(sentences: list[Tensor]) -> int:
    return sum(len(s) - 1 for s in sentences)


def work(rank: int, ranks: int) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    world, found = dist.group.WORLD, {}
    x, dy = batch(torch.float64)
    found["fsdp"] = trained(fully_sharded(world, torch.float64, None), x[share(rank)], dy[share(rank)])
    x, dy = batch(torch.float32)
    found["mixed"] = trained(fully_sharded(None, torch.float32, torch.bfloat16), x[share(rank)], dy[share(rank)])
    mine = SENTENCES[share(rank)]
    for masked in (True, False):
        model = DistributedDataParallel(Language(world, masked))
        found["language", masked] = speak(model, mine, ranks / predicted(SENTENCES))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(work, RANKS, tmp_path_factory.mktemp("ranks"))


def close(got: Any, want: Any) -> None:
    # float64: a few hundred roundings of 1e-16 in numbers below 100. What is summed once too often, or not at all, or
    # weighs a rank wrongly, is off by a sixteenth of them at least.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_fsdp_with_sync_batch_norm_is_one_process(ranks: list[dict[Any, Any]]):
    expected = trained(made(dtype=torch.float64), *batch(torch.float64))
    close(torch.cat([found["fsdp"]["y"] for found in ranks]), expected["y"])
    for found in ranks:
        close(found["fsdp"]["gradients"], expected["gradients"])
        close(found["fsdp"]["state"], expected["state"])


def by_hand(x: Tensor, dy: Tensor) -> list[dict[str, Any]]:
    """Do in one process what mixed precision says: a bfloat16 copy on each rank, gradients averaged in float32."""
    masters, copies = made(), [made().bfloat16() for _ in range(RANKS)]
    optimizer, found = torch.optim.SGD(masters.parameters(), lr=RATE), [{} for _ in range(RANKS)]
    for step in range(STEPS):
        for rank, (model, kept) in enumerate(zip(copies, found, strict=True)):
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                    p.copy_(master)
            model.zero_grad()
            y = model(x[share(rank)].bfloat16())
            (y.float() * dy[share(rank)]).mean().backward()
            kept.setdefault("y", y.detach())
        for p, *parts in zip(masters.parameters(), *(m.parameters() for m in copies), strict=True):
            p.grad = sum(q.grad.float() for q in parts) / RANKS
        if step == 0:
            for kept in found:
                kept["gradients"] = {name: p.grad.clone() for name, p in masters.named_parameters()}
        optimizer.step()
    for kept, model in zip(found, copies, strict=True):
        kept["state"] = {name: p.detach() for name, p in masters.named_parameters()} | dict(model.named_buffers())
    return found


def test_fsdp_mixed_precision_and_offload_change_no_bit_and_no_buffer(ranks: list[dict[Any, Any]]):
    for found, expected in zip(ranks, by_hand(*batch(torch.float32)), strict=True):
        got = found["mixed"]
        assert got["y"].dtype == torch.bfloat16
        for name in ("running_mean", "running_var"):
            assert got["state"][f"6.{name}"].dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_language_model_under_ddp_is_one_process_if_its_batch_norm_is_masked(ranks: list[dict[Any, Any]]):
    for masked in (True, False):
        expected = speak(Language(None, masked), copy.deepcopy(SENTENCES), 1 / predicted(SENTENCES))
        for found in ranks:
            if masked:
                close(found["language", True], expected)
                continue
            # Each rank pads to its own longest sentence, one process to the longest of all, and plain batch norm
            # counts the padding: another model is trained.
            apart = max(float((t - expected[name]).abs().max()) for name, t in found["language", False].items())
            assert apart > 1e-3
