"""H1: one table of wirings, each by the law that its formula sets on a fresh network's stream.

Where the last thing done to the stream is a norm, its mean square is 1; where every branch is normalised and added, it
is 1 + 2L; where a norm sits before a sublayer's last map, the initial weights of that map alone set how it grows; where
a branch starts at zero, nothing moves at all; where it starts at λ, what it adds is λ² times as much. Rows that obey
one law and are not one network are told apart by what is left of the embedded text after a few blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.model.zoo import ZOO, build_zoo
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.placement import WIRINGS

LAYERS, WIDTH, ROWS = 16, 64, 4
NETWORKS = 2
NAMES = (*WIRINGS, *ZOO)
ENDS_NORMED = ("post", "deepnorm", "b2t", "resi-dual", "keel", "ngpt")
# What a block adds to the mean square, where the weights alone say so. Two normed branches add 1 each. Sub-LN's last
# maps read mean square 1: W from d to d of variance γ²/d adds γ², from 4d to d of variance 2γ²/(5d) adds 8/5 of it.
ADDED = {"sandwich": 2.0, "reordered": 2.0, "sub-ln": (1 + 8 / 5) * math.log(2 * LAYERS)}
GROWING = ("pre", "parallel", "mix-ln", "resi-dual")
LAMBDA = 0.1  # LayerScale's initial value
EARLY = 4  # blocks after which the embedded text is still to be seen under Post-Norm
FEED_FORWARD = 2 * 4 / (1 + 4) ** 2  # mean square of ReLU's with Xavier and 4 × width, which reads mean square 1


def kept_by_post(attention: float) -> float:
    """Return what is left of x in a Post-Norm block's result, as a cosine, if attention adds this mean square to it.

    Branches at right angles to the stream: the first norm divides x by √(1 + a), the second by √(1 + f).
    """
    return ((1 + attention) * (1 + FEED_FORWARD)) ** -0.5


def kept_by_b2t(attention: float) -> float:
    """Return the same where the block's input skips the first norm: (1 + s)·x + s·A + F by its size, s = 1/√(1 + a)."""
    s = (1 + attention) ** -0.5
    return (1 + s) / ((1 + s) ** 2 + attention * s**2 + FEED_FORWARD) ** 0.5


# Attention averages values of mean square 1, so that it adds 0 … 1.
LEAST_MORE_KEPT = min(kept_by_b2t(a / 10) ** EARLY - kept_by_post(a / 10) ** EARLY for a in range(11))


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name}) for name in NAMES]


def _ending_and_summed(stream: Tensor) -> tuple[Tensor, Tensor]:
    """Return a dual stream's two: what the last norm leaves and the sum of the branches. Elsewhere both are one."""
    return (stream[0], stream[1]) if stream.dim() == 4 else (stream, stream)


def _one(name: str, bench: Bench, draws: Draws) -> Values:
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu")
    model = build_zoo(name, config, draws).to(bench.settings.device)
    windows = random_windows(bench, draws, ROWS)
    with torch.no_grad():
        endings, sums = zip(*map(_ending_and_summed, model.stream(windows[:, :-1])), strict=True)
    stride = (len(sums) - 1) // LAYERS
    first = sums[0].square().mean()
    asked = [model.weights()[f"{block}/down"].weight for block in (0, LAYERS - 1)]
    gradients = torch.autograd.grad(next_byte_loss(model, windows), asked)
    first_square, last_square = (float(g.double().square().sum()) for g in gradients)
    return {
        "stream": [float(x.square().mean() / first) for x in sums[::stride]],
        "first": first_square,
        "last": last_square,
        "end": float(endings[-1].double().square().mean()),
        "kept": float(torch.cosine_similarity(endings[EARLY * stride], endings[0], dim=-1).mean()),
    }


