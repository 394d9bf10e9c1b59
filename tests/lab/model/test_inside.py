"""What is read inside a network against the same numbers taken by hand."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.inside import deletion_costs, look_inside
from normkit.lab.model.training import heldout_loss, heldout_windows, next_byte_loss
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.model.zoo import build_zoo

WINDOWS = torch.randint(0, 256, (3, 21), generator=torch.Generator().manual_seed(4))


def made(wiring: str = "pre", layers: int = 3, **choices) -> Transformer:
    return build_zoo(wiring, TransformerConfig(layers=layers, width=24, **choices), Draws("inside", wiring, 1))


@pytest.mark.parametrize("wiring", ["pre", "post", "parallel", "lns", "b2t"])
def test_stream_and_gradients_are_those_of_the_network(wiring):
    model = made(wiring)
    stride = 1 if wiring in ("parallel", "b2t") else 2
    seen = look_inside(model, WINDOWS)
    assert all(p.grad is None for p in model.parameters())
    xs = [model.embedding(WINDOWS[:, :-1])]
    for first in range(0, len(model.steps), stride):
        x = xs[-1]
        for step in list(model.steps)[first : first + stride]:
            x = step(x)
        xs.append(x)
    flat = torch.stack([x.detach().flatten() for x in xs]).double()
    torch.testing.assert_close(torch.tensor(seen.stream).double(), flat.square().mean(1).sqrt())
    moved = (flat[1:] - flat[:-1]).norm(dim=1) / flat[:-1].norm(dim=1)
    torch.testing.assert_close(torch.tensor(seen.moved).double(), moved)
    next_byte_loss(model, WINDOWS).backward()
    norms = [float(f.down.weight.grad.norm()) for f in model.feed_forwards]
    assert seen.gradients == pytest.approx(norms, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_are_the_largest_that_a_position_may_see(qk_norm):
    model = made(heads=2, layers=2, qk_norm=qk_norm)
    with torch.enable_grad():
        seen = look_inside(model, WINDOWS).logits
    assert len(seen) == 2
    x = model.steps[0].norm_in(model.embedding(WINDOWS[:, :-1]))
    attention = model.attentions[0]
    q, k = (m(x).unflatten(-1, (2, -1)) for m in (attention.query, attention.key))
    if qk_norm:
        q, k = attention.qk_norm(q, k)
    turn = torch.view_as_complex(q.unflatten(-1, (-1, 2))), torch.view_as_complex(k.unflatten(-1, (-1, 2)))
    best = max(
        float((turn[0][n, t, h] * (turn[1][n, s, h] * attention.rotation[s] / attention.rotation[t]).conj()).real.sum())
        for n in range(3)
        for h in range(2)
        for t in range(20)
        for s in range(t + 1)
    )
    assert seen[0] == pytest.approx(best / 12**0.5, rel=1e-4)


def test_a_block_s_cost_is_the_loss_of_the_network_without_it():
    corpus = load_corpus()
    model = made(layers=3)
    steps = model.steps
    costs = deletion_costs(model, corpus, windows=16)
    assert model.steps is steps
    text = heldout_windows(corpus)[::16]
    assert len(text) == 16
    with torch.no_grad():
        x = model.embedding(text[:, :-1])
        for i in (0, 1, 4, 5):  # without the second block
            x = model.steps[i](x)
        logits = model.head(model.final_norm(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        assert costs[1] == pytest.approx(float(loss - next_byte_loss(model, text)), abs=1e-5)
    assert len(costs) == 3


def test_all_held_out_windows_are_those_that_judge():
    corpus = load_corpus()
    model = build(TransformerConfig(layers=1, width=8, heads=1), Draws("inside", "a", 0))
    (cost,) = deletion_costs(model, corpus, windows=256)
    base = heldout_loss(model, corpus)
    model.steps = torch.nn.ModuleList()
    assert cost == pytest.approx(heldout_loss(model, corpus) - base, abs=1e-5)


def test_what_fails_midway_leaves_the_network_whole():
    model = made()
    steps = model.steps
    model.steps[3].register_forward_pre_hook(_fail_when_alone(model))
    with pytest.raises(RuntimeError, match="midway"):
        deletion_costs(model, load_corpus(), windows=4)
    assert model.steps is steps


def _fail_when_alone(model: Transformer):
    def hook(module, args):
        if len(model.steps) < 6:
            raise RuntimeError("midway")

    return hook
