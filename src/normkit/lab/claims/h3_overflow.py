"""H3: whose residual stream can leave float16's range.

Sublayers of trained models add large vectors; here every down-projection is multiplied by k instead. Where the branch
is normalised no k matters: a vector of rms 1 has no coordinate above √d, so after n sublayers none exceeds its first
by more than n·√d.
"""

from __future__ import annotations

import torch

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, ROWS = 8, 64, 2
FACTORS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5)
LARGEST = float(torch.finfo(torch.float16).max)
GROWTH = 2 * LAYERS * WIDTH**0.5


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name}) for name in ("pre", "sandwich")]


@torch.no_grad()
def _measure(params: Params, bench: Bench) -> Values:
    config = TransformerConfig(layers=LAYERS, width=WIDTH, heads=4, wiring=params["wiring"])
    tokens = random_windows(bench, bench.draws, ROWS)[:, :-1]
    largest: list[float] = []
    halves: list[bool] = []
    first = 0.0
    for factor in FACTORS:
        model = build(config, bench.draws).to(bench.settings.device).double()
        for name, linear in model.weights().items():
            if name.endswith("/down"):
                linear.weight *= factor
        stream = list(model.stream(tokens))
        first = float(stream[0].abs().max())
        largest.append(max(float(x.abs().max()) for x in stream))
        halves.append(all(bool(x.half().isfinite().all()) for x in stream))
    return {"largest": largest, "first": first, "fits": halves}


STUDY = Study(id="overflow", arms=_arms, measure=_measure, seconds=lambda params: 0.3, seeds=3, corpus=True)


def _over_bound(e: Evidence) -> list[float]:
    runs = zip(e.values("bounded", "largest"), e.numbers("bounded", "first"), strict=True)
    return [max(row) / (first + GROWTH) for row, first in runs]


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"largest coordinate over (largest embedded + {2 * LAYERS}·√{WIDTH}), branch normed, any k",
            values=_over_bound(e),
            kind="at_most",
            target=1.0,
            tolerance=1e-12,
            reason="a bound for any weights; float64 rounding",
            every=True,
        ),
        Criterion(
            name="share of the factors k at which the stream fits float16, branch normed",
            values=[sum(row) / len(row) for row in e.values("bounded", "fits")],
            kind="near",
            target=1.0,
            tolerance=0.0,
            reason="a count",
            every=True,
        ),
        Criterion(
            name=f"largest coordinate over float16's largest, {LARGEST:g}, branch not normed, k = {FACTORS[-1]:g}",
            values=[row[-1] / LARGEST for row in e.values("free", "largest")],
            kind="above",
            target=1.0,
            tolerance=0.5,
            reason="what a sublayer adds is proportional to k: a coordinate of order 1 becomes 10⁵, beyond 65504; half "
            "of it above is more than float16 rounds",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    free, bounded = (max(row[-1] for row in e.values(role, "largest")) for role in ("free", "bounded"))
    weights = f"weights × {number(FACTORS[-1])}"
    over = number(free / LARGEST, 2)
    return f"{weights}: largest coordinate {over} × {LARGEST:g} (Pre), {number(bounded, 2)} (Sandwich)"


def _figures(e: Evidence) -> list[Chart]:
    limit = Series("float16's largest", FACTORS, [LARGEST] * len(FACTORS), kind="reference")
    first = max(e.numbers("bounded", "first"))
    bound = Series("|x₀| + 2L√d", FACTORS, [first + GROWTH] * len(FACTORS), kind="reference")
    return [
        Chart(
            caption=f"Largest coordinate of the residual stream of {LAYERS} blocks when every down-projection is "
            "multiplied by k. Bands: min–max over seeds.",
            alt="Without a norm on the branch the coordinate rises with k and crosses the dashed limit; with one it is "
            "level, below the dashed bound.",
            panels=[
                Panel(
                    "who stays in range",
                    "factor k",
                    "largest coordinate",
                    [
                        band("Pre-Norm", FACTORS, e.values("free", "largest")),
                        band("Sandwich", FACTORS, e.values("bounded", "largest")),
                        limit,
                        bound,
                    ],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H3",
        title="A norm on the branch keeps the stream in float16's range",
        sentence="A norm after the sublayer bounds the size of its output as well, which is why CogView, trained in "
        "float16, used it.",
        sentences=(43,),
        source="Article, “Compromises”; Ding et al. 2021, arXiv 2105.13290; Kim et al. 2025, arXiv 2502.02732.",
        measured=f"Fresh networks of {LAYERS} blocks (width {WIDTH}, SwiGLU, RMSNorm, Xavier) on {ROWS} windows of "
        f"{CONTEXT} bytes of real text, in float64, with every down-projection multiplied by k = 1 … 10⁵: the largest "
        "coordinate of the stream, and whether its cast to float16 is finite. The large weights are put in, not "
        "learnt.",
        study=STUDY,
        plays={"bounded": "sandwich", "free": "pre"},
        literal=Rule(
            text="With a norm on the branch no coordinate exceeds the largest embedded one by more than 2L·√d, so none "
            "leaves float16's range at any k; without it, 10⁵ takes the stream beyond.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Pre-Norm in the bounded role and Sandwich in the free one.",
            plays={"bounded": "pre", "free": "sandwich"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The norm divides what the sublayer adds by its own size, k included. The sublayer's inner products "
            "are not covered: they may overflow before the norm sees them (H4).",
            status="tested",
        ),
    ),
)
