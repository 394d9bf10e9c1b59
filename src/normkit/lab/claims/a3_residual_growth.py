"""A3 and A4: in a Pre-Norm network the residual stream grows with depth, and so each block counts for less.

One study serves both: a fresh network of `LAYERS` blocks reads text, and every block is asked how large the
stream is that it reads and how large a vector its sublayers add. At initialisation a block's weights do not
depend on how many blocks follow, so the stream after L blocks is that of a network L deep.

The setting is the one theory treats: ReLU, LayerNorm, Xavier, bytes embedded with variance 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.initial import independent
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

LAYERS, WIDTH, ROWS = 32, 128, 8
DEPTHS = (2, 4, 8, 16, 32)
RATIOS = (4, 1)  # k = hidden width / width of the feed-forward
NETWORKS = {4: 4, 1: 1}  # averaged in one measurement; the growth is judged at k = 4
SUBLAYERS = ("attention", "feed-forward")


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(f"{wiring}/k-{k}", {"wiring": wiring, "k": k}) for wiring in ("pre", "post") for k in RATIOS]


def _mean_square(x: Tensor) -> float:
    return float(x.square().mean())


def _outputs(model: Transformer, tokens: Tensor) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return the stream (embedded, then after each step) and what every sublayer added to it."""
    added: dict[str, list[Tensor]] = {name: [] for name in SUBLAYERS}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, y: added[name].append(y)

    for name, sublayers in zip(SUBLAYERS, (model.attentions, model.feed_forwards), strict=True):
        for sublayer in sublayers:
            sublayer.register_forward_hook(recorder(name))
    return list(model.stream(tokens)), added


def _measure(params: Params, bench: Bench) -> Values:
    """Average the mean squares of independent networks on independent text."""
    rows = [_one(params, bench, draws) for draws in independent(bench.draws, NETWORKS[params["k"]])]
    return {key: [sum(column) / len(rows) for column in zip(*(r[key] for r in rows), strict=True)] for key in rows[0]}


@torch.no_grad()
def _one(params: Params, bench: Bench, draws: Draws) -> dict[str, list[float]]:
    assert bench.corpus is not None
    config = TransformerConfig(
        layers=LAYERS,
        width=WIDTH,
        heads=4,
        hidden=params["k"] * WIDTH,
        feed_forward="relu",
        norm="layer",
        wiring=params["wiring"],
    )
    device = bench.settings.device
    starts = torch.randint(0, len(bench.corpus.train) - CONTEXT, (ROWS,), generator=draws.shared("text"))
    tokens = bench.corpus.train[starts[:, None] + torch.arange(CONTEXT)].long().to(device)
    stream, added = _outputs(build(config, draws).to(device), tokens)
    attention, feed_forward = added["attention"], added["feed-forward"]
    return {
        "stream": [_mean_square(x) for x in stream[::2]],
        "read by feed-forward": [_mean_square(x) for x in stream[1::2]],
        "attention": [_mean_square(a) for a in attention],
        "feed-forward": [_mean_square(f) for f in feed_forward],
        "block": [_mean_square(a + f) for a, f in zip(attention, feed_forward, strict=True)],
    }


STUDY = Study(
    id="residual_growth",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.3 * NETWORKS[params["k"]],
    seeds=5,
    corpus=True,
)


def increment_law(k: int) -> float:
    """Return the mean square that a fresh ReLU feed-forward adds, on input of mean square 1.

    Xavier gives up-weights of variance 2/(d + kd): pre-activations have variance 2/(1 + k), ReLU keeps half their
    mean square, and kd of them through down-weights of the same variance make k · 2/(1 + k) · 1/(1 + k).
    """
    return 2 * k / (1 + k) ** 2


def _growth(e: Evidence) -> list[float]:
    return [log_log_slope(DEPTHS, [row[d] for d in DEPTHS]) for row in e.values("residual/k-4", "stream")]


def _increments(e: Evidence, k: int) -> list[float]:
    rows = e.values(f"residual/k-{k}", "feed-forward")
    return [sum(row) / len(row) / increment_law(k) for row in rows]


