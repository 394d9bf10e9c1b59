"""F5: Post-Norm holds its blocks' output at one scale, and pays for it on the residual path.

Two sentences, one study. The residual path is isolated by holding what sublayers add constant: a gradient sent back
from the end of the stack then meets nothing but sums and the norms that the wiring puts on the path. RMSNorm's
derivative is (I − x̂x̂ᵀ/d)/σ, so a random gradient comes back smaller by Π 1/σ_l, and by what n projections take of
d directions, which is at most n/d of its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import estimate, number, superscript
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.placement import WIRINGS, Wiring

LAYERS, WIDTH, ROWS = 8, 128, 4
STEPS = 2 * LAYERS
EPS = 1e-6
NETWORKS = 4  # in one measurement
# Post-Norm whose branches are normalised too, so that they add exactly as much as the stream holds.
EQUAL = replace(WIRINGS["post"], name="post-equal", class_name="PostNormOfEqualBranches", branch=True)
ROWS_OF: dict[str, Wiring] = {"post": WIRINGS["post"], "pre": WIRINGS["pre"], "equal": EQUAL}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name}) for name in ROWS_OF]


def _hold(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Pass on a sublayer's output as a constant."""
    return y.detach()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _divisors(model: Transformer) -> list[Tensor]:
    """Return the list that will hold, per norm on the residual path, every token's σ; the last step comes last."""
    heard: list[Tensor] = []
    for step in model.steps:
        norm = step.norm_out
        if isinstance(norm, nn.Module):
            norm.register_forward_pre_hook(lambda module, args: heard.append(_rms(args[0].detach())))
    return heard


def _measure(params: Params, bench: Bench) -> Values:
    """Average over independent networks on independent text, but keep the extremes."""
    rows = [_one(params, bench, draws) for draws in independent(bench.draws, NETWORKS)]
    how: dict[str, Callable[[Sequence[float]], float]] = {"smallest": min, "largest": max}
    return {key: list(map(how.get(key, fmean), zip(*(row[key] for row in rows), strict=True))) for key in rows[0]}


def _one(params: Params, bench: Bench, draws: Draws) -> dict[str, list[float]]:
    config = TransformerConfig(
        layers=LAYERS, width=WIDTH, heads=4, feed_forward="relu", norm="rms", wiring=ROWS_OF[params["wiring"]]
    )
    model = build(config, draws).to(bench.settings.device).double()
    for sublayer in (*model.attentions, *model.feed_forwards):
        sublayer.register_forward_hook(_hold)
    sigmas = _divisors(model)
    stream = list(model.stream(random_windows(bench, draws, ROWS)[:, :-1]))
    sent = draws.randn(*stream[-1].shape, stream="gradient", dtype=torch.float64).to(stream[-1].device)
    # Through the embedding, every tensor of the stream belongs to the graph.
    back = torch.autograd.grad(stream[-1], stream, sent)
    squares = [float((g.square().sum(-1) / sent.square().sum(-1)).log().mean()) for g in back]
    logs = [float(s.log().mean()) for s in sigmas]
    scales = [_rms(x.detach()) for x in stream[1:]]
    return {
        "smallest": [float(s.min()) for s in scales],
        "largest": [float(s.max()) for s in scales],
        "crossed": [float(len(sigmas))],
        # Both by depth l: ln of |gradient there| / |gradient at the end|, and ln Π 1/σ over the norms in between.
        "coefficient": [0.5 * s for s in squares],
        "law": [-math.fsum(logs[depth:]) for depth in range(STEPS + 1)],
    }


STUDY = Study(
    id="post_norm_path", arms=_arms, measure=_measure, seconds=lambda params: 0.15 * NETWORKS, seeds=5, corpus=True
)


def _f5_criteria(e: Evidence) -> list[Criterion]:
    pairs = zip(e.values("post", "smallest"), e.values("post", "largest"), strict=True)
    return [
        Criterion(
            name=f"largest |rms − 1| of a token after any of {STEPS} sublayers",
            values=[max(1 - min(low), max(high) - 1) for low, high in pairs],
            kind="at_most",
            target=0.0,
            tolerance=4 * EPS,
            reason="RMSNorm leaves 1/√(1 + ε/v), off by ε/2v: 2ε at v = 1/4, below which the sum of a stream of rms 1 "
            "and a branch hardly falls, and twice that is given; computed in float64",
            every=True,
        )
    ]


