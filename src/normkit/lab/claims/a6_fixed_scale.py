"""A6: a norm before every sublayer hands it an input of one scale while the stream it reads grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, ROWS = 16, 128, 4
SUBLAYERS = 2 * LAYERS
EPS = {"rms": 1e-6, "layer": 1e-5}  # the defaults of normkit.RMSNorm and normkit.LayerNorm
ROUNDING = 2.0**-22  # of an rms of float32 results: statistic and product within 1.5 units of 2⁻²⁴ each, and a margin


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{kind}/{norm}", {"norm": norm if kind == "norm" else "none"}) for kind in ("norm", "none") for norm in EPS
    ]


def _scale(x: Tensor, centred: bool) -> Tensor:
    """Return every token's rms, or standard deviation, over its features."""
    wide = x.double()
    return wide.std(-1, correction=0) if centred else wide.square().mean(-1).sqrt()


def _listen(model: Transformer) -> list[Tensor]:
    """Return the list that will hold what every sublayer reads, in order, once the model has run."""
    heard: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        heard.append(args[0])

    for attention, feed_forward in zip(model.attentions, model.feed_forwards, strict=True):
        attention.register_forward_pre_hook(note)
        feed_forward.register_forward_pre_hook(note)
    return heard


@torch.no_grad()
def _measure(params: Params, bench: Bench) -> Values:
    config = TransformerConfig(
        layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", norm=params["norm"], wiring="pre"
    )
    model = build(config, bench.draws).to(bench.settings.device)
    heard = _listen(model)
    stream = list(model.stream(random_windows(bench, bench.draws, ROWS)[:, :-1]))
    read = [_scale(x, params["norm"] == "layer") for x in heard]
    return {
        "smallest": [float(s.min()) for s in read],
        "largest": [float(s.max()) for s in read],
        "stream": [float(x.double().square().mean().sqrt()) for x in stream[:-1]],
        "least mean square": min(float(_scale(x, params["norm"] == "layer").square().min()) for x in stream[:-1]),
    }


STUDY = Study(id="fixed_scale", arms=_arms, measure=_measure, seconds=lambda params: 0.25, seeds=3, corpus=True)


def _deviations(e: Evidence, norm: str) -> list[float]:
    """Return, per seed, the largest |rms − 1| of any token that any sublayer reads."""
    pairs = zip(e.values(f"read/{norm}", "smallest"), e.values(f"read/{norm}", "largest"), strict=True)
    return [max(1 - min(low), max(high) - 1) for low, high in pairs]


def _growth(e: Evidence, norm: str) -> list[float]:
    steps = range(1, SUBLAYERS + 1)
    return [log_log_slope(steps, row) for row in e.values(f"read/{norm}", "stream")]


def _criteria(e: Evidence) -> list[Criterion]:
    fixed = [
        Criterion(
            name=f"largest |scale − 1| of a token's input, over all {SUBLAYERS} sublayers, {norm} norm",
            values=_deviations(e, norm),
            kind="at_most",
            target=0.0,
            tolerance=4 * eps + ROUNDING,
            reason=f"an input of variance v leaves with scale 1/√(1 + ε/v), off by ε/2v: 2ε = {2 * eps:g} at v = 1/4, "
            "below which no token of a stream that starts with variance 1 falls, and twice that is given; and 2⁻²² "
            "for rounding to float32",
            every=True,
        )
        for norm, eps in EPS.items()
    ]
    grows = [
        Criterion(
            name=f"slope over ln(sublayers) of ln rms(stream), {norm} norm",
            values=_growth(e, norm),
            kind="above",
            target=0.0,
            tolerance=0.1,
            reason=f"a stream that did not grow would need no correcting; over {SUBLAYERS} sublayers a slope of 0.1 "
            "is growth by 41 %, and a linear law of the variance (A3) comes near 0.5",
        )
        for norm in EPS
    ]
    return [*fixed, *grows]


def _summary(e: Evidence) -> str:
    worst = max(v for norm in EPS for v in _deviations(e, norm))
    last = estimate([row[-1] / row[0] for row in e.values("read/rms", "stream")])
    return f"inputs of {SUBLAYERS} sublayers: scale 1 within {number(worst, 2)}; the stream's rms grows {last} times"


def _figures(e: Evidence) -> list[Chart]:
    steps = list(range(1, SUBLAYERS + 1))
    middle: Callable[[str], list[list[float]]] = lambda path: [  # noqa: E731
        [(a * b) ** 0.5 for a, b in zip(low, high, strict=True)]
        for low, high in zip(e.values(path, "smallest"), e.values(path, "largest"), strict=True)
    ]
    return [
        Chart(
            caption="Scale of the stream and of what every sublayer reads, RMSNorm: the geometric mean of the least "
            "and the largest token's. Bands: min–max over seeds.",
            alt="The stream's scale climbs with every sublayer; the input's lies on one throughout.",
            panels=[
                Panel(
                    "a scale per sublayer",
                    "sublayer",
                    "root mean square",
                    [
                        band("the stream", steps, e.values("read/rms", "stream")),
                        band("what the sublayer reads", steps, middle("read/rms")),
                        Series("1", steps, [1.0] * SUBLAYERS, kind="reference"),
                    ],
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="A6",
        title="A norm before each sublayer fixes its input's scale",
        sentence="Normalization pulls the input back to a fixed scale before a sublayer reads the residual stream, so "
        "that every layer sees inputs distributed alike.",
        sentences=(9,),
        source="Article, “Normalization and the residual stream”.",
        measured=f"A fresh Pre-Norm network of {LAYERS} blocks (width {WIDTH}, ReLU, Xavier) reads {ROWS} windows of "
        f"{CONTEXT} bytes of real text. For every token and sublayer: the rms of what the sublayer reads under "
        "normkit.RMSNorm, the standard deviation under normkit.LayerNorm, in float64; and the stream's rms.",
        study=STUDY,
        plays={"read": "norm"},
        literal=Rule(
            text="Every token reaches every sublayer with scale 1, up to what ε takes and float32 rounds, while the "
            "stream's own scale grows with depth (log-log slope above 0.1).",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The same network without its norms: sublayers read the stream as it is, and their input grows.",
            plays={"read": "none"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Dividing by the rms makes the scale of every token 1/√(1 + ε/v), whatever the stream's variance v. "
            "Scale is all that it fixes: directions and the tokens' likeness to each other go on changing with "
            "depth (A3's attentions add more the deeper they sit).",
            status="tested",
        ),
    ),
)