def _shares(e: Evidence, what: str) -> list[list[float]]:
    """Return, per seed and block, the rms of what is added over the rms of the stream it is added to."""
    runs = zip(
        e.values("residual/k-4", what),
        e.values("residual/k-4", "stream"),
        e.values("residual/k-4", "read by feed-forward"),
        strict=True,
    )
    return [
        [(a / r) ** 0.5 for a, r in zip(add, between if what == "feed-forward" else stream[:-1], strict=True)]
        for add, stream, between in runs
    ]


def _dilution(e: Evidence, what: str) -> list[float]:
    return [log_log_slope(range(1, LAYERS + 1), row) for row in _shares(e, what)]


def _a3_criteria(e: Evidence) -> list[Criterion]:
    law = [
        Criterion(
            name=f"mean square a feed-forward adds, mean over blocks, over 2k/(1+k)² (k = {k})",
            values=_increments(e, k),
            kind="near",
            target=1.0,
            tolerance=0.15,
            reason=f"with {LAYERS} blocks of width {WIDTH} one network's mean scatters by at most "
            f"√(2/d + 5/kd)/√{LAYERS} = {(2 / WIDTH + 5 / (k * WIDTH)) ** 0.5 / LAYERS**0.5:.1%}, the bound met when "
            "all bytes look alike; half the tolerance still holds two such deviations on one seed",
        )
        for k in RATIOS
    ]
    growth = Criterion(
        name="slope of ln mean-square(x_L) over ln L, L = 2 … 32",
        values=_growth(e),
        kind="near",
        target=1.0,
        tolerance=0.1,
        reason="“about linear”: over this sixteenfold depth the ends lie within 16^0.1 = 1.32 of a straight line "
        "through zero",
    )
    return [growth, *law]


_LESS = (
    "“less and less”: a slope of −0.1 loses 29 % from the first block to the 32nd, twice that half; a smaller loss "
    "would not be called dilution"
)


def _a4_criteria(e: Evidence) -> list[Criterion]:
    stream = Criterion(
        name="slope of ln mean-square(x_L) over ln L",
        values=_growth(e),
        kind="above",
        target=0.0,
        tolerance=0.1,
        reason="“keeps growing”: a slope of 0.1 over L = 2 … 32 is growth by 32 %",
    )
    shares = [
        Criterion(
            name=f"slope over ln l of ln (rms of what the {what} adds / rms of its stream), l = 1 … {LAYERS}",
            values=_dilution(e, what),
            kind="below",
            target=0.0,
            tolerance=0.1,
            reason=_LESS,
        )
        for what in (*SUBLAYERS, "block")
    ]
    return [stream, *shares]


def _a3_summary(e: Evidence) -> str:
    added = estimate(_increments(e, RATIOS[0]))
    return f"mean square after L blocks ∝ L^p, p = {estimate(_growth(e))}; feed-forwards add {added} × 2k/(1 + k)²"


def _a4_summary(e: Evidence) -> str:
    first, last = (estimate([100 * row[i] for row in _shares(e, "block")]) for i in (0, -1))
    return (
        f"a block adds {first} % of its stream's rms at first, {last} % at last; share ∝ l^p, "
        f"p = {estimate(_dilution(e, 'block'))}"
    )


