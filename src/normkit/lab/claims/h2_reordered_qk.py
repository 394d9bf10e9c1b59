"""H2: a norm on the branch alone, as OLMo 2 has it, asks for QK-norm as well.

Without a norm on its input a sublayer reads the stream as it is, √l times larger at depth l. Attention's scores are
quadratic in what it reads: they grow with depth, its softmax saturates and gradients that return through queries and
keys grow with them. QK-norm bounds the scores, whatever the stream.
"""

from __future__ import annotations

import torch

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

DEPTHS = (2, 4, 8, 16)
WIDTH, ROWS, NETWORKS = 64, 4, 4


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"qk_norm": name == "with"}) for name in ("without", "with")]


def _square(layers: int, qk_norm: bool, bench: Bench, draws: Draws) -> float:
    """Return the squared norm of the loss's gradient on the first block's down-projection."""
    config = TransformerConfig(layers=layers, width=WIDTH, heads=4, wiring="reordered", qk_norm=qk_norm)
    model = build(config, draws).to(bench.settings.device)
    (gradient,) = torch.autograd.grad(
        next_byte_loss(model, random_windows(bench, draws, ROWS)), model.weights()["0/down"].weight
    )
    return float(gradient.double().square().sum())


def _measure(params: Params, bench: Bench) -> Values:
    """Measure each depth; the root of the geometric mean over networks, since a few of them have far the largest."""
    draws = independent(bench.draws, NETWORKS)
    logs = [
        [float(torch.tensor(_square(layers, params["qk_norm"], bench, d)).log()) for d in draws] for layers in DEPTHS
    ]
    return {"gradient": [float(torch.tensor(row).mean().div(2).exp()) for row in logs]}


STUDY = Study(
    id="reordered_qk", arms=_arms, measure=_measure, seconds=lambda params: 0.2 * NETWORKS, seeds=5, corpus=True
)


def _slopes(e: Evidence, role: str) -> list[float]:
    return [log_log_slope(DEPTHS, row) for row in e.values(role, "gradient")]


def _deepest(e: Evidence) -> list[float]:
    """Return, per seed, the gradient without QK-norm over that with it, in the deepest network."""
    pairs = zip(e.values("without", "gradient"), e.values("with", "gradient"), strict=True)
    return [a[-1] / b[-1] for a, b in pairs]


_WHY = (
    "what sublayers read without a norm grows as √L, and whatever is proportional to it may; scores are quadratic "
    "in it. A tenth of an exponent is a factor of 1.23 over this depth"
)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="slope over ln L of ln ‖first gradient‖, without QK-norm",
            values=_slopes(e, "without"),
            kind="above",
            target=0.5,
            tolerance=0.1,
            reason=_WHY,
        ),
        Criterion(
            name="slope over ln L of ln ‖first gradient‖, with QK-norm",
            values=_slopes(e, "with"),
            kind="below",
            target=0.5,
            tolerance=0.1,
            reason=_WHY,
        ),
        Criterion(
            name=f"first gradient without over with QK-norm, {DEPTHS[-1]} blocks",
            values=_deepest(e),
            kind="above",
            target=1.0,
            tolerance=0.7,
            reason="a difference of 1/4 between the slopes, the two tolerances and a margin, is 8^(1/4) = 1.7",
        ),
    ]


def _summary(e: Evidence) -> str:
    without, with_norm = (estimate([row[-1] for row in e.values(role, "gradient")]) for role in ("without", "with"))
    return f"first gradient at {DEPTHS[-1]} blocks: {without} without QK-norm, {with_norm} with it"


def _figures(e: Evidence) -> list[Chart]:
    lines = [band(f"{role} QK-norm", DEPTHS, e.values(role, "gradient")) for role in ("without", "with")]
    return [
        Chart(
            caption="Norm of the loss's gradient on the first block's down-projection in fresh networks that norm the "
            "branch alone (x ← x + N(F(x))). Bands: min–max over seeds.",
            alt="Without QK-norm the gradient climbs with depth; with it, it hardly changes.",
            panels=[
                Panel("x + N(F(x))", "blocks L", "norm of the first gradient", lines, x_scale="log", y_scale="log")
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H2",
        title="Norm on the branch alone needs QK-norm",
        sentence="Queries and keys get a norm of their own, per head, after the projection and before RoPE; OLMo 2, "
        "which norms what a sublayer adds and not what it reads, cannot do without.",
        sentences=(46,),
        source="Article, “QK-Norm”; OLMo 2, arXiv 2501.00656. That the one needs the other is our reading.",
        measured="Norm of the gradient on the first block's down-projection in fresh networks of 2 … 16 blocks (width "
        f"{WIDTH}, SwiGLU, RMSNorm, RoPE, Xavier; x ← x + N(F(x)) and a final norm) on {ROWS} windows of {CONTEXT} "
        f"bytes of real text, geometric mean of {NETWORKS} networks. QK-norm is per head, as in the article; OLMo 2's "
        "runs over all heads.",
        study=STUDY,
        plays={"without": "without", "with": "with"},
        literal=Rule(
            text="Without QK-norm the first gradient grows faster with depth than the stream does (log-log slope above "
            "1/2, by 0.1), with it more slowly (below 1/2, by 0.1); at 16 blocks it is more than 1.7 times larger "
            "without.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The arms swapped: a gradient that hardly changes must not pass for a growing one.",
            plays={"without": "with", "with": "without"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The stream that attention reads grows with depth, and without a norm its scores grow with the "
            "square. QK-norm takes the stream's scale out of the scores and leaves the rest of the network as it is.",
            status="tested",
        ),
    ),
)
