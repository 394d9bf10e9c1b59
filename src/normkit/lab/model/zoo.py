"""Wirings that are no row of `normkit.placement.WIRINGS`: they scale a branch, change with depth, or interpolate.

`build_zoo` rewires the lab's Transformer around sublayers drawn as always, so that all wirings share their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from normkit.lab.draws import Draws
from normkit.lab.model.norms import norm_factory
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.placement import WIRINGS, Architecture, Constants, placement

Norm = Callable[[int], nn.Module]


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


def _keel_constants(
    depth: int, architecture: Architecture = "decoder-only", *, other_depth: int | None = None
) -> Constants:
    return Constants(alpha=2.0 * depth)


KEEL = replace(
    WIRINGS["post"],
    name="keel",
    class_name="Keel",
    before=True,
    scaled_residual=True,
    constants=_keel_constants,
    source="KEEL, arXiv 2601.19895; α = number of sublayers",
    used_by="",
)

_Step = Callable[[nn.Module, int, int, int, Norm], nn.Module]  # (sublayer, block from 1, blocks, width, norm) → step


def _mixed(sublayer: nn.Module, block: int, blocks: int, width: int, norm: Norm) -> nn.Module:
    """Post-Norm in the first quarter of the blocks, Pre-Norm in the rest."""
    return placement("post" if block <= blocks // 4 else "pre")(width, sublayer, norm=norm)


ZOO: dict[str, _Step] = {
    "keel": lambda f, block, blocks, width, norm: placement(KEEL)(width, f, norm=norm, depth=blocks),
    "mix-ln": _mixed,
    "lns": lambda f, block, blocks, width, norm: ScaledBranch(f, norm(width), divisor=block**0.5),
    "rezero": lambda f, block, blocks, width, norm: ScaledBranch(f, None, torch.zeros(())),
    "layerscale": lambda f, block, blocks, width, norm: ScaledBranch(f, norm(width), torch.full((width,), 0.1)),
    "ngpt": lambda f, block, blocks, width, norm: Interpolated(f, norm(width), norm(width), width),
}


def build_zoo(name: str, config: TransformerConfig, draws: Draws) -> Transformer:
    """Return a network wired as ``name`` says, a row of `WIRINGS` or of `ZOO`; weights as `build` draws them.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in ZOO:
        return build(replace(config, wiring=name), draws)
    model = build(replace(config, wiring="pre"), draws)
    sublayers = [f for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]
    norm = norm_factory(config.norm)
    model.steps = nn.ModuleList(
        ZOO[name](f, 1 + i // 2, config.layers, config.width, norm) for i, f in enumerate(sublayers)
    )
    return model
