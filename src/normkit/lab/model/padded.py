"""A small language model on sequences of unequal length, with norms that may be told where the padding is.

Batches are few rows, each cut to a length of its own and filled up with zero bytes. Attention is causal and padding
comes last, so real positions meet it in one place only: in a norm whose statistics run over positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.functional import rms_norm
from normkit.lab.corpus import CONTEXT, Corpus
from normkit.lab.draws import Draws
from normkit.lab.model.transformer import TransformerConfig, build, put_norms
from normkit.modules import BatchNorm, LayerNorm

Kind = Literal["layer", "batch", "blind", "power"]
SHORTEST = 8
MOMENTUM = 0.1
_NO_TARGET = -100  # what cross_entropy leaves out


@dataclass(frozen=True)
class Rows:
    """Sequences of unequal length: bytes (N, L), zeros behind each one's end, and their lengths (N,)."""

    tokens: Tensor
    lengths: Tensor

    @property
    def mask(self) -> Tensor:
        """(N, L), true where there is text."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def cut(tokens: Tensor, lengths: Tensor, positions: int | None = None) -> Rows:
    """Return the first ``lengths`` bytes of each of ``tokens`` (N, L), padded to the longest, or to ``positions``."""
    longest = int(lengths.max()) if positions is None else positions
    rows = Rows(F.pad(tokens, (0, max(0, longest - tokens.shape[1])))[:, :longest], lengths)
    return Rows(rows.tokens * rows.mask, lengths)


class QuadraticMeanNorm(nn.Module):
    r"""What PowerNorm makes of BatchNorm, without its approximate gradient: y = x̂ / √(ψ² + ε) · γ + β.

    x̂ is x over its own token's rms; ψ² is the mean square of each channel of x̂ over a batch's real positions, without a
    mean, in training, and its moving average (momentum .1) in evaluation. The gradient passes through ψ². PowerNorm
    proper also normalises training batches by the moving average, with a gradient of its own, after 10,000 steps.

    Source: PowerNorm-V of Shen et al. 2020, arXiv 2003.07845, sections 4.1 and 4.2, and its code.
    """

    running: Tensor

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running", torch.ones(width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise x (N, L, width)."""
        x = rms_norm(x)
        square = self.running
        if self.training:
            real = x if mask is None else x[mask]
            square = real.square().flatten(0, -2).mean(0)
            self.running.lerp_(square.detach(), MOMENTUM)
        return x / (square + self.eps).sqrt() * self.weight + self.bias


class _PerToken(LayerNorm):
    """LayerNorm, which does not care where the padding is."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class _Blind(BatchNorm):
    """BatchNorm that is not told where the padding is."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        return super().forward(x)


KINDS: dict[Kind, Callable[[int], nn.Module]] = {
    "layer": _PerToken,
    "batch": lambda width: BatchNorm(width, momentum=MOMENTUM),
    "blind": lambda width: _Blind(width, momentum=MOMENTUM),
    "power": QuadraticMeanNorm,
}


class _Told(nn.Module):
    """A norm that is told, at every call, the mask its network was given."""

    def __init__(self, norm: nn.Module, network: PaddedLM) -> None:
        super().__init__()
        self.norm = norm
        self._network = (network,)  # in a tuple, lest the network become its own part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x, mask=self._network[0].mask)
        return y


class PaddedLM(nn.Module):
    """The lab's Pre-Norm Transformer around norms of one kind, which know the mask of the rows at hand.

    Kinds: ``"layer"``; ``"batch"``, whose statistics leave padding out; ``"blind"``, a BatchNorm that is not told of
    it; ``"power"``, see `QuadraticMeanNorm`.
    """

    def __init__(self, kind: Kind, config: TransformerConfig, draws: Draws) -> None:
        super().__init__()
        self.mask: Tensor | None = None

        def told(width: int) -> nn.Module:
            return _Told(KINDS[kind](width), self)

        self.network = put_norms(build(config, draws), told)

    def forward(self, rows: Rows) -> Tensor:
        """Return logits (N, L, 256)."""
        self.mask = rows.mask
        logits: Tensor = self.network(rows.tokens)
        return logits


@dataclass(frozen=True)
class Batches:
    """Windows (steps, rows, `CONTEXT` + 1) of text and how much of each is used (steps, rows)."""

    windows: Tensor
    lengths: Tensor


def draw_batches(text: Tensor, steps: int, rows: int, generator: torch.Generator) -> Batches:
    """Draw windows at random places of ``text``, with lengths uniform from `SHORTEST` to `CONTEXT`."""
    starts = torch.randint(0, len(text) - CONTEXT, (steps, rows), generator=generator)
    lengths = torch.randint(SHORTEST, CONTEXT + 1, (steps, rows), generator=generator)
    return Batches(text[starts[..., None] + torch.arange(CONTEXT + 1)].long(), lengths)


def padded_loss(model: PaddedLM, window: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of the byte after every real position."""
    rows = cut(window[:, :-1], lengths)
    targets = window[:, 1 : 1 + rows.tokens.shape[1]].masked_fill(~rows.mask, _NO_TARGET)
    return F.cross_entropy(model(rows).flatten(0, 1), targets.flatten(), ignore_index=_NO_TARGET)


def train_padded(model: PaddedLM, corpus: Corpus, draws: Draws, steps: int, rows: int, lr: float) -> list[float]:
    """Train in place with Adam(.9, .98) at a constant rate; return the loss of every step."""
    device = next(model.parameters()).device
    drawn = draw_batches(corpus.train, steps, rows, draws.shared("batches"))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)
    losses: list[Tensor] = []
    for window, lengths in zip(drawn.windows.to(device), drawn.lengths.to(device), strict=True):
        optimizer.zero_grad()
        loss = padded_loss(model.train(), window, lengths)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()
