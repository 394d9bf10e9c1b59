"""Residual steps that are no `normkit.placement.Residual`: what the rows of `normkit.lab.model.zoo.ZOO` are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledBranch(nn.Module):
    """x ← x + λ⊙F(N(x)/ρ): ReZero (no norm, a scalar λ = 0), LayerScale (λ a small vector), LayerNorm Scaling (ρ = √l).

    Args:
        sublayer: F, which maps (…, width) to (…, width).
        norm: N, or None for none.
        scale: initial λ, learnt; a number or one per channel. None for 1, not learnt.
        divisor: ρ, a constant.

    Source: arXiv 2003.04887 (ReZero), 2103.17239 (LayerScale), 2502.05795 (LayerNorm Scaling).
    """

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module | None, scale: Tensor | None = None, divisor: float = 1.0
    ) -> None:
        super().__init__()
        self.sublayer, self.norm, self.divisor = sublayer, norm, divisor
        self.scale = None if scale is None else nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this step."""
        read = x if self.norm is None else self.norm(x)
        branch = self.sublayer(read / self.divisor if self.divisor != 1 else read)
        return x + (branch if self.scale is None else self.scale * branch)


class Interpolated(nn.Module):
    """nGPT's update, x ← N(x + α(N(F(x)) − x)), with N to rms 1 and α learnt from 0.05. Source: arXiv 2410.01131."""

    def __init__(self, sublayer: nn.Module, norm_branch: nn.Module, norm_out: nn.Module, width: int) -> None:
        super().__init__()
        self.sublayer, self.norm_branch, self.norm_out = sublayer, norm_branch, norm_out
        self.alpha = nn.Parameter(torch.full((width,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this step."""
        return self.norm_out(x + self.alpha * (self.norm_branch(self.sublayer(x)) - x))


class NormedLinear(nn.Linear):
    """x ↦ W·N(x): Sub-LN's norm inside a sublayer, before its last map. It takes over the weight of ``linear``.

    Args:
        linear: a map without bias.
        norm: N, of the map's inputs.

    Source: Magneto, arXiv 2210.06423.
    """

    def __init__(self, linear: nn.Linear, norm: nn.Module) -> None:
        assert linear.bias is None, "the lab's maps have no bias"
        # On the meta device nothing is drawn for a weight that is replaced at once.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map (…, in) to (…, out)."""
        return super().forward(self.norm(x))


class BottomToTop(nn.Module):
    """y ← N(x + A(x)), x ← N(x + y + F(y)): a Post-Norm block whose input skips to its last norm (B2T).

    Args:
        attention, feed_forward: A and F, which map (…, width) to (…, width).
        norm_inner, norm_out: the block's two norms.
        skip: False leaves x out of the second sum, and Post-Norm remains.

    Source: Takase et al. 2022, arXiv 2206.00330.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm_inner: nn.Module,
        norm_out: nn.Module,
        skip: bool = True,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.norm_inner, self.norm_out, self.skip = norm_inner, norm_out, skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        y = self.norm_inner(x + self.attention(x))
        total = y + self.feed_forward(y)
        return self.norm_out(x + total if self.skip else total)


class DualResidual(nn.Module):
    """x ← N(x + F(x)), d ← d + F(x): a Post-Norm stream x and the sum d of all that its sublayers say (ResiDual).

    Both streams travel stacked, (2, …, width), x before d; `DualExit` makes one of them.

    Args:
        sublayer: F, which maps (…, width) to (…, width).
        norm: N.
        first: it reads the embedded text (…, width), from which both streams start.

    Source: Xie et al. 2023, arXiv 2304.14802.
    """

    def __init__(self, sublayer: nn.Module, norm: nn.Module, first: bool = False) -> None:
        super().__init__()
        self.sublayer, self.norm, self.first = sublayer, norm, first

    def forward(self, streams: Tensor) -> Tensor:
        """Return both streams after this step."""
        x, d = (streams, streams) if self.first else streams.unbind()
        branch = self.sublayer(x)
        return torch.stack((self.norm(x + branch), d + branch))


class DualExit(nn.Module):
    """(x, d) ↦ x + N(d), where the streams of `DualResidual` join before the head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, streams: Tensor) -> Tensor:
        """Map (2, …, width) to (…, width)."""
        x, d = streams.unbind()
        return x + self.norm(d)
