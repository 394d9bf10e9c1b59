"""Causal self-attention with rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.modules import QKNorm


def rotations(length: int, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Return e^(i·t·ω_j) for positions t < length and ω_j = base^(−2j/head_dim): (length, head_dim/2), complex64."""
    # Angles in float64: at t = 4096 a float32 product t·ω is already off by 2e-4 radians.
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels of x (…, T, H, D) by its position's angle.

    Pairs are complex numbers, so one multiplication does it; ⟨rotate(q)_t, rotate(k)_s⟩ depends on t − s alone.
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[: x.shape[-3], None]).flatten(-2)


class CausalAttention(nn.Module):
    """Multi-head attention in which position t reads positions up to t.

    Args:
        width: of the stream; divided evenly among heads.
        heads: how many; width / heads must be even, because RoPE turns pairs.
        context: the longest sequence.
        qk_norm: normalise queries and keys per head, before RoPE: a gain per channel would not commute with the
            rotation, and scores would no longer depend on distance alone.
    """

    rotation: Tensor

    def __init__(self, width: int, heads: int, context: int, qk_norm: bool = False) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"attention: width must be a multiple of 2 × heads, got width {width}, heads {heads}")
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.qk_norm = QKNorm(width // heads, heads) if qk_norm else None
        self.register_buffer("rotation", rotations(context, width // heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width); T may not exceed the context."""
        if x.shape[1] > len(self.rotation):
            raise ValueError(f"attention: {x.shape[1]} positions, but the context is {len(self.rotation)}")
        # One product for all three: the weights are small beside the activations, so joining them is cheap.
        joined = torch.cat((self.query.weight, self.key.weight, self.value.weight))
        q, k, v = F.linear(x, joined).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))
