"""F1: the gradient at the last feed-forward of a fresh network, Post-Norm against Pre-Norm, as depth grows.

The article says Post-Norm's gradients near the output are abnormally amplified at the start of training, so that
deep stacks need warm-up. The theory it cites (Xiong et al. 2020, theorem 1; Xavier) bounds the last feed-forward's
gradient by a constant in depth under Post-Norm, and by 1/√L of that under Pre-Norm. "Amplified with depth" is
therefore the literal rule, "flat, while Pre-Norm's shrinks as 1/√L" the corrected one. Exponents are judged, not
norms: a norm depends on the batch.
"""

from __future__ import annotations

import math

import torch

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.initial import INITIALS, independent
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

DEPTHS = (2, 4, 8, 16, 32)
ROWS = 8
JUDGED = "xavier"
NETWORKS = 4  # averaged in one measurement where a verdict depends on it
TOLERANCE = 0.2
WHY = (
    "the exponents in question, of a constant and of √L, lie 1/2 apart: doubled, the tolerance is still short of it, "
    "so neither can pass for the other; half of it leaves room for logarithms, which the theory's bounds do not exclude"
)


def _arms(settings: Settings) -> list[Arm]:
    width = 64 if settings.mode == "quick" else 128
    return [
        Arm(
            f"{wiring}/{init}",
            {"wiring": wiring, "init": init, "width": width, "networks": NETWORKS if init == JUDGED else 1},
        )
        for init in INITIALS
        for wiring in ("post", "pre")
    ]


