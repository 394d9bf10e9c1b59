"""Deep fully connected networks on the bytes of real text: what BatchNorm was made for, without convolutions.

Eight bytes are embedded, pass through hidden layers (linear map, norm, activation) and predict the ninth. No
residual path helps: what a layer does to scale and gradient, all layers below it feel.

Many small networks are trained side by side as one wide one, because at this size a step costs its calls, not its
arithmetic. Nothing passes from one to another: linear maps are batched products, and BatchNorm's statistics are by
channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """One kind of network.

    Args:
        norm: what follows each linear map: nothing, BatchNorm by the batch's own statistics, or that and then noise.
        activation: ``"tanh"`` with Xavier weights, N(0, 2/(in + out)), or ``"relu"`` with He's, N(0, 2/in).
        layers: hidden layers.
    """

    norm: Norm
    activation: Activation = "tanh"
    layers: int = LAYERS


class ByteMLPs(nn.Module):
    """R networks side by side; logits of the byte after each row of `BYTES` bytes: (R, N, `BYTES`) → (R, N, 256).

    ``copies`` says for each network which weights it starts from and which noise it meets: networks of one copy
    differ in nothing but what is done to them. ``step`` chooses the noise of a ``"noisy"`` network: the same step,
    the same noise, so that a loss can be evaluated twice. The activations' inputs of the last forward are
    left in ``inputs``, (R, N, `WIDTH`) each. Every parameter's first dimension is R, or R·`WIDTH` in a norm.
    """

    def __init__(self, config: MLPConfig, draws: Draws, copies: Sequence[int] = (0,)) -> None:
        super().__init__()
        self.config, self.draws, self.copies, self.step = config, draws, tuple(copies), 0
        self.inputs: list[Tensor] = []
        widths = [BYTES * EMBEDDING, *[WIDTH] * config.layers]
        self.embedding = self._drawn("embedding", (256, EMBEDDING), 1.0)
        shapes = list(pairwise([*widths, 256]))
        self.weights = nn.ParameterList(
            self._drawn(str(i), shape, self._std(i, shape)) for i, shape in enumerate(shapes)
        )
        self.biases = nn.ParameterList(torch.zeros(len(self.copies), 1, width) for _, width in shapes)
        self.norms = nn.ModuleList(
            nn.Identity() if config.norm == "none" else BatchNorm(len(self.copies) * WIDTH)
            for _ in range(config.layers)
        )

    def _std(self, i: int, shape: tuple[int, int]) -> float:
        he = self.config.activation == "relu" and i < self.config.layers  # no ReLU follows the head
        return math.sqrt(2 / shape[0] if he else 2 / sum(shape))

    def _drawn(self, name: str, shape: tuple[int, int], std: float) -> nn.Parameter:
        """Draw from the shared streams: networks of one copy and seed start alike in every arm of a study."""
        drawn = {c: std * self.draws.randn(*shape, stream=f"init/{name}/{c}") for c in sorted(set(self.copies))}
        return nn.Parameter(torch.stack([drawn[copy] for copy in self.copies]))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of the byte that follows each row."""
        nets, samples, _ = rows.shape
        first = 256 * torch.arange(nets, device=rows.device).view(nets, 1, 1)  # where a network's embeddings begin
        x = F.embedding(rows + first, self.embedding.flatten(0, 1)).flatten(2)
        self.inputs = []
        noise = self._noise() if self.config.norm == "noisy" else {}
        *weights, head = self.weights
        *biases, head_bias = self.biases
        for weight, bias, norm in zip(weights, biases, self.norms, strict=True):
            x = torch.baddbmm(bias, x, weight)
            if self.config.norm != "none":
                channels = x.transpose(0, 1).reshape(samples, nets * WIDTH)
                x = norm(channels).view(samples, nets, WIDTH).transpose(0, 1)
            if noise:
                drawn = {copy: jitter(samples, WIDTH, stream) for copy, stream in noise.items()}
                stretch, shift = (torch.stack([drawn[c][k] for c in self.copies]).to(x.device) for k in (0, 1))
                x = x * stretch + shift
            self.inputs.append(x.detach())
            x = x.tanh() if self.config.activation == "tanh" else x.relu()
        return torch.baddbmm(head_bias, x, head)

    def _noise(self) -> dict[int, torch.Generator]:
        return {copy: self.draws.shared(f"noise-{self.step}/{copy}") for copy in sorted(set(self.copies))}


def jitter(samples: int, units: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the noise that Santurkar et al. inject after BatchNorm: s and m of s ⊙ x + m, (samples, units) each.

    Every unit draws a mean from U(−0.5, 0.5) and a scale from U(1, 1.25), anew at every step; every sample then draws
    its own m from U(mean ± 0.1) and its own s from N(scale, 0.1²).
    """
    of_units, of_samples = torch.rand(2, units, generator=generator), torch.rand(samples, units, generator=generator)
    mean, scale = of_units[0] - 0.5, 1 + of_units[1] / 4
    return scale + torch.randn(samples, units, generator=generator) / 10, mean + (of_samples - 0.5) / 5


def batches(corpus: Corpus, steps: int, rows: int, draws: Draws, copy: int = 0) -> Tensor:
    """Return training rows with the byte that follows each, (steps, rows, `BYTES` + 1), from the copy's own stream."""
    generator = draws.shared(f"batches/{copy}")
    return _rows(corpus.train, torch.randint(0, len(corpus.train) - BYTES, (steps, rows), generator=generator))


def heldout_rows(corpus: Corpus) -> Tensor:
    """Return `HELDOUT` rows spread evenly over the held-out text, with the byte that follows each; never random."""
    starts = torch.linspace(0, len(corpus.heldout) - BYTES - 1, HELDOUT, dtype=torch.float64).long()
    return _rows(corpus.heldout, starts)


def losses_of(model: ByteMLPs, rows: Tensor) -> Tensor:
    """Return each network's mean cross-entropy (R,), in nats, of the last byte of ``rows`` (R, N, `BYTES` + 1)."""
    logits = model(rows[..., :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), rows[..., -1].flatten(), reduction="none")
    return losses.view(rows.shape[:2]).mean(1)


@torch.no_grad()
def heldout_losses(model: ByteMLPs, rows: Tensor) -> list[float]:
    """Return each network's loss on ``rows`` (N, `BYTES` + 1), as it trains: by their own statistics, with its noise.

    Running statistics that were gathered under noise would describe no network without it.
    """
    return losses_of(model, rows.expand(len(model.copies), -1, -1)).tolist()


@torch.no_grad()
def descend(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], rates: Tensor) -> None:
    """Take one step of plain gradient descent in place, each network at its own rate (R,).

    Gradients of other parameters are left alone.
    """
    for name, p in parameters.items():
        p.view(len(rates), -1).sub_(rates[:, None] * gradients[name].reshape(len(rates), -1))


def _rows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[..., None] + torch.arange(BYTES + 1)].long()