_SCATTER = 3 * (2 / (WIDTH * ROWS * CONTEXT)) ** 0.5  # three deviations of a mean of χ²/d over all tokens
_TAKEN = STEPS / WIDTH


def _remaining(e: Evidence, role: str) -> list[float]:
    """Return, per seed, the square of the gradient at the embedding over what Π 1/σ leaves of it."""
    pairs = zip(e.values(role, "coefficient"), e.values(role, "law"), strict=True)
    return [math.exp(2 * (c[0] - law[0])) for c, law in pairs]


def _path_criteria(e: Evidence) -> list[Criterion]:
    reason = (
        f"{STEPS} projections of rank d − 1 leave at least 1 − {STEPS}/{WIDTH} of a random gradient's square and at "
        f"most all; the tolerance is three deviations of a mean over {ROWS * CONTEXT} tokens"
    )
    share = f"square of the returned gradient over (Π 1/σ_l)², {STEPS} sublayers"
    return [
        Criterion(
            name="norms on the residual path, per sublayer",
            values=[n / STEPS for (n,) in e.values("post", "crossed")],
            kind="near",
            target=1.0,
            tolerance=0.0,
            reason="a count",
            every=True,
        ),
        Criterion(share, _remaining(e, "post"), "at_least", 1 - _TAKEN, _SCATTER, reason),
        Criterion(share, _remaining(e, "post"), "at_most", 1.0, _SCATTER, reason),
        Criterion(
            name="log₂ of the path's coefficient over −l/2, branches as large as the stream",
            values=[row[0] / math.log(2) / (-STEPS / 2) for row in e.values("equal", "coefficient")],
            kind="near",
            target=1.0,
            tolerance=0.1,
            reason="σ² = 2 + 2·cosine of stream and branch. Random features have cosines of 1/√d; where tokens look "
            f"alike one network's do not average out and shift the exponent by 1/(√(l·d)·ln 2) = "
            f"{1 / ((STEPS * WIDTH) ** 0.5 * math.log(2)):.1%}, a third of the tolerance; the projections take up to "
            f"{-math.log(1 - _TAKEN) / (STEPS * math.log(2)):.1%}",
        ),
        Criterion(
            name="largest |ln coefficient| of Pre-Norm's path, any depth",
            values=[max(abs(v) for v in row) for row in e.values("pre", "coefficient")],
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason="a sum hands gradients on as they are: exactly 1",
            every=True,
        ),
    ]


def _f5_summary(e: Evidence) -> str:
    low, high = min(min(r) for r in e.values("post", "smallest")), max(max(r) for r in e.values("post", "largest"))
    return f"rms of any token after any of {STEPS} sublayers: 1 − {number(1 - low, 2)} to 1 − {number(1 - high, 2)}"


def _path_summary(e: Evidence) -> str:
    post, equal = (estimate([math.exp(row[0]) for row in e.values(role, "coefficient")]) for role in ("post", "equal"))
    return (
        f"identity path over {STEPS} sublayers: Post {post}, with branches as large as the stream {equal} "
        f"(2{superscript(-STEPS // 2)} = {number(2.0 ** (-STEPS / 2), 3)}); Pre exactly 1"
    )


def _f5_figures(e: Evidence) -> list[Chart]:
    steps = list(range(1, STEPS + 1))
    return [
        Chart(
            caption="The largest rms of any token after every sublayer. Bands: min–max over seeds.",
            alt="Post-Norm lies on one throughout; Pre-Norm climbs.",
            panels=[
                Panel(
                    "output of every sublayer's step",
                    "sublayer",
                    "largest rms of a token",
                    [band("Post-Norm", steps, e.values("post", "largest")), band("Pre-Norm", steps, _other(e))],
                )
            ],
        )
    ]


