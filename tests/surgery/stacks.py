"""Small Transformers to audit: healthy ones of every wiring, and the parts from which broken ones are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk

WIDTH, HIDDEN, TOKENS, HEADS = 24, 40, 7, 3  # no two alike, so that no axis can be taken for another
Norm = Callable[[int], nn.Module]


def ids(length: int = TOKENS) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self, query_norm: nn.Module | None = None, key_norm: nn.Module | None = None, full: bool = False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.query_norm, self.key_norm, self.full = query_norm, key_norm, full

    def _heads(self, x: Tensor, norm: nn.Module | None, full: bool) -> Tensor:
        if norm is not None and full:
            x = norm(x)
        x = x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        return norm(x) if norm is not None and not full else x

    def forward(self, x: Tensor) -> Tensor:
        query = self._heads(self.query(x), self.query_norm, self.full)
        key = self._heads(self.key(x), self.key_norm, self.full)
        value = self._heads(self.value(x), None, False)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))


class PreBlock(nn.Module):
    """Written out, so that a test can break it by overriding one method."""

    def __init__(self, norm: Norm = nn.RMSNorm, attention: nn.Module | None = None):
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = attention or Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    def __init__(
        self, blocks: list[nn.Module], final: nn.Module | None = None, config: Any = None, dtype: Any = torch.float32
    ):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = final
        self.head = nn.Linear(WIDTH, 50)
        self.config = config
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.norm is None else self.norm(x))


def pre(depth: int = 3, norm: Norm = nn.RMSNorm, block: Callable[..., nn.Module] = PreBlock, **more: Any) -> Stack:
    return Stack([block(norm) for _ in range(depth)], norm(WIDTH), **more)


def wired(name: str, depth: int = 3, norm: Norm = nk.RMSNorm) -> Stack:
    """A stack under a row of `normkit.WIRINGS`."""
    make = nk.placement(name)
    more = {"depth": depth} if nk.WIRINGS[name].scaled_residual else {}
    blocks: list[nn.Module] = []
    for _ in range(depth):
        parts = (Attention(), FeedForward())
        if nk.WIRINGS[name].parallel:
            blocks.append(make(WIDTH, *parts, norm=norm, **more))
        else:
            blocks += [make(WIDTH, part, norm=norm, **more) for part in parts]
    return Stack(blocks, norm(WIDTH) if nk.WIRINGS[name].final_norm else None)


def weighted(spec: nk.NormSpec, mean: float, spread: float = 0.05, seed: int = 0) -> Norm:
    """Norms whose weights lie around ``mean``, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)

    def make(width: int) -> nn.Module:
        norm = nk.RMSNorm(width, spec=spec)
        assert norm.weight is not None
        with torch.no_grad():
            norm.weight.copy_(mean + spread * torch.randn(width, generator=generator))
        return norm

    return make
