"""G5: Admin, Post-Norm whose stream is multiplied by ω: how far a small change of the weights moves the output.

A branch is the share s_l = Var F_l / (ω_l² + Var F_l) of the sum that the norm behind it brings back to variance 1. A
small relative change of a sublayer's weights changes its branch, and so moves the normed stream's mean square by that
share; later sublayers keep it. n sublayers changed independently move the output by Σ s_l, up to a constant:

    ω = 1                            s is constant, Σ s ∝ n                 Post-Norm
    ω_l² = Σ_{i<l} Var F_i           s_l ≈ 1/l, Σ s ≈ ln n                  profiled, one forward; F_0 is the embedding
    ω² = (n + 1)/ln(n + 1) − 1       Σ s = n·ln(n + 1)/(n + 1) at Var F = 1  closed form
    ω² = n                           Σ s = n/(n + 1) at Var F = 1           closed form, bounded
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.placement import Constants, Residual

WIDTH, HEADS, ROWS, LENGTH = 32, 2, 2, 32
NETWORKS = 4  # independent ones, whose mean-square changes are averaged
DEPTHS = (2, 4, 8, 16)
SUBLAYERS = tuple(2 * d for d in DEPTHS)
RELATIVE = 1e-4  # of a weight's standard deviation: so small that the output's change is linear in it
LABELS = {"post": "Post-Norm", "profiled": "ω profiled", "log": "ω for O(log n)", "constant": "ω = √n"}


def closed_form(name: str, sublayers: int) -> float:
    """Return the ω that all of ``sublayers`` share: 1, or Admin's closed forms for O(log n) and O(1)."""
    if name == "log":
        return math.sqrt((sublayers + 1) / math.log(sublayers + 1) - 1)
    return math.sqrt(sublayers) if name == "constant" else 1.0


@torch.no_grad()
def scale_stream(model: Transformer, name: str, tokens: Tensor) -> list[float]:
    """Set every step's ω; return Var F of embedding and sublayers, as they are in the network so scaled.

    Profiling goes forward once: a sublayer's ω² is the sum of all variances before it, the embedding's among them.
    """
    x = model.embedding(tokens)
    variances = [float(x.var(correction=0))]
    for step in model.steps:
        assert isinstance(step, Residual)
        omega = math.sqrt(sum(variances)) if name == "profiled" else closed_form(name, len(model.steps))
        step.constants = Constants(alpha=omega)
        variances.append(float(step.sublayers[0](x).var(correction=0)))
        x = step(x)
    return variances


def sums_of_shares(variances: Sequence[float]) -> float:
    """Return Σ_l Var F_l / Σ_{i≤l} Var F_i, l from 1: what the profiled ω makes of the shares, about ln n."""
    totals = list(accumulate(variances))
    return sum(v / total for v, total in zip(variances[1:], totals[1:], strict=True))


def _output(model: Transformer, tokens: Tensor) -> Tensor:
    *_, x = model.stream(tokens)
    return x


@torch.no_grad()
def moved(model: Transformer, tokens: Tensor, draws: Draws, relative: float = RELATIVE) -> float:
    """Return the output's mean-square change by random changes of all blocks' weights, over the changes' square.

    Each weight changes by ``relative`` standard deviations of its matrix times a normal number. The model is changed.
    """
    before = _output(model, tokens)
    for name, linear in model.weights().items():
        if name != "head":
            noise = draws.randn(*linear.weight.shape, stream=f"noise/{name}", dtype=torch.float64)
            linear.weight.add_(noise.to(linear.weight.device), alpha=relative * float(linear.weight.std()))
    return float((_output(model, tokens) - before).square().mean()) / relative**2


def fresh(blocks: int, bench: Bench, draws: Draws) -> tuple[Transformer, Tensor]:
    """Return a Post-Norm network in float64 and the text that it reads."""
    config = TransformerConfig(
        layers=blocks, width=WIDTH, heads=HEADS, feed_forward="relu", norm="layer", wiring="post"
    )
    model = build(config, draws).to(bench.settings.device).double()
    return model, random_windows(bench, draws, ROWS, LENGTH)


def _measure(params: Params, bench: Bench) -> Values:
    squares: list[float] = []
    sums: list[float] = []
    profile: list[list[float]] = []
    for blocks in DEPTHS:
        found: list[tuple[float, list[float]]] = []
        for draws in independent(bench.draws, NETWORKS):
            model, tokens = fresh(blocks, bench, draws)
            variances = scale_stream(model, params["omega"], tokens)
            found.append((moved(model, tokens, draws), variances))
        squares.append(sum(s for s, _ in found) / NETWORKS)
        sums.append(sum(sums_of_shares(v) for _, v in found) / NETWORKS)
        profile.append([sum(v[l] for _, v in found) / NETWORKS for l in range(2 * blocks + 1)])
    return {"moved": squares, "sum": sums, "variances": profile[-1]}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"omega": name}) for name in LABELS]


