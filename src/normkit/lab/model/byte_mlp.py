"""A deep fully connected network on the bytes of real text: what BatchNorm was made for, without convolutions.

Eight bytes are embedded, pass through hidden layers (linear map, norm, activation) and predict the ninth. No
residual path helps: what a layer does to scale and gradient, all layers below it feel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.lab.corpus import Corpus
from normkit.lab.draws import Draws
from normkit.modules import BatchNorm

Norm = Literal["none", "batch", "noisy"]
Activation = Literal["tanh", "relu"]
BYTES, EMBEDDING, WIDTH, LAYERS = 8, 16, 64, 8
HELDOUT = 2048


@dataclass(frozen=True)
class MLPConfig:
    """One network.

    Args:
        norm: what follows each linear map: nothing, BatchNorm, or BatchNorm and then `jitter` while training.
        activation: ``"tanh"`` with Xavier weights, N(0, 2/(in + out)), or ``"relu"`` with He's, N(0, 2/in).
        layers: hidden layers.
    """

    norm: Norm
    activation: Activation = "tanh"
    layers: int = LAYERS


class ByteMLP(nn.Module):
    """Logits of the byte after each row of `BYTES` bytes: (N, `BYTES`) → (N, 256).

    In training ``step`` chooses the noise of a ``"noisy"`` network: the same step, the same noise, so that a loss
    can be evaluated twice. The activations' inputs of the last forward are left in ``inputs``.
    """

    def __init__(self, config: MLPConfig, draws: Draws) -> None:
        super().__init__()
        self.config, self.draws, self.step = config, draws, 0
        self.inputs: list[Tensor] = []
        widths = [BYTES * EMBEDDING, *[WIDTH] * config.layers]
        self.embedding = nn.Embedding(256, EMBEDDING)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(
            nn.Identity() if config.norm == "none" else BatchNorm(WIDTH) for _ in range(config.layers)
        )
        self.head = nn.Linear(WIDTH, 256)
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Fill all weights from the shared streams: every arm of a study and seed starts from the same ones."""
        self.embedding.weight.copy_(self.draws.randn(256, EMBEDDING, stream="init/embedding"))
        linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
        for i, linear in enumerate(linears):
            fan_out, fan_in = linear.weight.shape
            he = self.config.activation == "relu" and linear is not self.head
            std = math.sqrt(2 / fan_in if he else 2 / (fan_in + fan_out))
            linear.weight.copy_(std * self.draws.randn(fan_out, fan_in, stream=f"init/{i}"))
            linear.bias.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of the byte that follows each row."""
        x = self.embedding(rows).flatten(1)
        self.inputs = []
        noise = self.draws.shared(f"noise-{self.step}") if self.config.norm == "noisy" and self.training else None
        for linear, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(linear(x))
            if noise is not None:
                x = jitter(x, noise)
            self.inputs.append(x.detach())
            x = x.tanh() if self.config.activation == "tanh" else x.relu()
        logits: Tensor = self.head(x)
        return logits


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return s ⊙ x + m with fresh noise for (N, C) activations, as Santurkar et al. inject it after BatchNorm.

    Every unit draws a mean from U(−0.5, 0.5) and a scale from U(1, 1.25), anew at every step; every sample then draws
    its own m from U(mean ± 0.1) and its own s from N(scale, 0.1²).
    """
    units, samples = torch.rand(2, x.shape[1], generator=generator), torch.rand(x.shape, generator=generator)
    mean, scale = units[0] - 0.5, 1 + units[1] / 4
    shift = mean + (samples - 0.5) / 5
    stretch = scale + torch.randn(x.shape, generator=generator) / 10
    return x * stretch.to(x.device) + shift.to(x.device)


def batches(corpus: Corpus, steps: int, rows: int, draws: Draws) -> Tensor:
    """Return training rows with the byte that follows each, (steps, rows, `BYTES` + 1), from the shared stream."""
    starts = torch.randint(0, len(corpus.train) - BYTES, (steps, rows), generator=draws.shared("batches"))
    return _rows(corpus.train, starts)


def heldout_rows(corpus: Corpus) -> Tensor:
    """Return `HELDOUT` rows spread evenly over the held-out text, with the byte that follows each; never random."""
    starts = torch.linspace(0, len(corpus.heldout) - BYTES - 1, HELDOUT, dtype=torch.float64).long()
    return _rows(corpus.heldout, starts)


def loss_of(model: ByteMLP, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of the last byte of ``rows`` (N, `BYTES` + 1) given the others."""
    return F.cross_entropy(model(rows[:, :-1]), rows[:, -1])


@torch.no_grad()
def heldout_loss(model: ByteMLP, rows: Tensor) -> float:
    """Return the loss in evaluation mode: running statistics, no noise."""
    model.eval()
    loss = float(loss_of(model, rows))
    model.train()
    return loss


@torch.no_grad()
def descend(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], lr: float) -> None:
    """Take one step of plain gradient descent in place; gradients of other parameters are left alone."""
    for name, p in parameters.items():
        p.sub_(gradients[name], alpha=lr)


def _rows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[..., None] + torch.arange(BYTES + 1)].long()
