"""Wirings that are no row of `normkit.placement.WIRINGS`: they reach into a sublayer, change with depth, carry a second
stream, scale a branch, or interpolate.

`build_zoo` rewires the lab's Transformer around sublayers drawn as always, so that all wirings share their draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from normkit.lab.draws import Draws
from normkit.lab.model.norms import norm_factory
from normkit.lab.model.steps import BottomToTop, DualExit, DualResidual, Interpolated, NormedLinear, ScaledBranch
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.placement import WIRINGS, Architecture, Constants, InitRule, Wiring, placement

Norm = Callable[[int], nn.Module]
Rewire = Callable[[Transformer, Norm], None]  # gives a network built as the row's `wiring` steps of its own


@dataclass(frozen=True)
class Row:
    """A row of the zoo.

    Args:
        name: what `build_zoo` and the lab call it.
        formula: the update of the stream; repeated Ns are separate norms.
        wiring: the `Wiring` that the network is first built as: its constants, initial weights and final norm stay.
        rewire: what then makes it this wiring.
        source: where it comes from.
        init: what is initialised otherwise than by the model's own rule, or left out of the source's rule.
        leaving: how the stream leaves the stack, where not by "yes" or "no" of a final norm.
    """

    name: str
    formula: str
    wiring: Wiring
    rewire: Rewire
    source: str
    init: str
    leaving: str = ""

    @property
    def final_norm(self) -> str:
        """How the stream reaches the head, for the table in docs/wirings.md."""
        return self.leaving or ("yes" if self.wiring.final_norm else "no")


def sub_ln_constants(
    depth: int, architecture: Architecture = "decoder-only", *, other_depth: int | None = None
) -> Constants:
    r"""Return Sub-LN's gain, as β; α is 1.

    With N encoder and M decoder layers:

    ==========================  ==========================
    part                        gain
    ==========================  ==========================
    encoder-only                √ln(2N)
    decoder-only                √ln(2M)
    encoder of encoder-decoder  √(ln(3M)·ln(2N)/3)
    decoder of encoder-decoder  √ln(3M)
    ==========================  ==========================

    Args:
        depth: layers of the part asked for.
        architecture: which part.
        other_depth: for ``"encoder-decoder/encoder"``, the decoder's layers (default: as many).

    Raises:
        ValueError: for a depth below 1 or an unknown architecture.

    Source: Magneto, arXiv 2210.06423.

    Example:
        >>> round(sub_ln_constants(12).beta, 4)
        1.7827
    """
    other = depth if other_depth is None else other_depth
    if depth < 1 or other < 1:
        raise ValueError(f"sub_ln_constants: depth counts layers and must be at least 1, got {min(depth, other)}")
    squares = {
        "encoder-only": math.log(2 * depth),
        "decoder-only": math.log(2 * depth),
        "encoder-decoder/encoder": math.log(3 * other) * math.log(2 * depth) / 3,
        "encoder-decoder/decoder": math.log(3 * depth),
    }
    if architecture not in squares:
        raise ValueError(f"sub_ln_constants: unknown architecture {architecture!r}; one of {', '.join(squares)}")
    return Constants(beta=squares[architecture] ** 0.5)


def _keel_constants(
    depth: int, architecture: Architecture = "decoder-only", *, other_depth: int | None = None
) -> Constants:
    return Constants(alpha=2.0 * depth)


SUB_LN = replace(
    WIRINGS["pre"],
    name="sub-ln",
    class_name="SubLN",
    constants=sub_ln_constants,
    init=InitRule(
        "Xavier; gain √ln(2L) on value, output and both feed-forward weights, gain 1 on query and key. A gated "
        "feed-forward's gate keeps gain 1, as under DeepNorm.",
        frozenset({"value", "output", "up", "down"}),
    ),
    source="Wang et al. 2022 (Magneto), arXiv 2210.06423",
    used_by="",
)

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


def _sublayers(model: Transformer) -> list[nn.Module]:
    return [f for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]


def _each(step: Callable[[nn.Module, int, Transformer, Norm], nn.Module]) -> Rewire:
    """Give every sublayer a step of its own, made from (sublayer, its block counted from 1, network, norm)."""

    def rewire(model: Transformer, norm: Norm) -> None:
        model.steps = nn.ModuleList(step(f, 1 + i // 2, model, norm) for i, f in enumerate(_sublayers(model)))

    return rewire


def _as_built(model: Transformer, norm: Norm) -> None:
    """Leave it as its `Wiring` makes it."""


def _mixed(sublayer: nn.Module, block: int, model: Transformer, norm: Norm) -> nn.Module:
    name = "post" if block <= model.config.layers // 4 else "pre"
    return placement(name)(model.config.width, sublayer, norm=norm)


def _norm_before_last_maps(model: Transformer, norm: Norm) -> None:
    for modules, role in ((model.attentions, "output"), (model.feed_forwards, "down")):
        for module in modules:
            linear = getattr(module, role)
            assert isinstance(linear, nn.Linear)
            setattr(module, role, NormedLinear(linear, norm(linear.in_features)))


def _bottom_to_top(model: Transformer, norm: Norm) -> None:
    width = model.config.width
    pairs = zip(model.attentions, model.feed_forwards, strict=True)
    model.steps = nn.ModuleList(BottomToTop(a, f, norm(width), norm(width)) for a, f in pairs)


def _dual(model: Transformer, norm: Norm) -> None:
    width = model.config.width
    model.steps = nn.ModuleList(DualResidual(f, norm(width), first=i == 0) for i, f in enumerate(_sublayers(model)))
    model.final_norm = DualExit(norm(width))


_NO_FINAL = replace(WIRINGS["pre"], final_norm=False)
_OWN = WIRINGS["pre"].init.text

ZOO: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="sub-ln",
            formula="x ← x + W·N(G(N(x))), F = W·G split before its last map",
            wiring=SUB_LN,
            rewire=_norm_before_last_maps,
            source=SUB_LN.source,
            init=SUB_LN.init.text,
        ),
        Row(
            name="resi-dual",
            formula="x ← N(x + F(x)), d ← d + F(x); both start as the embedded text",
            wiring=_NO_FINAL,
            rewire=_dual,
            source="Xie et al. 2023 (ResiDual), arXiv 2304.14802",
            init=_OWN,
            leaving="x + N(d)",
        ),
        Row(
            name="b2t",
            formula="y ← N(x + A(x)), x ← N(x + y + F(y)), once a block",
            wiring=_NO_FINAL,
            rewire=_bottom_to_top,
            source="Takase et al. 2022 (B2T connection), arXiv 2206.00330",
            init=f"{_OWN}; the authors' code multiplies every weight by L^(−1/2) besides, which is left out",
        ),
        Row(
            name="keel",
            formula=f"{KEEL.formula}, α = 2L",
            wiring=KEEL,
            rewire=_as_built,
            source=KEEL.source,
            init=_OWN,
        ),
        Row(
            name="mix-ln",
            formula="x ← N(x + F(x)) in the first ⌊L/4⌋ blocks, x ← x + F(N(x)) in the others",
            wiring=WIRINGS["pre"],
            rewire=_each(_mixed),
            source="Li et al. 2024 (Mix-LN), arXiv 2412.13795",
            init=_OWN,
        ),
        Row(
            name="lns",
            formula="x ← x + F(N(x)/√l) in block l, counted from 1",
            wiring=WIRINGS["pre"],
            rewire=_each(lambda f, block, model, norm: ScaledBranch(f, norm(model.config.width), divisor=block**0.5)),
            source="Sun et al. 2025 (LayerNorm Scaling), arXiv 2502.05795",
            init=_OWN,
        ),
        Row(
            name="rezero",
            formula="x ← x + λ·F(x), λ learnt",
            wiring=_NO_FINAL,
            rewire=_each(lambda f, block, model, norm: ScaledBranch(f, None, torch.zeros(()))),
            source="Bachlechner et al. 2020 (ReZero), arXiv 2003.04887",
            init="λ = 0",
        ),
        Row(
            name="layerscale",
            formula="x ← x + λ⊙F(N(x)), λ learnt",
            wiring=WIRINGS["pre"],
            rewire=_each(
                lambda f, block, model, norm: ScaledBranch(
                    f, norm(model.config.width), torch.full((model.config.width,), 0.1)
                )
            ),
            source="Touvron et al. 2021 (LayerScale), arXiv 2103.17239",
            init="λ = 0.1 in every channel",
        ),
        Row(
            name="ngpt",
            formula="x ← N(x + α⊙(N(F(x)) − x)), α learnt, N to rms 1",
            wiring=_NO_FINAL,
            rewire=_each(
                lambda f, block, model, norm: Interpolated(
                    f, norm(model.config.width), norm(model.config.width), model.config.width
                )
            ),
            source="Loshchilov et al. 2024 (nGPT), arXiv 2410.01131",
            init="α = 0.05; its scales of queries, keys and logits and its normed weights are left out",
        ),
    )
}


def build_zoo(name: str, config: TransformerConfig, draws: Draws) -> Transformer:
    """Return a network wired as ``name`` says, a row of `WIRINGS` or of `ZOO`; weights as `build` draws them.

    A network of ``"resi-dual"`` streams (2, N, T, width) after its first step, see `DualResidual`.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> model = build_zoo("b2t", TransformerConfig(layers=3, width=16), Draws("example", "b2t", 0))
        >>> len(model.steps), model.final_norm
        (3, None)
    """
    if name not in ZOO:
        return build(replace(config, wiring=name), draws)
    row = ZOO[name]
    model = build(replace(config, wiring=row.wiring), draws)
    row.rewire(model, norm_factory(config.norm))
    return model