def _measure(params: Params, bench: Bench) -> Values:
    """Average mean squares, squared gradients and cosines over independent networks on independent text."""
    rows = [_one(params["wiring"], bench, draws) for draws in independent(bench.draws, NETWORKS)]
    mean = {key: sum(row[key] for row in rows) / NETWORKS for key in ("first", "last", "end", "kept")}
    return {
        **mean,
        "stream": [sum(column) / NETWORKS for column in zip(*(row["stream"] for row in rows), strict=True)],
        "first": mean["first"] ** 0.5,
        "last": mean["last"] ** 0.5,
    }


STUDY = Study(id="zoo", arms=_arms, measure=_measure, seconds=lambda params: 0.15 * NETWORKS, seeds=3, corpus=True)


def _end(e: Evidence, role: str) -> list[float]:
    return [row[-1] for row in e.values(role, "stream")]


def _criteria(e: Evidence) -> list[Criterion]:
    level = [
        Criterion(
            name=f"{name}: mean square after {LAYERS} blocks, as it is",
            values=e.numbers(name, "end"),
            kind="near",
            target=1.0,
            tolerance=1e-5,
            reason="RMSNorm leaves 1/(1 + ε/v) of a square, off by 4×10⁻⁶ where v falls to 1/4 with ε = 10⁻⁶; float32 "
            "rounds by less",
            every=True,
        )
        for name in ENDS_NORMED
    ]
    linear = [
        Criterion(
            name=f"{name}: mean square after {LAYERS} blocks over 1 + {added:.3g}·L",
            values=[v / (1 + added * LAYERS) for v in _end(e, name)],
            kind="near",
            target=1.0,
            tolerance=0.4,
            reason="cosines of stream and branch do not average out within a network whose tokens look alike, √(2/d) = "
            f"{(2 / WIDTH) ** 0.5:.0%}, and the embedded text's mean square scatters by no more: together "
            f"{(4 / WIDTH / NETWORKS) ** 0.5:.0%} over {NETWORKS} networks at the worst, less than half of this",
            every=True,
        )
        for name, added in ADDED.items()
    ]
    growing = [
        Criterion(
            name=f"{name}: mean square after {LAYERS} blocks",
            values=_end(e, name),
            kind="above",
            target=1.0,
            tolerance=1.0,
            reason="“grows” as doubled at least; a feed-forward alone adds 0.32 a block",
            every=True,
        )
        for name in GROWING
    ]
    same = Criterion(
        name=f"resi-dual: cosine of the first stream after {EARLY} blocks and the text, less Post-Norm's",
        values=e.paired("resi-dual", "post", "kept"),
        kind="near",
        target=0.0,
        tolerance=1e-5,
        reason="the same operations in the same order; float32's rounding where they may differ",
        every=True,
    )
    skipping = Criterion(
        name=f"b2t: cosine of the stream after {EARLY} blocks and the text, less Post-Norm's",
        values=e.paired("b2t", "post", "kept"),
        kind="above",
        target=0.0,
        tolerance=LEAST_MORE_KEPT / 2,
        reason="with branches at right angles to the stream a block's norms leave ((1 + a)(1 + f))^(−1/2) of its input "
        "under Post-Norm and (1 + s)/√((1 + s)² + a·s² + f), s = 1/√(1 + a), with the skip. Attention's mean square a "
        f"is 0 … 1, the feed-forward's f = {FEED_FORWARD:.2f}: {LEAST_MORE_KEPT:.2f} more at least, of which half",
    )
    still = Criterion(
        name="rezero: mean square after every block, over the first, less 1",
        values=[max(abs(v - 1) for v in row) for row in e.values("rezero", "stream")],
        kind="at_most",
        target=0.0,
        tolerance=0.0,
        reason="0 · F(x) adds nothing to the bit",
        every=True,
    )
    added = zip(_end(e, "layerscale"), _end(e, "pre"), strict=True)
    small = Criterion(
        name="layerscale: growth over λ² of Pre-Norm's",
        values=[(a - 1) / (LAMBDA**2 * (b - 1)) for a, b in added],
        kind="at_most",
        target=1.0,
        tolerance=1.2,
        reason="its branches add λ² of Pre-Norm's squares or less, as its stream stays nearer the text; cross terms "
        "with the stream scale by λ alone and come to 2·√(2L/d)/(λL) = "
        f"{2 * (2 * LAYERS / WIDTH) ** 0.5 / (LAMBDA * LAYERS):.1f} of it within one network",
    )
    slower = Criterion(
        name="lns: growth over Pre-Norm's",
        values=[(a - 1) / (b - 1) for a, b in zip(_end(e, "lns"), _end(e, "pre"), strict=True)],
        kind="below",
        target=1.0,
        tolerance=0.3,
        reason=f"1/l of the squares leaves H_L/L = {sum(1 / n for n in range(1, LAYERS + 1)) / LAYERS:.2f} of it",
        every=True,
    )
    return [*level, *linear, *growing, same, skipping, still, small, slower]


