"""G1: DeepNorm's constants, as a table and as a network that has them.

A part of n sublayers has α on its residual and β on the weights that carry values. Their purpose is one number: the
first update of the whole part, n · 2β²/α² up to the learning rate, must not depend on n.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.placement import WIRINGS, Architecture

DEPTHS = (1, 2, 6, 12, 24, 100, 1000)
PARTS: dict[Architecture, int] = {  # → sublayers per layer
    "encoder-only": 2,
    "decoder-only": 2,
    "encoder-decoder/decoder": 3,
    "encoder-decoder/encoder": 2,
}
BOUND: tuple[Architecture, ...] = ("encoder-only", "decoder-only", "encoder-decoder/decoder")
PUBLISHED = {12: (2.2134, 0.3195), 100: (3.7606, 0.1880)}  # encoder-only, four decimals
SCALED, UNSCALED = ("value", "output", "up", "down"), ("query", "key")
NETWORK_LAYERS, WIDTH = 3, 20


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name}) for name in ("deepnorm", "post")]


def _nothing(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return torch.zeros_like(y)


def _weighted(model: Transformer, bench: Bench) -> list[float]:
    """Return what every step multiplies the stream by: what its norm reads over x when the sublayer adds nothing."""
    read: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        read.append(args[0])

    for sublayer in (*model.attentions, *model.feed_forwards):
        sublayer.register_forward_hook(_nothing)
    for step in model.steps:
        norm = step.norm_out
        assert isinstance(norm, nn.Module)
        norm.register_forward_pre_hook(note)
    tokens = torch.randint(0, 256, (2, 8), generator=bench.draws.shared("tokens"))
    stream = list(model.stream(tokens))[:-1]
    return [float((a * x).sum() / x.square().sum()) for a, x in zip(read, stream, strict=True)]


@torch.no_grad()
def _measure(params: Params, bench: Bench) -> Values:
    row = WIRINGS[params["wiring"]]
    table = {part: [row.constants(depth, part) for depth in DEPTHS] for part in PARTS}
    config = TransformerConfig(
        layers=NETWORK_LAYERS, width=WIDTH, heads=2, feed_forward="relu", norm="layer", wiring=params["wiring"]
    )
    model = build(config, bench.draws).double()
    plain = build(replace(config, wiring="post"), bench.draws).weights()
    gains = {  # each weight of the network over Post-Norm's draw of it
        role: [
            float(weight.weight.double().norm() / plain[name].weight.double().norm())
            for name, weight in model.weights().items()
            if name.endswith(f"/{role}")
        ]
        for role in (*SCALED, *UNSCALED)
    }
    own = row.constants(NETWORK_LAYERS, "decoder-only")
    weighted = _weighted(model, bench)
    return {
        "alpha": {part: [c.alpha for c in table[part]] for part in PARTS},
        "beta": {part: [c.beta for c in table[part]] for part in PARTS},
        "alpha off": max(abs(a / own.alpha - 1) for a in weighted),
        "beta off": max(abs(g / own.beta - 1) for role in SCALED for g in gains[role]),
        "others off": max(abs(g - 1) for role in UNSCALED for g in gains[role]),
    }


STUDY = Study(id="deepnorm_constants", arms=_arms, measure=_measure, seconds=lambda params: 0.1, seeds=1)


def bound(e: Evidence, role: str, part: Architecture) -> list[float]:
    """Return n · 2β²/α² of a part at every depth."""
    alphas, betas = e.first(role, "alpha")[part], e.first(role, "beta")[part]
    return [PARTS[part] * d * 2 * b**2 / a**2 for d, a, b in zip(DEPTHS, alphas, betas, strict=True)]


def _criteria(e: Evidence) -> list[Criterion]:
    identity = [
        Criterion(
            name=f"n · 2β²/α², {part}, {DEPTHS[0]} … {DEPTHS[-1]} layers",
            values=bound(e, "deepnorm", part),
            kind="near",
            target=1.0,
            tolerance=1e-14,
            reason="float64: two fourth roots raised to at most −2, each within two units of 1.1×10⁻¹⁶ and doubled by "
            "the square: 10⁻¹⁵",
            every=True,
        )
        for part in BOUND
    ]
    alphas, betas = e.first("deepnorm", "alpha"), e.first("deepnorm", "beta")
    encoder: Architecture = "encoder-decoder/encoder"
    product = Criterion(
        name=f"αβ over 4^(−1/4), {encoder}",
        values=[a * b * 4**0.25 for a, b in zip(alphas[encoder], betas[encoder], strict=True)],
        kind="near",
        target=1.0,
        tolerance=0.012,
        reason="all other parts have αβ = 4^(−1/4); this one is published as 0.81 and 0.87, each rounded by up to "
        "0.005: 0.005/0.81 + 0.005/0.87 = 1.2 %",
        every=True,
    )
    printed = [
        Criterion(
            name=f"{name} of {depth} encoder layers",
            values=[values["encoder-only"][DEPTHS.index(depth)]],
            kind="near",
            target=target,
            tolerance=1e-4,
            reason="printed with four decimals: off by at most half of 10⁻⁴",
        )
        for depth, pair in PUBLISHED.items()
        for name, values, target in zip(("α", "β"), (alphas, betas), pair, strict=True)
    ]
    network = [
        Criterion(
            name=name,
            values=e.numbers("deepnorm", key),
            kind="at_most",
            target=0.0,
            tolerance=2.0**-22,
            reason="weights are drawn in float32: a factor and a product, each within 2⁻²⁴, and a margin of two",
        )
        for name, key in (
            ("stream's factor over α in a network, largest relative difference", "alpha off"),
            (f"gain of {', '.join(SCALED)} over β, largest relative difference", "beta off"),
            (f"gain of {', '.join(UNSCALED)} less 1, largest", "others off"),
        )
    ]
    return [*identity, product, *printed, *network]


def _summary(e: Evidence) -> str:
    worst = max(abs(v - 1) for part in BOUND for v in bound(e, "deepnorm", part))
    alphas, betas = e.first("deepnorm", "alpha")["decoder-only"], e.first("deepnorm", "beta")["decoder-only"]
    return (
        f"n · 2β²/α² = 1 within {number(worst, 2)} from 1 to 1000 layers; there α = {number(alphas[-1], 3)}, "
        f"β = {number(betas[-1], 3)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    def panel(title: str, label: str, key: str) -> Panel:
        parts = [part for part in PARTS if part != "encoder-only"]  # which is the decoder-only line
        lines = [Series(part, DEPTHS, e.first("deepnorm", key)[part]) for part in parts]
        return Panel(title, "layers of the part", label, lines, x_scale="log", y_scale="log")

    product = [
        Series("DeepNorm", DEPTHS, bound(e, "deepnorm", "decoder-only")),
        Series("α = β = 1", DEPTHS, [2.0 * 2 * d for d in DEPTHS], kind="reference"),
    ]
    return [
        Chart(
            caption="DeepNorm's constants (an encoder alone has a decoder's), the two parts of an encoder-decoder at "
            "equal depth; right, what they hold constant.",
            alt="α rises and β falls with depth along straight lines on logarithmic axes; n times 2β²/α² is level at "
            "one, where α = β = 1 would rise to 4000.",
            panels=[
                panel("the stream's factor", "α", "alpha"),
                panel("the weights' gain", "β", "beta"),
                Panel("the bound", "layers", "n · 2β²/α²", product, x_scale="log", y_scale="log"),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="G1",
        title="DeepNorm's two constants",
        sentence="DeepNorm multiplies x on Post-Norm's residual path by a constant α and shrinks the initial weights "
        "to match.",
        sentences=(42,),
        source="Article, “Compromises”; Wang et al. 2022, arXiv 2203.00555, table of α and β.",
        measured=f"normkit's α and β for every part at {', '.join(map(str, DEPTHS))} layers; and a network of "
        f"{NETWORK_LAYERS} blocks built with them: what each step multiplies the stream by, and each weight's size "
        "over that of Post-Norm's from the same draw.",
        study=STUDY,
        plays={"deepnorm": "deepnorm"},
        literal=Rule(
            text="n · 2β²/α² = 1 for stacks of one kind and for the decoder of two; the encoder's αβ agrees within its "
            "published rounding; printed values agree; the network's stream is multiplied by α, its value, output and "
            "feed-forward weights by β, its query and key weights by nothing.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(text="Post-Norm, that is α = β = 1, in its place.", plays={"deepnorm": "post"}),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A sublayer of gain β² beside a stream of α moves the output of the stack by (β/α)² per unit of "
            "learning rate, through its values and through its output weights alike. The constants hold that sum "
            "fixed; G2 measures that the network follows.",
            status="tested",
        ),
    ),
)
