"""G3: a thousand layers under DeepNorm, forward and backward, before any training.

DeepNorm adds a branch of size 1/α² of the stream's mean square to it, α² = √(2·sublayers), and norms the sum. So the
stream's size is fixed at every depth, and a gradient's mean square changes by no more than a part in α² a sublayer, in
both directions alike (F2): from the last layer to the first it stays level. Under Pre-Norm the same gradients grow
towards the input as the square root of the depth. That a thousand layers also *train* is more than this shows.
"""

from __future__ import annotations

import math

import torch

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

BLOCKS = 500  # a block is two layers of the paper's: attention and feed-forward
WIDTH, ROWS = 16, 2
END = 8  # blocks at either end that are averaged
LABELS = {"deepnorm": "DeepNorm", "pre": "Pre-Norm"}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name, "blocks": BLOCKS}) for name in LABELS]


def _measure(params: Params, bench: Bench) -> Values:
    blocks = params["blocks"]
    config = TransformerConfig(layers=blocks, width=WIDTH, heads=2, wiring=params["wiring"])
    model = build(config, bench.draws).to(bench.settings.device)
    loss = next_byte_loss(model, random_windows(bench, bench.draws, ROWS))
    weights = model.weights()
    gradients = torch.autograd.grad(loss, [weights[f"{layer}/down"].weight for layer in range(blocks)])
    squares = [float(g.double().square().sum()) for g in gradients]
    first, last = sum(squares[:END]) / END, sum(squares[-END:]) / END
    size = float(loss.detach())
    finite = math.isfinite(size) and all(map(math.isfinite, squares))
    return {
        "finite": finite,
        "loss": size,
        "ratio": (first / last) ** 0.5 if last else math.nan,
        "gradient": [s**0.5 for s in squares],
    }


STUDY = Study(
    id="thousand_layers",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.012 * params["blocks"],
    seeds=5,
    corpus=True,
    full_only=True,
)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="loss and every gradient finite (1 = all)",
            values=[float(v) for v in e.values("deep", "finite")],
            kind="at_least",
            target=1.0,
            tolerance=0.0,
            reason="yes or no",
            every=True,
        ),
        Criterion(
            name=f"ln of the gradient's norm in the first {END} blocks over that in the last {END}",
            values=[math.log(v) if v > 0 else math.nan for v in e.numbers("deep", "ratio")],
            kind="near",
            target=0.0,
            tolerance=0.5,
            reason="level, up to what two groups of random blocks differ by; a √l law between groups centred on blocks "
            "4.5 and 496.5 would give ln 10.5 = 2.4",
        ),
    ]


def _blocks(e: Evidence) -> int:
    return len(e.first("deep", "gradient"))


def _summary(e: Evidence) -> str:
    return (
        f"{2 * _blocks(e)} layers: gradient of the first blocks over that of the last, "
        f"{estimate(e.numbers('deep', 'ratio'))}"
    )


def _figures(e: Evidence) -> list[Chart]:
    gradient = e.first("deep", "gradient")
    blocks = len(gradient)
    return [
        Chart(
            caption=f"Norm of the loss's gradient on every block's down-projection, {2 * blocks} layers, first seed.",
            alt="A band of marks along the depth of the network.",
            panels=[
                Panel(
                    "gradients through the network",
                    "block",
                    "‖gradient‖",
                    [Series("the network judged", list(range(1, blocks + 1)), gradient, kind="points")],
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="G3",
        title="A thousand layers, forward and backward",
        sentence="With its larger residual weight and smaller initialization DeepNorm makes networks of a thousand "
        "layers trainable.",
        sentences=(42,),
        source="Article, “DeepNorm”; Wang et al. 2022, arXiv 2203.00555.",
        measured=f"A fresh network of width {WIDTH} with {2 * BLOCKS} layers, on real text: its loss, and the loss's "
        "gradient on every block's down-projection. Nothing is trained: at this size a thousand layers cannot be, in "
        "minutes. Judged is what training needs first, that signals and gradients pass.",
        study=STUDY,
        plays={"deep": "deepnorm"},
        literal=Rule(
            text="Loss and gradients are finite, and the gradient at the first blocks is that at the last, within a "
            "factor of e^0.5 = 1.65.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Pre-Norm at the same depth: finite, too, but its gradients grow towards the input.",
            plays={"deep": "pre"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Every sublayer changes the stream, and the gradient, by a part in α², and the norm behind it takes "
            "the growth out again; a thousand such changes do not add up (F2, G1).",
            status="tested",
        ),
    ),
)