def _a3_figures(e: Evidence) -> list[Chart]:
    blocks = list(range(1, LAYERS + 1))
    stream = [row[1:] for row in e.values("residual/k-4", "stream")]
    low, high = [1 + n / 2 for n in blocks], [1 + 3 * n / 2 for n in blocks]
    added = [band(f"{what}, k=4", blocks, e.values("residual/k-4", what)) for what in SUBLAYERS]
    laws = [Series(f"2k/(1+k)², k={k}", blocks, [increment_law(k)] * LAYERS, kind="reference") for k in RATIOS]
    return [
        Chart(
            caption=f"Left: mean square of the stream after L blocks, width {WIDTH}, Xavier, ReLU, with the bounds "
            "of Xiong et al.'s Lemma 2 (1 + L/2 and 1 + 3L/2). Right: mean square that each sublayer adds. Bands: "
            "min–max over seeds.",
            alt="The stream rises along a straight line of slope one between two dashed bounds. What feed-forwards "
            "add lies level on its law; what attention adds rises with depth.",
            panels=[
                Panel(
                    "the stream grows",
                    "blocks L",
                    "mean square of the stream",
                    [
                        band("measured", blocks, stream),
                        Series("1 + L/2", blocks, low, kind="reference"),
                        Series("1 + 3L/2", blocks, high, kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel(
                    "what sublayers add",
                    "block",
                    "mean square added",
                    [*added, band("feed-forward, k=1", blocks, e.values("residual/k-1", "feed-forward")), *laws],
                ),
            ],
        )
    ]


def _a4_figures(e: Evidence) -> list[Chart]:
    blocks = list(range(1, LAYERS + 1))
    first = interval([row[0] for row in _shares(e, "block")]).mean
    return [
        Chart(
            caption="Root mean square of what is added over that of the stream it is added to, by block. Dashed: "
            "∝ 1/√l. Bands: min–max over seeds.",
            alt="Three falling curves, for blocks, attentions and feed-forwards, near a dashed line of slope −1/2.",
            panels=[
                Panel(
                    "share of the stream",
                    "block l",
                    "rms added / rms of the stream",
                    [
                        *(band(what, blocks, _shares(e, what)) for what in ("block", *SUBLAYERS)),
                        Series("∝ 1/√l", blocks, [first * n**-0.5 for n in blocks], kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


_MEASURED = (
    f"A fresh Pre-Norm network of {LAYERS} blocks (width {WIDTH}, 4 heads, ReLU, LayerNorm, Xavier, RoPE) reads "
    f"{ROWS} windows of {CONTEXT} bytes of real text; recorded are the mean squares of the stream that each sublayer "
    "reads and of what it adds, averaged over independent networks. Feed-forwards are k = 4 "
    "and k = 1 times as wide as the stream."
)
_POST = Control(
    text="The same weights under Post-Norm, which rescales the stream after every sum: nothing may grow and no "
    "block's share may shrink.",
    plays={"residual": "post"},
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="A3",
        title="The residual stream grows linearly",
        sentence="Each layer's output is added to what is there, so unless the sublayers' scale is controlled the "
        "variance of the residual stream grows about linearly with the number of layers.",
        sentences=(7,),
        source="Article, “Normalization and the residual stream”; Xiong et al. 2020, Lemma 2.",
        measured=_MEASURED + " A line is fitted to ln mean-square over ln L at L = 2, 4, 8, 16, 32.",
        study=STUDY,
        plays={"residual": "pre"},
        literal=Rule(
            text="The mean square of the stream after L blocks grows as L^p with p = 1 ± 0.1, and feed-forwards add "
            "what theory says they must, 2k/(1+k)² ± 15 %, for k = 4 and 1.",
            origin="theory",
            criteria=_a3_criteria,
        ),
        control=_POST,
        summary=_a3_summary,
        figures=_a3_figures,
        explanation=Explanation(
            text="Feed-forwards add a constant that follows from the initialisation alone (tested at two widths): "
            "that part of the growth is linear. Attention adds more the deeper it sits, since it averages values "
            "that have become alike; it bends the line upwards, while the embedding's own variance, which the "
            "first blocks have yet to outgrow, bends it down.",
            status="conjecture",
        ),
    ),
    Claim(
        id="A4",
        title="Deep blocks are diluted",
        sentence="Under Pre-Norm the stream's scale keeps growing with depth, and the output of deep sublayers gets "
        "smaller and smaller beside it: deep modules contribute less and less.",
        sentences=(40,),
        source="Article, “Pre-Norm”.",
        measured=_MEASURED + " A line is fitted to ln share over ln l, l = 1 … 32.",
        study=STUDY,
        plays={"residual": "pre"},
        literal=Rule(
            text="The stream grows, and the share of it that attentions, feed-forwards and whole blocks add falls "
            "with depth: log-log slopes below −0.1. (A stream of variance 1 + cl that every block adds c to gives "
            "−1/2; it is drawn, not required, since the sentence names no power.)",
            origin="sentence",
            criteria=_a4_criteria,
        ),
        control=_POST,
        summary=_a4_summary,
        figures=_a4_figures,
        explanation=Explanation(
            text="A sublayer reads a normalised stream, so what it adds has a size of its own while the stream keeps "
            "growing as in A3; rescaling the stream after every sum, the control, ends the dilution with the same "
            "weights. Measured at initialisation: training may change it.",
            status="tested",
        ),
    ),
)
