"""What goes on inside a network, fresh or trained: its stream, its gradients, its attention, what each block is worth.

Each looks at every wiring in the same way, whatever its steps are made of. A block is two residual steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from normkit.lab.corpus import Corpus
from normkit.lab.model.training import heldout_windows, next_byte_loss
from normkit.lab.model.transformer import Transformer
from normkit.watching.attention import attention_seen


@dataclass(frozen=True)
class Inside:
    """A look at one network on one batch.

    Args:
        stream: √mean(x²) of the embedded bytes, then of the stream after every block.
        moved: √mean((x′ − x)²)/√mean(x²) of every block that makes x′ of x: what it contributes to what it reads.
        gradients: Frobenius norm of the loss's gradient on every block's down-projection.
        logits: largest attention logit of every block (scaled, causal).
    """

    stream: list[float]
    moved: list[float]
    gradients: list[float]
    logits: list[float]


def look_inside(model: Transformer, windows: Tensor) -> Inside:
    """Look at ``model`` on ``windows`` (N, T + 1); its parameters and their ``grad`` stay as they are.

    Example:
        >>> from normkit.lab.draws import Draws
        >>> from normkit.lab.model.transformer import TransformerConfig, build
        >>> model = build(TransformerConfig(layers=3, width=16), Draws("example", "pre", 0))
        >>> seen = look_inside(model, torch.arange(18).view(2, 9))
        >>> len(seen.stream), len(seen.moved), len(seen.gradients), len(seen.logits)
        (4, 3, 3, 3)
    """
    scores: list[Tensor] = []
    with torch.no_grad(), attention_seen(scores.append):
        xs = list(model.stream(windows[:, :-1]))[:: _steps_a_block(model)]
    moved = [_rms(after - before) / _rms(before) for before, after in pairwise(xs)]
    weights = model.weights()
    down = [weights[f"{block}/down"].weight for block in range(model.config.layers)]
    gradients = torch.autograd.grad(next_byte_loss(model, windows), down)
    return Inside(
        stream=[_rms(x) for x in xs],
        moved=moved,
        gradients=[float(g.double().norm()) for g in gradients],
        logits=[float(score) for score in scores],
    )


@torch.no_grad()
def deletion_costs(model: Transformer, corpus: Corpus, windows: int) -> list[float]:
    """Return by how much held-out loss rises, in nats per byte, when a block is left out, for every block in turn.

    All are measured on the same held-out windows, ``windows`` of them spread over the held-out text.
    """
    device = model.embedding.weight.device
    text = heldout_windows(corpus)
    text = text[:: len(text) // windows][:windows].to(device)
    whole, stride = model.steps, _steps_a_block(model)
    base = float(next_byte_loss(model, text))
    costs: list[float] = []
    try:
        for first in range(0, len(whole), stride):
            model.steps = nn.ModuleList([*whole[:first], *whole[first + stride :]])
            costs.append(float(next_byte_loss(model, text)) - base)
    finally:
        model.steps = whole
    return costs


def _steps_a_block(model: Transformer) -> int:
    return len(model.steps) // model.config.layers


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
