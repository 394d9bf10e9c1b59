"""P1: a norm before and one after every sublayer, and what that makes of the residual stream.

Every sublayer then reads a vector of rms 1 and adds a vector of rms 1. By the triangle inequality no token's rms can
exceed its first by more than the number of sublayers, whatever the weights; and where what is added does not depend
on what is there, mean squares add up: 1 + 2L after L blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, ROWS = 16, 128, 4
STEPS = 2 * LAYERS
NETWORKS = {"drawn": 4, "large": 1}  # averaged in one measurement
EPS = 1e-6
LARGE = 100.0  # factor on every down-projection of the second network


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{wiring}/{size}", {"wiring": wiring, "factor": factor, "networks": NETWORKS[size]})
        for wiring in ("sandwich", "pre")
        for size, factor in (("drawn", 1.0), ("large", LARGE))
    ]


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean(-1).sqrt()


def _listen(model: Transformer) -> list[Tensor]:
    """Return the list that will hold every token's rms of what each sublayer reads, once the model has run."""
    heard: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        heard.append(_rms(args[0]))

    for sublayer in (*model.attentions, *model.feed_forwards):
        sublayer.register_forward_pre_hook(note)
    return heard


@torch.no_grad()
def _one(params: Params, bench: Bench, draws: Draws) -> dict[str, list[float]]:
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", wiring=params["wiring"])
    model = build(config, draws).to(bench.settings.device).double()
    for name, linear in model.weights().items():
        if name.endswith("/down"):
            linear.weight *= params["factor"]
    read = _listen(model)
    stream = list(model.stream(random_windows(bench, draws, ROWS)[:, :-1]))
    added = [_rms(b - a) for a, b in pairwise(stream)]
    over = torch.stack([_rms(x) for x in stream[1:]]) - _rms(stream[0])
    steps = torch.arange(1, STEPS + 1, device=over.device)[:, None, None]
    return {
        "least read": [min(float(r.min()) for r in read)],
        "most read": [max(float(r.max()) for r in read)],
        "least added": [min(float(a.min()) for a in added)],
        "most added": [max(float(a.max()) for a in added)],
        "over bound": [float((over / steps).max())],  # growth of a token's rms per sublayer so far
        "stream": [float(x.square().mean() / stream[0].square().mean()) for x in stream],
    }


def _measure(params: Params, bench: Bench) -> Values:
    """Average the stream over independent networks on independent text; keep the extremes."""
    rows = [_one(params, bench, draws) for draws in independent(bench.draws, params["networks"])]
    values: Values = {"stream": [sum(c) / len(rows) for c in zip(*(row["stream"] for row in rows), strict=True)]}
    pick: dict[str, Callable[[list[float]], float]] = {"least": min, "most": max, "over": max}
    for key in rows[0]:
        if key != "stream":
            values[key] = pick[key.partition(" ")[0]]([row[key][0] for row in rows])
    return values


STUDY = Study(
    id="sandwich_stream",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.15 * params["networks"],
    seeds=5,
    corpus=True,
)


def _off(e: Evidence, path: str, what: str) -> list[float]:
    """Return, per seed, the largest |rms − 1| of any token and sublayer."""
    pairs = zip(e.numbers(path, f"least {what}"), e.numbers(path, f"most {what}"), strict=True)
    return [max(abs(1 - low), abs(high - 1)) for low, high in pairs]


def _law(e: Evidence) -> list[float]:
    return [row[-1] / (1 + STEPS) for row in e.values("sandwich/drawn", "stream")]