def _other(e: Evidence) -> list[list[float]]:
    return e.values("other", "largest")


def _path_figures(e: Evidence) -> list[Chart]:
    left = [STEPS - depth for depth in range(STEPS + 1)]

    def line(role: str, key: str) -> list[list[float]]:
        return [[math.exp(v) for v in row] for row in e.values(role, key)]

    law = line("post", "law")
    halves = Series("(1/√2)ˡ", left, [2.0 ** (-n / 2) for n in left], kind="reference")
    product = Series("Π 1/σ, Post-Norm", left, [sum(c) / len(c) for c in zip(*law, strict=True)], kind="reference")
    return [
        Chart(
            caption="What is left of a random gradient after it has gone back through l sublayers along the residual "
            "path alone, with what the sublayers add held constant. Bands: min–max over seeds.",
            alt="Pre-Norm stays at one; Post-Norm falls along a straight line on logarithmic axes; with branches as "
            "large as the stream it falls faster, on a dashed line that halves every two sublayers.",
            panels=[
                Panel(
                    "the residual path",
                    "sublayers crossed",
                    "gradient returned / sent",
                    [
                        band("Pre-Norm", left, line("pre", "coefficient")),
                        band("Post-Norm", left, line("post", "coefficient")),
                        band("Post-Norm, equal branches", left, line("equal", "coefficient")),
                        product,
                        halves,
                    ],
                    y_scale="log",
                )
            ],
        )
    ]


_MEASURED = (
    f"Fresh networks of {LAYERS} blocks, {STEPS} sublayers (width {WIDTH}, ReLU, RMSNorm, Xavier), in float64, on "
    f"{ROWS} windows of {CONTEXT} bytes of real text."
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="F5",
        title="Post-Norm's output has a fixed scale",
        sentence="Under Post-Norm the output of every layer is forced back to a fixed scale.",
        sentences=(36,),
        source="Article, “Post-Norm”.",
        measured=_MEASURED + " The rms of every token after every sublayer's step.",
        study=STUDY,
        plays={"post": "post", "other": "pre"},
        literal=Rule(
            text="After every sublayer every token's rms is 1, up to what ε takes.",
            origin="theory",
            criteria=_f5_criteria,
        ),
        control=Control(
            text="The same weights under Pre-Norm, which leaves the sum as it is.",
            plays={"post": "pre", "other": "post"},
        ),
        summary=_f5_summary,
        figures=_f5_figures,
        explanation=Explanation(
            text="The norm is the last thing that touches the stream. It fixes each token's length, not its direction.",
            status="tested",
        ),
    ),
    Claim(
        id="F5b",
        title="Post-Norm's residual path crosses a norm per sublayer",
        sentence="The price is that on Post-Norm's residual path every layer has to cross a normalization.",
        sentences=(37,),
        source="Article, “Post-Norm”.",
        measured=_MEASURED + " What sublayers add is held constant, a random gradient is sent back from the last "
        "output, and its size is compared at every depth. A third network normalises what its sublayers add.",
        study=STUDY,
        plays={"post": "post", "equal": "equal", "pre": "pre"},
        literal=Rule(
            text="There is one norm per sublayer on the path; a gradient comes back as Π 1/σ_l of what was sent, but "
            "for the n/d that n projections may take; (1/√2)ˡ where branches are as large as the stream; and "
            "exactly 1 under Pre-Norm.",
            origin="theory",
            criteria=_path_criteria,
        ),
        control=Control(
            text="Pre-Norm in Post-Norm's roles: no norm on the path, nothing lost.",
            plays={"post": "pre", "equal": "pre", "pre": "post"},
        ),
        summary=_path_summary,
        figures=_path_figures,
        explanation=Explanation(
            text="Each norm divides what passes by the σ of the sum, which exceeds 1 by what its sublayer adds; over "
            "l sublayers the factors multiply. In a whole network gradients also return through the sublayers, "
            "which is why Post-Norm's gradients are no smaller (F1, F2): the identity's share of them is.",
            status="tested",
        ),
    ),
)