def _gradient(params: Params, bench: Bench, draws: Draws, layers: int) -> float:
    """Return the Frobenius norm of the loss's gradient on the last block's down-projection."""
    assert bench.corpus is not None
    config = TransformerConfig(
        layers=layers,
        width=params["width"],
        heads=4,
        feed_forward="relu",
        norm="layer",
        wiring=params["wiring"],
        init=params["init"],
    )
    device = bench.settings.device
    model = build(config, draws).to(device)
    starts = torch.randint(0, len(bench.corpus.train) - CONTEXT - 1, (ROWS,), generator=draws.shared("text"))
    windows = bench.corpus.train[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    # Only the last block's weight is asked for, so nothing below it is differentiated.
    weight = model.weights()[f"{layers - 1}/down"].weight
    (gradient,) = torch.autograd.grad(next_byte_loss(model, windows), weight)
    return float(gradient.norm())


def _measure(params: Params, bench: Bench) -> Values:
    """Measure each depth; the root mean square over independent networks, on independent text."""
    draws = independent(bench.draws, params["networks"])
    squares = [[_gradient(params, bench, d, layers) ** 2 for d in draws] for layers in DEPTHS]
    return {"gradient": [(sum(row) / len(row)) ** 0.5 for row in squares]}


STUDY = Study(
    id="last_layer_gradient",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: params["networks"] * (0.3 if params["width"] == 64 else 0.8),
    seeds=5,
    corpus=True,
)


def _rows(e: Evidence, role: str, init: str = JUDGED) -> list[list[float]]:
    return e.values(f"{role}/{init}", "gradient")


def _ratios(e: Evidence, init: str = JUDGED) -> list[list[float]]:
    """Return post over pre, seed by seed."""
    return [
        [a / b for a, b in zip(post, pre, strict=True)]
        for post, pre in zip(_rows(e, "post", init), _rows(e, "pre", init), strict=True)
    ]


def _slopes(rows: list[list[float]]) -> list[float]:
    return [log_log_slope(DEPTHS, row) for row in rows]


_POST = "slope over ln L of ln ‖last gradient‖, Post-Norm, Xavier"


def _literal(e: Evidence) -> list[Criterion]:
    return [Criterion(_POST, _slopes(_rows(e, "post")), "above", 0.0, TOLERANCE, WHY)]


def _corrected(e: Evidence) -> list[Criterion]:
    pre = "slope over ln L of ln ‖last gradient‖, Pre-Norm, Xavier"
    ratio = "slope over ln L of ln (Post-Norm / Pre-Norm), paired, Xavier"
    return [
        Criterion(_POST, _slopes(_rows(e, "post")), "near", 0.0, TOLERANCE, WHY),
        Criterion(pre, _slopes(_rows(e, "pre")), "near", -0.5, TOLERANCE, WHY),
        Criterion(ratio, _slopes(_ratios(e)), "near", 0.5, TOLERANCE, WHY),
    ]


def _summary(e: Evidence) -> str:
    post, pre = (estimate(_slopes(_rows(e, role))) for role in ("post", "pre"))
    last = estimate([row[-1] for row in _ratios(e)])
    return f"Xavier: Post ∝ L^p, p = {post}; Pre, p = {pre}; Post/Pre at L = {DEPTHS[-1]}: {last}"


def _panel(e: Evidence, init: str) -> Panel:
    return Panel(
        "Xavier" if init == "xavier" else init,
        "blocks L",
        "norm of the last gradient (nats)",
        [band("Post-Norm", DEPTHS, _rows(e, "post", init)), band("Pre-Norm", DEPTHS, _rows(e, "pre", init))],
        x_scale="log",
        y_scale="log",
    )


def _figures(e: Evidence) -> list[Chart]:
    anchor = interval([math.log(r / d**0.5) for row in _ratios(e) for r, d in zip(row, DEPTHS, strict=True)]).mean
    law = [math.exp(anchor) * d**0.5 for d in DEPTHS]
    ratio = Panel(
        "Post over Pre, Xavier",
        "blocks L",
        "ratio of the norms",
        [band("Post / Pre", DEPTHS, _ratios(e)), Series("∝ √L", DEPTHS, law, kind="reference")],
        x_scale="log",
        y_scale="log",
    )
    others = [init for init in INITIALS if init != "xavier"]
    return [
        Chart(
            caption="Norm of the loss's gradient on the last feed-forward's down-projection in fresh networks of L "
            "blocks, Xavier. Bands: min–max over seeds, both wirings on the same weights and text.",
            alt="With depth Post-Norm's curve stays level and Pre-Norm's falls; their ratio follows a dashed line "
            "that rises as the square root of L.",
            panels=[_panel(e, "xavier"), ratio],
        ),
        Chart(
            caption="The same under other initialisations. "
            + "; ".join(f"{init}: {INITIALS[init].text}" for init in others)
            + ".",
            alt="Four panels of two curves each. Both are level where weights are small beside the embedding; "
            "elsewhere Pre-Norm's falls.",
            panels=[_panel(e, init) for init in others],
        ),
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="F1",
        title="Post-Norm's last gradient",
        sentence="Early in training Post-Norm's gradients near the output are abnormally amplified, which is why deep "
        "stacks need warm-up.",
        sentences=(38,),
        source="Article, “Post-Norm”; Xiong et al. 2020, theorem 1.",
        measured="Norm of the gradient on the last block's down-projection in fresh networks of 2, 4, 8, 16 and 32 "
        f"blocks (ReLU, LayerNorm, RoPE), on {ROWS} windows of {CONTEXT} bytes of real text. Pre-Norm has its final "
        "norm. Judged with Xavier, the initialisation of the theory; others are shown. The warm-up half of the "
        "sentence is judged by F3b and F3d. Under Xavier a measurement is the root mean square over "
        f"{NETWORKS} networks.",
        study=STUDY,
        plays={"post": "post", "pre": "pre"},
        literal=Rule(
            text="Under Post-Norm the last gradient grows with depth: log-log slope above 0.2 (√L would give 0.5).",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="Post-Norm's exponent is 0 ± 0.2, Pre-Norm's −1/2 ± 0.2, that of their ratio 1/2 ± 0.2.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="With Xavier weights Post-Norm's gradient at the last layer does not grow with depth: it stays as "
        "large as in a shallow network, while Pre-Norm's shrinks as 1/√L. Beside Pre-Norm's it is √L times larger.",
        control=Control(
            text="The arms swapped: Pre-Norm's gradient must not pass for flat, nor Post-Norm's for falling.",
            plays={"post": "pre", "pre": "post"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Under Pre-Norm the final norm divides by the stream's scale, which grows as √L (A3), and its "
            "Jacobian scales the gradient by the inverse; under Post-Norm every norm reads a sum whose scale does not "
            "depend on depth. With weights of 0.02 beside an embedding of 1 the stream hardly grows, and Pre-Norm's "
            "gradient does not fall either; with an embedding of 0.02 as well it grows, and the gradient falls.",
            status="tested",
        ),
    ),
)