def _criteria(e: Evidence) -> list[Criterion]:
    exact = [
        Criterion(
            name=f"largest |rms − 1| of what any sublayer {verb}, any token, weights {size}",
            values=_off(e, f"sandwich/{size}", what),
            kind="at_most",
            target=0.0,
            tolerance=1e-3,
            reason="RMSNorm leaves 1/√(1 + ε/v), off by ε/2v: a sublayer whose output's variance v falls to 10⁻³ "
            "loses 5×10⁻⁴, half of this; fresh Xavier sublayers add variances of the order of a tenth",
            every=True,
        )
        for size in ("drawn", "large")
        for what, verb in (("read", "reads"), ("added", "adds"))
    ]
    bound = [
        Criterion(
            name=f"largest growth of a token's rms, per sublayer, weights {size}",
            values=e.numbers(f"sandwich/{size}", "over bound"),
            kind="at_most",
            target=1.0,
            tolerance=1e-12,
            reason="triangle inequality; float64 rounding of so few sums",
            every=True,
        )
        for size in ("drawn", "large")
    ]
    law = Criterion(
        name=f"mean square after {LAYERS} blocks over that of 1 + 2L",
        values=_law(e),
        kind="near",
        target=1.0,
        tolerance=0.2,
        reason="where all tokens look alike one network's cosines of stream and branch do not average out: √(2/d) = "
        f"{(2 / WIDTH) ** 0.5:.0%} of the sum, {(2 / WIDTH / 4) ** 0.5:.0%} for four networks; three of these",
    )
    return [*exact, *bound, law]


def _summary(e: Evidence) -> str:
    off = max(v for size in ("drawn", "large") for v in _off(e, f"sandwich/{size}", "added"))
    last = estimate([row[-1] for row in e.values("sandwich/drawn", "stream")])
    pre = estimate([row[-1] for row in e.values("other/drawn", "stream")])
    return (
        f"every branch adds rms 1 within {number(off, 2)}; mean square after {LAYERS} blocks {last} "
        f"(1 + 2L = {1 + STEPS}; Pre {pre})"
    )


def _figures(e: Evidence) -> list[Chart]:
    blocks = list(range(1, LAYERS + 1))

    def line(path: str, label: str) -> Series:
        return band(label, blocks, [row[2::2] for row in e.values(path, "stream")])

    law = Series("1 + 2L", blocks, [1.0 + 2 * n for n in blocks], kind="reference")
    worst = Series("(1 + 2L)²", blocks, [(1.0 + 2 * n) ** 2 for n in blocks], kind="reference")
    return [
        Chart(
            caption="Mean square of the stream over its first, by block; with the weights as drawn, and with every "
            f"down-projection {LARGE:g} times as large. Bands: min–max over seeds.",
            alt="Sandwich norm climbs along a dashed straight line with either weights; Pre-Norm climbs beside it as "
            "drawn and jumps by four orders of magnitude with large weights.",
            panels=[
                Panel(
                    "the stream's size",
                    "blocks L",
                    "mean square / first mean square",
                    [
                        line("sandwich/drawn", "Sandwich"),
                        line("sandwich/large", "Sandwich, large"),
                        line("other/drawn", "Pre"),
                        line("other/large", "Pre, large"),
                        law,
                        worst,
                    ],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="P1",
        title="Sandwich norm bounds input and output",
        sentence="Sandwich norm places a norm before and one after the sublayer and so bounds the size of its input "
        "and of its output; CogView used it, and Gemma 2's two RMSNorms per sublayer follow the same idea.",
        sentences=(43,),
        source="Article, “Compromises”; Ding et al. 2021, arXiv 2105.13290.",
        measured=f"Fresh networks of {LAYERS} blocks (width {WIDTH}, ReLU, RMSNorm, Xavier) in float64 on {ROWS} "
        f"windows of {CONTEXT} bytes of real text, once as drawn and once with every down-projection {LARGE:g} times "
        "as large: rms of what every sublayer reads and adds, for every token, and the stream's mean square. "
        f"{NETWORKS['drawn']} networks as drawn a measurement, {NETWORKS['large']} enlarged.",
        study=STUDY,
        plays={"sandwich": "sandwich", "other": "pre"},
        literal=Rule(
            text="Every sublayer reads and adds vectors of rms 1 ± 0.001, whatever its weights; no token's rms grows "
            "by more than 1 per sublayer; the stream's mean square after L blocks is 1 + 2L ± 20 %.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The same weights under Pre-Norm, without the norm on the output.",
            plays={"sandwich": "pre", "other": "sandwich"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The norm after the sublayer takes its weights' size out of what it adds: multiplied by 100 they "
            "change nothing. What stays free is the direction, and with it whether additions add up or cancel; the "
            "law 1 + 2L says that in a fresh network they do neither. A trained gain can scale each branch again.",
            status="tested",
        ),
    ),
)
