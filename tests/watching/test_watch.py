"""`watch`: right numbers, no trace on the model, and flags that name the place."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.watching.attention import QUERIES, largest_score

WIDTH, HEADS, LENGTH = 24, 3, 7


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Attention(nn.Module):
    """Causal attention with optional query and key norms before or after a rotation."""

    def __init__(self, norms: str = "none") -> None:
        super().__init__()
        self.qkv, self.out, self.norms = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), norms
        head = WIDTH // HEADS
        self.q_norm, self.k_norm = (nn.RMSNorm(head, eps=1e-6) for _ in range(2)) if norms != "none" else (None, None)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
        angle = torch.arange(LENGTH)[:, None] / 10 ** (torch.arange(head // 2) / 2)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.norms == "before":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotated(q), self.rotated(k)
        if self.norms == "after":
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def stack(depth: int = 2, norms: str = "none") -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(depth):
        blocks += [nk.PreNorm(WIDTH, Attention(norms)), nk.PreNorm(WIDTH, FeedForward())]
    return nn.Sequential(*blocks, nk.RMSNorm(WIDTH))


def tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor, steps: int = 1) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in range(steps):
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
    return found


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def test_numbers_are_those_of_the_stream_itself():
    model, x = stack(), tokens()
    streams = [x]
    for block in model[:-1]:
        streams.append(block(streams[-1]))
    results = [t.detach().requires_grad_() for t in streams]
    y = model[-1](results[-1])
    (dy,) = torch.autograd.grad(y.square().mean(), y)
    with nk.watch(model) as seen:
        train(model, x)
    on_stream = [r for r in seen.readings if r.stream_rms is not None]
    assert [r.position for r in on_stream] == ["branch input"] * 4 + ["final"]
    close = {"rel": 1e-5}  # norms in float32 over a few hundred elements: ten roundings of 6e-8 and a square root
    assert [r.stream_rms for r in on_stream] == pytest.approx([rms(s) for s in streams], **close)
    shares = [rms(b - a) / rms(b) for a, b in pairwise(streams)]
    assert on_stream[0].share is None
    assert [r.share for r in on_stream[1:]] == pytest.approx(shares, **close)
    assert on_stream[-1].gradient == pytest.approx(float(dy.norm()), **close)
    assert on_stream[-1].y_rms == pytest.approx(rms(y), **close)
    assert on_stream[0].x_max == float(x.abs().max())
    assert on_stream[0].x_mean == pytest.approx(float(x.double().mean()), abs=1e-6)


def test_of_post_norm_the_stream_is_what_leaves_the_norm():
    torch.manual_seed(0)
    model = nn.Sequential(*(nk.PostNorm(WIDTH, FeedForward()) for _ in range(3)))
    x = tokens()
    first = model[0](x)
    with nk.watch(model) as seen:
        model(x)
    second = seen.readings[1]
    total = first + model[1].sublayers[0](first)
    assert second.position == "on the sum"
    assert second.share == pytest.approx(rms(total - first) / rms(total), rel=1e-5)


def test_nothing_changes():
    model, x = stack(norms="before"), tokens()
    twin = copy.deepcopy(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attend, softmax, state = F.scaled_dot_product_attention, F.softmax, torch.get_rng_state()
    with nk.watch(model):
        watched = train(model, x, 3)
    assert torch.equal(torch.stack(watched), torch.stack(train(twin, x, 3)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert F.scaled_dot_product_attention is attend
    assert F.softmax is softmax
    assert torch.equal(torch.get_rng_state(), state)


def test_an_audit_that_fails_costs_the_places_alone(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("normkit.watching.session.audit", fail)
    model = stack()
    with nk.watch(model) as seen, pytest.warns(UserWarning, match="no such operator"):
        train(model, tokens())
    norms = [r for r in seen.readings if r.position != "attention"]
    assert [r.name for r in norms] == [*(f"{i}.norm_in" for i in range(4)), "4"]
    assert {r.position for r in norms} == {""}
    assert all(r.gradient for r in norms)


def test_hooks_go_also_after_an_error():
    model = stack()
    attend = F.scaled_dot_product_attention
    with pytest.raises((RuntimeError, ValueError)), nk.watch(model):
        model(torch.randn(2, LENGTH, WIDTH + 1))
    assert not any(m._forward_hooks for m in model.modules())
    assert F.scaled_dot_product_attention is attend


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_arrive_through_activation_checkpointing_and_are_counted_once(reentrant: bool):
    model, x = stack(), tokens().requires_grad_()
    with nk.watch(model) as plain:
        train(model, x)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    other = Checkpointed()
    with nk.watch(other) as seen:
        train(other, x)
    ours = {r.name.removeprefix("inner."): r.gradient for r in seen.readings if r.gradient is not None}
    expected = {r.name: r.gradient for r in plain.readings if r.gradient is not None}
    assert ours == pytest.approx(expected, rel=1e-5)


def test_steps_every_and_file(tmp_path: Path):
    model, x = stack(), tokens()
    path = tmp_path / "watch.jsonl"
    with nk.watch(model, every=2, path=path) as seen:
        train(model, x, 3)
        model.eval()
        model(x)
        model(x)
    assert seen.steps == [0, 2, 4]
    assert {r.step: r.training for r in seen.readings} == {0: True, 2: True, 4: False}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(seen.readings)
    assert lines[-1]["gradient"] is None
    seen.to_jsonl(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()
    seen.figure(tmp_path / "w.svg")
    assert "branch input" in str(seen)


def test_the_largest_score_is_the_attentions_own():
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, 9, 9) > 0.4
    mask[..., 0] = True
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    exact = {"rel": 1e-6}
    assert float(largest_score(q, k, enable_gqa=True)) == pytest.approx(float(scores.max()), **exact)
    causal = scores.masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    assert float(largest_score(q, k, is_causal=True, enable_gqa=True)) == pytest.approx(float(causal.max()), **exact)
    masked = scores.masked_fill(~mask, -math.inf)
    assert float(largest_score(q, k, attn_mask=mask, enable_gqa=True)) == pytest.approx(float(masked.max()), **exact)
    bias = torch.randn(9, 9)
    assert float(largest_score(q, k, None, bias, enable_gqa=True)) == pytest.approx(
        float((scores + bias).max()), **exact
    )
    long = torch.zeros(1, 1, 4 * QUERIES, 2)
    long[0, 0, -1] = 5.0
    assert float(largest_score(long, long, scale=1.0)) == 50.0  # the last query is among those looked at


def test_scores_before_a_softmax_are_seen_too():
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nk.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = self.inner(self.norm(x))
            return F.softmax(q @ q.mT, dim=-1) @ q

    model, x = Eager(), tokens()
    with nk.watch(model) as seen:
        model(x)
    q = model.inner(model.norm(x))
    (reading,) = [r for r in seen.readings if r.position == "attention"]
    assert reading.largest_logit == pytest.approx(float((q @ q.mT).detach().max()), rel=1e-6)


def codes(seen: nk.Watched) -> dict[str, tuple[str, ...]]:
    return {f.code: f.where for f in seen.flags}


def test_a_healthy_stack_raises_no_flag():
    model = stack(norms="before")
    with nk.watch(model) as seen:
        train(model, tokens(), 3)
    assert codes(seen) == {}


def test_query_norms_after_the_rotation_are_named():
    model = stack(norms="after")
    with nk.watch(model) as seen:
        train(model, tokens(), 2)
    assert set(codes(seen)["norm-after-rotation"]) == {
        f"{block}.sublayers.0.{side}_norm" for block in (0, 2) for side in ("q", "k")
    }


def test_an_overflow_in_float16_is_named_where_it_first_shows():
    model = stack().half()
    model[1].sublayers[0].down.weight.data.mul_(3e5 / 2)
    with warnings.catch_warnings(), nk.watch(model) as seen:
        warnings.simplefilter("error")
        model(tokens().half())
    places = [f.where for f in seen.flags if f.code == "not-finite"]
    assert places == [("2.norm_in",), ("1.sublayers.0.down",)]  # the first norm to read it; the audit: who made it


def test_a_doubled_one_plus_is_named():
    torch.manual_seed(0)
    blocks = [nk.PreNorm(WIDTH, FeedForward(), norm=lambda d: nk.RMSNorm(d, spec=nk.GEMMA)) for _ in range(4)]
    model = nn.Sequential(*blocks, nk.RMSNorm(WIDTH, spec=nk.GEMMA))
    blocks[2].norm_in.weight.data.fill_(1.0)  # as stored by a library that has already added 1
    with nk.watch(model) as seen:
        train(model, tokens(), 2)
    assert {f.code for f in seen.flags if "2.norm_in" in f.where} & {"one-plus-doubled", "off-by-one"}, seen.flags


def test_large_logits_and_a_jump_of_the_stream_are_named():
    model = stack()
    model[2].sublayers[0].qkv.weight.data.mul_(40)
    with nk.watch(model) as seen:
        model(tokens())
    assert codes(seen)["large-logits"] == ("2.sublayers.0",)
    assert codes(seen)["stream-jumps"] == ("3.norm_in",)


def test_a_stream_that_grows_in_training_is_named():
    model = stack()
    with nk.watch(model) as seen:
        model(tokens())
        for block in model[:-1]:
            next(p for n, p in block.sublayers[0].named_parameters() if n in ("out.weight", "down.weight")).data.mul_(
                60
            )
        model(tokens())
    assert "stream-grows" in codes(seen)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: nk.watch("no model"), TypeError, "torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: nk.watch(nn.Linear(2, 2), every=0), ValueError, "every"),
        (lambda: nk.watch(torch.compile(nn.Linear(2, 2))), ValueError, "_orig_mod"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_watched_is_refused(call: Callable[[], Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match), call():
        pass


def test_a_model_without_norms_and_a_watch_without_forward():
    with nk.watch(nn.Linear(3, 3)) as seen:
        assert "no forward" in str(seen)
        nn.Linear(3, 3)(torch.randn(2, 3))
    assert seen.readings == []