def _summary(e: Evidence) -> str:
    parts = ", ".join(f"{name} {estimate(_end(e, name))}" for name in ("post", "pre", "sandwich", "sub-ln", "lns"))
    return f"mean square after {LAYERS} blocks: {parts}; rezero exactly 1"


def _figures(e: Evidence) -> list[Chart]:
    places = list(range(len(NAMES)))

    def mean(key: str) -> list[float]:
        return [sum(e.numbers(name, key)) / len(e.numbers(name, key)) for name in NAMES]

    ends = [sum(_end(e, name)) / len(_end(e, name)) for name in NAMES]
    return [
        Chart(
            caption=f"Every wiring of normkit and {len(ZOO)} more, fresh, {LAYERS} blocks on the same draws and text: "
            "mean square of the stream (resi-dual: of its summed one) at the end over that of the embedding, and the "
            "gradient on the first and last feed-forward's down-projection. Means over seeds.",
            alt=", ".join(f"{name}: {value:.3g}" for name, value in zip(NAMES, ends, strict=True)),
            panels=[
                Panel(
                    "size of the stream",
                    "wiring",
                    "mean square",
                    [Series("after the last block", places, ends, kind="points")],
                    x_names=NAMES,
                    y_scale="log",
                ),
                Panel(
                    "gradients",
                    "wiring",
                    "norm of the gradient",
                    [
                        Series("first block", places, mean("first"), kind="points"),
                        Series("last block", places, mean("last"), kind="points"),
                    ],
                    x_names=NAMES,
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H1",
        title="A table of wirings and the law each sets",
        sentence="Post-Norm and Pre-Norm both have their price, and so compromises appeared.",
        sentences=(42, 43),
        source="Article, “Compromises”; sources of the wirings in docs/wirings.md.",
        measured=f"Fresh networks of {LAYERS} blocks (width {WIDTH}, ReLU, RMSNorm, Xavier), {len(NAMES)} wirings "
        f"around the same sublayers, on {ROWS} windows of {CONTEXT} bytes of real text; {NETWORKS} networks a "
        "measurement.",
        study=STUDY,
        plays={name: name for name in NAMES},
        literal=Rule(
            text="Mean square after 16 blocks: 1 where a norm ends the step (post, deepnorm, b2t, resi-dual's first "
            "stream, keel, ngpt), 1 + 2L where branches are normed (sandwich, reordered), 1 + 2.6·ln(2L)·L where the "
            "last maps read what is normed (sub-ln), more than doubled for pre, parallel, mix-ln and resi-dual's "
            "second stream, unchanged to the bit for rezero; at most λ² of Pre-Norm's growth for layerscale, clearly "
            "less than Pre-Norm's for lns. After 4 blocks resi-dual's first stream is as close to the text as "
            "Post-Norm's, and b2t's is closer, by 0.14 in cosine.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Every wiring played by Pre-Norm: a network that obeys only its own law.",
            plays=dict.fromkeys(NAMES, "pre"),
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Each law is read off the formula: which norm touches what last, and which factor stands before a "
            "branch. They hold at initialisation; learnt gains and factors may leave them.",
            status="tested",
        ),
    ),
)
