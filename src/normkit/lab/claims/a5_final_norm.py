"""A5: what a Pre-Norm network loses without the norm before its head.

One network of `LAYERS` blocks serves all depths: at initialisation a block's weights do not depend on how many
follow, so the stream after L blocks is that of a network L deep, and the head reads it with and without the norm.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.transformer import VOCABULARY, TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, ROWS = 32, 128, 8
DEPTHS = (2, 4, 8, 16, 32)
NETWORKS = 4  # averaged in one measurement
HEAD = (2 * WIDTH / (WIDTH + VOCABULARY)) ** 0.5  # std of a Xavier head's logits on input of mean square 1


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"final": name == "with"}) for name in ("without", "with")]


@torch.no_grad()
def _one(params: Params, bench: Bench, draws: Draws) -> tuple[list[float], list[float]]:
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", norm="layer", wiring="pre")
    model = build(config, draws).to(bench.settings.device)
    windows = random_windows(bench, draws, ROWS)
    stream = list(model.stream(windows[:, :-1]))
    assert model.final_norm is not None
    squares: list[float] = []
    losses: list[float] = []
    for depth in DEPTHS:
        x = stream[2 * depth]
        logits = model.head(model.final_norm(x) if params["final"] else x)
        squares.append(float(logits.square().mean()))
        # A head and its negative are as likely, and between them the luck of which bytes they favour cancels.
        both = [F.cross_entropy(z.flatten(0, 1), windows[:, 1:].flatten()) for z in (logits, -logits)]
        losses.append(float(sum(both)) / 2)
    return squares, losses


def _measure(params: Params, bench: Bench) -> Values:
    """Average over independent networks on independent text: squares for the size, losses as they are."""
    rows = [_one(params, bench, draws) for draws in independent(bench.draws, NETWORKS)]
    return {
        "logits": [(sum(column) / NETWORKS) ** 0.5 for column in zip(*(r[0] for r in rows), strict=True)],
        "excess": [sum(c) / NETWORKS - math.log(VOCABULARY) for c in zip(*(r[1] for r in rows), strict=True)],
    }


STUDY = Study(
    id="final_norm", arms=_arms, measure=_measure, seconds=lambda params: 0.25 * NETWORKS, seeds=5, corpus=True
)


def _slopes(e: Evidence, role: str, key: str) -> list[float]:
    return [log_log_slope(DEPTHS, row) for row in e.values(role, key)]


_TENTH = (
    "over this sixteenfold depth an exponent off by 0.1 is a factor of 1.3; the exponents in question, 0 and 1/2, "
    "stay apart even when it is doubled"
)


def _criteria(e: Evidence) -> list[Criterion]:
    sizes = [
        Criterion(
            name=f"slope over ln L of ln rms(logits), {role} the final norm",
            values=_slopes(e, role, "logits"),
            kind="near",
            target=target,
            tolerance=0.1,
            reason=_TENTH,
        )
        for role, target in (("without", 0.5), ("with", 0.0))
    ]
    scale = Criterion(
        name="rms of the logits with the final norm, mean over L, over √(2d/(d+V))",
        values=[sum(row) / len(row) / HEAD for row in e.values("with", "logits")],
        kind="near",
        target=1.0,
        tolerance=0.15,
        reason="“a fixed scale”: the head is one draw of variance 2/(d+V), and a text of few distinct bytes meets it "
        f"in few directions; even on a single one its {VOCABULARY} logits scatter by 1/√(2V) = "
        f"{(2 * VOCABULARY) ** -0.5:.0%} of their rms, a third of the tolerance",
    )
    loss = Criterion(
        name="slope over ln L of ln (initial loss − ln 256), without the final norm",
        values=_slopes(e, "without", "excess"),
        kind="above",
        target=0.0,
        tolerance=0.2,
        reason="normal logits of variance s² cost s²/2 more than ln V, so L^1; where one byte wins everywhere they "
        "cost s·√(2 ln V), L^(1/2): doubled, the tolerance is still below both",
    )
    level = Criterion(
        name="slope over ln L of ln (initial loss − ln 256), with it",
        values=_slopes(e, "with", "excess"),
        kind="near",
        target=0.0,
        tolerance=0.2,
        reason="as above: no growth, told from the slowest growth that theory allows",
    )
    return [*sizes, scale, loss, level]


def _summary(e: Evidence) -> str:
    first, last = (estimate([row[i] for row in e.values("without", "excess")]) for i in (0, -1))
    kept = estimate([row[-1] for row in e.values("with", "excess")])
    return (
        f"without: logits ∝ L^p, p = {estimate(_slopes(e, 'without', 'logits'))}; loss − ln 256 from {first} to {last} "
        f"nats at L = {LAYERS}; with: {kept}"
    )


def _figures(e: Evidence) -> list[Chart]:
    def panel(title: str, label: str, key: str, law: Series) -> Panel:
        lines = [band(f"{role} final norm", DEPTHS, e.values(role, key)) for role in ("without", "with")]
        return Panel(title, "blocks L", label, [*lines, law], x_scale="log", y_scale="log")

    start = sum(row[0] for row in e.values("without", "logits")) / len(e.values("without", "logits"))
    root = Series("∝ √L", DEPTHS, [start * (d / DEPTHS[0]) ** 0.5 for d in DEPTHS], kind="reference")
    cost = Series("V = 256: d/(d+V)", DEPTHS, [HEAD**2 / 2] * len(DEPTHS), kind="reference")
    return [
        Chart(
            caption=f"Fresh Pre-Norm networks (width {WIDTH}, Xavier) read by a fresh head, with and without a norm "
            "before it. Left: rms of the logits. Right: the first loss above ln 256, that of knowing nothing; dashed, "
            "half the variance of the logits. Bands: min–max over seeds.",
            alt="Without the final norm both curves rise with depth, the logits along a dashed line of slope one half; "
            "with it both are level.",
            panels=[
                panel("what the head says", "rms of the logits", "logits", root),
                panel("what it costs", "initial loss − ln 256 (nats/byte)", "excess", cost),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="A5",
        title="Pre-Norm needs a final norm",
        sentence="Since nothing normalises the residual stream any more, the model usually needs a final norm at its "
        "end, which returns the output to a fixed scale before the head.",
        sentences=(41,),
        source="Article, “Pre-Norm”.",
        measured=f"Fresh Pre-Norm networks of 2 … {LAYERS} blocks (width {WIDTH}, ReLU, LayerNorm, RoPE, Xavier) read "
        f"{ROWS} windows of {CONTEXT} bytes of real text; the same head reads the stream as it is, or normalised. "
        f"Recorded are the rms of the logits and the loss above ln 256, averaged over {NETWORKS} networks, each with a "
        "head and with its negative.",
        study=STUDY,
        plays={"without": "without", "with": "with"},
        literal=Rule(
            text="Without the final norm logits grow as √L (exponent 0.5 ± 0.1) and the initial loss above ln 256 "
            "grows with them (exponent above 0.2); with it logits stay at the head's own scale, √(2d/(d+V)) ± 15 %, "
            "exponent 0 ± 0.1, and so does the loss, 0 ± 0.2.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The two heads swapped: the one with the norm must not pass for growing.",
            plays={"without": "with", "with": "without"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The head is linear: its logits are as large as the stream it reads, which grows as √L (A3). Random "
            "logits of variance s² cost about s²/2 nats, so a deep network starts by unlearning what its head shouts. "
            "The same weights and text with the norm put back cost the same at every depth.",
            status="tested",
        ),
    ),
)