STUDY = Study(id="admin", arms=_arms, measure=_measure, seconds=lambda params: 1.0, seeds=5, corpus=True)


def targets(e: Evidence) -> dict[str, float]:
    """Return theory's exponents over the depths measured: of n, of Σ 1/l-like shares, and of the closed forms."""
    rows = e.values("profile", "sum")
    return {
        "post": 1.0,
        "profiled": sum(log_log_slope(SUBLAYERS, row) for row in rows) / len(rows),
        "log": log_log_slope(SUBLAYERS, [n * math.log(n + 1) / (n + 1) for n in SUBLAYERS]),
        "constant": log_log_slope(SUBLAYERS, [n / (n + 1) for n in SUBLAYERS]),
    }


def _slopes(e: Evidence, role: str) -> list[float]:
    return [log_log_slope(SUBLAYERS, row) for row in e.values(role, "moved")]


def _criteria(e: Evidence) -> list[Criterion]:
    wanted = targets(e)
    return [
        Criterion(
            name=f"slope over ln n of ln (mean-square change), {role}",
            values=_slopes(e, role),
            kind="near",
            target=wanted[role],
            tolerance=0.2,
            reason="O(n), O(log n) and O(1) lie about half an exponent apart at these depths: doubled, the tolerance "
            "still tells the first from the others; half of it leaves room for branches that are not alike",
        )
        for role in LABELS
    ]


def _summary(e: Evidence) -> str:
    parts = ", ".join(f"{LABELS[e.arm(r)]} {estimate(_slopes(e, r))} ({number(t, 2)})" for r, t in targets(e).items())
    return f"noise on the weights moves the output by n^p, p measured (theory): {parts}"


def _figures(e: Evidence) -> list[Chart]:
    lines = [band(LABELS[e.arm(role)], SUBLAYERS, e.values(role, "moved")) for role in LABELS]
    start = lines[0].y[0]
    variances = e.values("profile", "variances")
    totals = [list(accumulate(row)) for row in variances]
    steps = list(range(1, len(totals[0])))
    mean = sum(t[-1] - t[0] for t in totals) / len(totals) / len(steps)
    law = Series("1 + mean Var F · l", steps, [1 + mean * (l - 1) for l in steps], kind="reference")
    return [
        Chart(
            caption="Left: mean-square change of a fresh network's output by small random changes of all its weights, "
            f"over their relative square. Right: ω² as one forward profiles it ({DEPTHS[-1]} blocks). Bands: min–max "
            "over seeds.",
            alt="On logarithmic axes Post-Norm rises along a dashed line ∝ n; the profiled ω and the closed form for "
            "O(log n) rise much less and flatten; ω = √n is level. The profiled ω² rises about in proportion to the "
            "sublayer's number.",
            panels=[
                Panel(
                    "noise on the weights",
                    "sublayers n",
                    "change² / noise²",
                    [
                        *lines,
                        Series("∝ n", SUBLAYERS, [start * n / SUBLAYERS[0] for n in SUBLAYERS], kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel("the profile", "sublayer l", "ω²", [band("profiled", steps, [t[:-1] for t in totals]), law]),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="G5",
        title="Admin's ω",
        sentence="Small changes of the weights move a Post-Norm network's output by O(n), n its sublayers. Multiply the "
        "stream by ω_l = √(Σ Var F_i) over all branches before l, as one forward finds them, and it is O(log n); closed "
        "forms are ω = √((n + 1)/ln(n + 1) − 1) for O(log n) and ω = √n for O(1).",
        sentences=(),
        source="Liu et al. 2020, arXiv 2004.08249 (Admin), and its authors' code for the closed forms.",
        measured=f"Fresh networks of {SUBLAYERS[0]} … {SUBLAYERS[-1]} sublayers (width {WIDTH}, ReLU, LayerNorm, Xavier) "
        "in float64, on real text: every weight of the blocks is changed by a small part of its matrix's standard "
        f"deviation; mean-square change of the output, {NETWORKS} networks averaged.",
        study=STUDY,
        plays={"post": "post", "profiled": "profiled", "log": "log", "constant": "constant", "profile": "profiled"},
        literal=Rule(
            text="Exponents of the change over n, each ± 0.2, are those of n, of Σ Var F_l / Σ_{i≤l} Var F_i (which is "
            "about ln n), of n·ln(n + 1)/(n + 1) and of n/(n + 1).",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="ω = 1, plain Post-Norm, in the roles of all three.",
            plays={"post": "post", "profiled": "post", "log": "post", "constant": "post", "profile": "profiled"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A branch's change counts by the branch's share of its own sum. ω makes the share of sublayer l the "
            "one it would have in a stream that is never normalized, about 1/l, and those add up to ln n. The norms "
            "stay; only the weight of the stream against the branch differs between the arms.",
            status="tested",
        ),
    ),
)
