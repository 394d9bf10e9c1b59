"""SeeDNorm: an RMSNorm whose gain depends on the token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.functional import rms_norm


def seednorm(x: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Return (tanh(⟨x, β⟩)·α + γ) ⊙ x / rms(x) for x (…, C) and vectors α, β, γ (C,).

    ⟨x, β⟩ is a number a token, and grows with its scale: unless β = 0 the result depends on that scale, up to where
    tanh ends. No entry exceeds √C·(|α| + |γ|).

    Source: arXiv 2510.22777; copies elsewhere differ from it.
    """
    return (torch.tanh((x * beta).sum(-1, keepdim=True)) * alpha + gamma) * rms_norm(x, eps=eps)


class SeeDNorm(nn.Module):
    """`seednorm` with α and γ from 1 and β from 0: RMSNorm, at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x (…, width)."""
        return seednorm(x, self.alpha, self.beta, self.gamma)
