"""Probes of B2 and B3: how rough the loss is along the gradient, and how far a gradient turns when layers below move.

All look around a point of the trajectory without moving anything: parameters or running statistics. Networks are
side by side, each probed at its own learning rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from normkit.lab.model.byte_mlp import ByteMLPs, descend, losses_of

REACH = (0.5, 1.0, 2.0, 4.0)  # how many of its own steps a network is taken along its gradient

Gradients = Mapping[str, Tensor]


def gradients_of(model: ByteMLPs, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each network's loss on ``rows`` (R,), and the gradient of each by parameter name."""
    named = dict(model.named_parameters())
    losses = losses_of(model, rows)
    gradients = torch.autograd.grad(losses.sum(), list(named.values()))  # none depends on another's parameters
    return losses.detach(), dict(zip(named, gradients, strict=True))


def along_gradient(
    model: ByteMLPs, rows: Tensor, losses: Tensor, gradients: Gradients, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the range of L(θ − ηg), η = 0 and `REACH` × rate, and the largest ‖∇L(θ − ηg) − g‖ among them; (R,) each.

    ``losses`` and ``gradients`` are those at θ.
    """
    seen, turned = [losses], list[Tensor]()
    for reach in REACH:
        moved = copy.deepcopy(model)
        descend(dict(moved.named_parameters()), gradients, reach * rates)
        loss, there = gradients_of(moved, rows)
        seen.append(loss)
        squares = [(there[n] - g).reshape(len(rates), -1).square().sum(1) for n, g in gradients.items()]
        turned.append(torch.stack(squares).sum(0).sqrt())
    at = torch.stack(seen)
    return at.amax(0) - at.amin(0), torch.stack(turned).amax(0)


def gradient_shift(model: ByteMLPs, rows: Tensor, gradients: Gradients, rates: Tensor) -> Tensor:
    """Return, for each hidden weight, the cosine of its gradient before and after the layers below step; (layers, R).

    This is internal covariate shift as Santurkar et al. measure it: what the
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
