"""The position-wise half of a block: ReLU or SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ReLUFeedForward(nn.Module):
    """down · relu(up · x), as in the original Transformer; ``hidden`` is usually 4 × width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to (…, width)."""
        return self.down(F.relu(self.up(x)))


class SwiGLUFeedForward(nn.Module):
    """down · (silu(gate · x) ⊙ up · x), as in Llama; ``hidden`` of 8/3 × width costs what ReLU's 4 × width costs."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to (…, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


FEED_FORWARDS: dict[str, type[ReLUFeedForward] | type[SwiGLUFeedForward]] = {
    "relu": ReLUFeedForward,
    "swiglu": SwiGLUFeedForward,
}


def hidden_width(kind: str, width: int) -> int:
    """Return the usual hidden width: 4 × width for ReLU; for SwiGLU 8/3 × width, rounded up to a multiple of 8."""
    return 4 * width if kind == "relu" else -(-8 * width // 24) * 8
