"""Probes of B2 and B3: how rough the loss is along the gradient, and how far a gradient turns when layers below move.

All look around a point of the trajectory without moving anything: parameters or running statistics. Networks are
side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normkit.lab.model.byte_mlp import ByteMLPs, descend, losses_of

Gradients = Mapping[str, Tensor]


def gradients_of(model: ByteMLPs, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each network's loss on ``rows`` (R,), and the gradient of each by parameter name."""
    named = dict(model.named_parameters())
    losses = losses_of(model, rows)
    gradients = torch.autograd.grad(losses.sum(), list(named.values()))  # none depends on another's parameters
    return losses.detach(), dict(zip(named, gradients, strict=True))


def probe(
    model: ByteMLPs, rows: Tensor, losses: Tensor, gradients: Gradients, rates: Tensor, steps: Sequence[float]
) -> dict[str, Tensor]:
    """Return the probes of each network: ``range`` and ``turn`` (R, steps), ``cosine`` (R,)."""
    spread, turn = along_gradient(model, rows, losses, gradients, steps)
    return {"range": spread, "turn": turn, "cosine": gradient_shift(model, rows, gradients, rates).mean(0)}


def along_gradient(
    model: ByteMLPs, rows: Tensor, losses: Tensor, gradients: Gradients, steps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the range of L(θ − ηg) and the largest ‖∇L(θ − ηg) − g‖ over η from 0 up to each step, (R, steps) each.

    Every network goes the same ``steps``, in ascending order, whatever its own rate.
    """
    seen, turned, nets = [losses], list[Tensor](), len(losses)
    for step in steps:
        moved = copy.deepcopy(model)
        descend(dict(moved.named_parameters()), gradients, torch.full_like(losses, step))
        loss, there = gradients_of(moved, rows)
        seen.append(loss)
        squares = [(there[n] - g).reshape(nets, -1).square().sum(1) for n, g in gradients.items()]
        turned.append(torch.stack(squares).sum(0).sqrt())
    at = torch.stack(seen)
    spread = at.cummax(0).values - at.cummin(0).values
    return spread[1:].T, torch.stack(turned).cummax(0).values.T


def gradient_shift(model: ByteMLPs, rows: Tensor, gradients: Gradients, rates: Tensor) -> Tensor:
    """Return, for each hidden weight, the cosine of its gradient before and after the layers below step; (layers, R).

    Each network steps at its own rate (R,). This is internal covariate shift as Santurkar et al. measure it: what the
    layer above sees of the others' update.
    """
    moved = copy.deepcopy(model)
    named, below, cosines = dict(moved.named_parameters()), ["embedding"], list[Tensor]()
    for i in range(moved.config.layers):
        descend({name: named[name] for name in below}, gradients, rates)
        weight = f"weights.{i}"
        (after,) = torch.autograd.grad(losses_of(moved, rows).sum(), [named[weight]])
        cosines.append(torch.cosine_similarity(after.flatten(1), gradients[weight].flatten(1), dim=1))
        below = [name for name in named if name in (weight, f"biases.{i}") or name.startswith(f"norms.{i}.")]
    return torch.stack(cosines)
