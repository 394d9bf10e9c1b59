"""Norms as people write them, and things that look like norms: modules that normkit has never seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weighted(nn.Module):
    """A module with a weight and an ε under a name of its own."""

    def __init__(self, dim: int = 48, eps: float = 1e-6, name: str = "variance_epsilon") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        setattr(self, name, eps)
        self.name = name

    @property
    def epsilon(self) -> float:
        return getattr(self, self.name)


class Llama(Weighted):
    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        return self.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(hidden.dtype)


class Upcast(Weighted):
    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        return (self.weight * f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(hidden.dtype)


class Olmo(Weighted):
    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * f).to(hidden.dtype)


class Lying(Weighted):
    """Its attribute says another ε than it adds."""

    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        return self.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 3e-5)).to(hidden.dtype)


class RootOfMean(Weighted):
    """ε outside of the root."""

    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        f = f * (1 / (f.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon))
        return (self.weight * f).to(hidden.dtype)


class OnePass(Weighted):
    """A variance as E[x²] − E[x]²: right on small means, wrong on large ones."""

    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        mean = f.mean(-1, keepdim=True)
        variance = f.pow(2).mean(-1, keepdim=True) - mean * mean
        return (self.weight * ((f - mean) * torch.rsqrt(variance + self.epsilon))).to(hidden.dtype)


class RoundedSquares(Weighted):
    """Squares in the input's dtype, then float32: no convention."""

    def forward(self, hidden: Tensor) -> Tensor:
        r = torch.rsqrt(hidden.pow(2).float().mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * (hidden.float() * r)).to(hidden.dtype)


class TwicePlusOne(Weighted):
    """γ = 2 + w."""

    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return ((2 + self.weight.float()) * f).to(hidden.dtype)


class Clamped(Weighted):
    """The second half of the row does not enter the statistic."""

    def forward(self, hidden: Tensor) -> Tensor:
        f = hidden.float()
        half = f[..., : f.shape[-1] // 2]
        return (self.weight * f * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(hidden.dtype)


class Busy(Llama):
    """Counts its calls, keeps a list, moves a buffer and draws random numbers, as a stranger's forward may."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(hidden.dim())
        self.running += 1
        self.count += 1
        torch.rand(3)
        return super().forward(hidden)


class PerHead(nn.Module):
    """LayerNorm over head_dim with a weight and bias of its own for each head."""

    def __init__(self, heads: int = 3, head_dim: int = 16) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(heads, head_dim) + 0.5)
        self.beta = nn.Parameter(torch.rand(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        d = f - f.mean(-1, keepdim=True)
        y = d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (y * self.gamma.float() + self.beta.float()).to(x.dtype)


class Gated(Weighted):
    """Mamba 2's: the gate comes first, and may be left out."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        f = hidden.float()
        f = f if gate is None else f * torch.nn.functional.silu(gate.float())
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * f.to(hidden.dtype)


class Insistent(Weighted):
    """Its signature calls the gate optional, its code does not."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        f = hidden.float()
        f = self.weight.float() * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.epsilon))
        return (f * torch.sigmoid(gate.float())).to(hidden.dtype)  # type: ignore[union-attr]


class Free(nn.Module):
    """No weight, any width."""

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Llama()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))
