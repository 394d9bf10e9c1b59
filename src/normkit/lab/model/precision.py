"""Training in mixed precision: weights, stream and Adam in float32, what autocast lists in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PRECISIONS = ("float32", "bfloat16")


class Autocast(nn.Module):
    """A network run under `torch.autocast` to bfloat16; its logits come back in float32.

    Matrix products and attention are computed in bfloat16. Weights, their gradients and Adam's moments stay float32,
    and so does the residual stream, which starts as the float32 embedding. bfloat16 has float32's range: no loss
    scaling.

    Example:
        >>> net = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
        >>> Autocast(net)(torch.zeros(2, 5, dtype=torch.int64)).dtype
        torch.float32
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (N, T) to logits (N, T, 256)."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = self.inner(tokens)
        return logits.float()
