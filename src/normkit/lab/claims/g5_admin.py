"""G5: Admin, Post-Norm whose stream is multiplied by ω: how far a small change of the weights moves the output.

A branch is the share s_l = Var F_l / (ω_l² + Var F_l) of the sum that the norm behind it brings back to variance 1. A
small relative change of a sublayer's weights changes its branch, and so moves the normed stream's mean square by that
share; later sublayers keep it. n sublayers changed independently move the output by Σ s_l, up to a constant:

    ω = 1                            s is constant, Σ s ∝ n                 Post-Norm
    ω_l² = Σ_{i<l} Var F_i           s_l ≈ 1/l, Σ s ≈ ln n                  profiled, one forward; F_0 is the input
    ω² = (n + 1)/ln(n + 1) − 1       Σ s = n·ln(n + 1)/(n + 1) at Var F = 1  closed form
    ω² = n                           Σ s = n/(n + 1) at Var F = 1           closed form, bounded
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.functional import add_layer_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

NETWORKS, ROWS, WIDTH = 24, 16, 32
SUBLAYERS = (4, 8, 16, 32, 64)
RELATIVE = 1e-5  # of a weight's standard deviation: so small that the output's change is linear in it
LABELS = {"post": "Post-Norm", "profiled": "ω profiled", "log": "ω for O(log n)", "constant": "ω = √n"}


@dataclass
class Stack:
    """Many Post-Norm networks at once: x ← LayerNorm(ω_l·x + down_l·relu(up_l·x)), down and up square, without bias.

    ``up`` and ``down`` hold a tensor (networks, width, width) for every sublayer. With Xavier weights Var F is half the
    input's mean square.
    """

    up: list[Tensor]
    down: list[Tensor]
    omega: list[float]

    def branch(self, layer: int, x: Tensor) -> Tensor:
        """Return F_l(x) of a stream (networks, rows, width)."""
        return F.relu(x @ self.up[layer]) @ self.down[layer]

    def step(self, layer: int, x: Tensor, branch: Tensor) -> Tensor:
        """Return the stream behind sublayer ``layer``."""
        return add_layer_norm(branch, x, alpha=self.omega[layer])[0]

    def output(self, x: Tensor) -> Tensor:
        """Return the stream behind the last sublayer."""
        for layer in range(len(self.up)):
            x = self.step(layer, x, self.branch(layer, x))
        return x


def fresh(sublayers: int, bench: Bench) -> tuple[Stack, Tensor]:
    """Return networks with Xavier weights in float64 and ω = 1, and what they read. Deeper ones begin alike."""

    def weights(role: str) -> list[Tensor]:
        return [_normal(bench.draws, f"{role}/{i}", WIDTH, WIDTH, bench) * WIDTH**-0.5 for i in range(sublayers)]

    return Stack(weights("up"), weights("down"), [1.0] * sublayers), _normal(bench.draws, "x", ROWS, WIDTH, bench)


def _normal(draws: Draws, stream: str, rows: int, columns: int, bench: Bench) -> Tensor:
    return draws.randn(NETWORKS, rows, columns, stream=stream, dtype=torch.float64).to(bench.settings.device)


def closed_form(name: str, sublayers: int) -> float:
    """Return the ω that all of ``sublayers`` share: 1, or Admin's closed forms for O(log n) and O(1)."""
    if name == "log":
        return math.sqrt((sublayers + 1) / math.log(sublayers + 1) - 1)
    return math.sqrt(sublayers) if name == "constant" else 1.0


def scale_stream(stack: Stack, name: str, x: Tensor) -> list[float]:
    """Set every sublayer's ω; return Var F of input and sublayers, as they are in the networks so scaled.

    Profiling goes forward once: a sublayer's ω² is the sum of all variances before it, the input's among them.
    """
    variances = [float(x.var(correction=0))]
    for layer in range(len(stack.up)):
        stack.omega[layer] = math.sqrt(sum(variances)) if name == "profiled" else closed_form(name, len(stack.up))
        branch = stack.branch(layer, x)
        variances.append(float(branch.var(correction=0)))
        x = stack.step(layer, x, branch)
    return variances


def sums_of_shares(variances: Sequence[float]) -> float:
    """Return Σ_l Var F_l / Σ_{i≤l} Var F_i, l from 1: what the profiled ω makes of the shares, about ln n."""
    totals = list(accumulate(variances))
    return sum(v / total for v, total in zip(variances[1:], totals[1:], strict=True))


def moved(stack: Stack, x: Tensor, bench: Bench, relative: float = RELATIVE) -> float:
    """Return the output's mean-square change by random changes of all weights, over the changes' relative square.

    Each weight changes by ``relative`` of its standard deviation times a normal number. The stack is changed.
    """
    before = stack.output(x)
    for role, weights in (("up", stack.up), ("down", stack.down)):
        for i, weight in enumerate(weights):
            noise = _normal(bench.draws, f"noise/{role}/{i}", WIDTH, WIDTH, bench)
            weights[i] = weight + relative * WIDTH**-0.5 * noise
    return float((stack.output(x) - before).square().mean()) / relative**2


def _measure(params: Params, bench: Bench) -> Values:
    squares: list[float] = []
    variances: list[float] = []
    for sublayers in SUBLAYERS:
        stack, x = fresh(sublayers, bench)
        variances = scale_stream(stack, params["omega"], x)
        squares.append(moved(stack, x, bench))
    return {
        "moved": squares,
        "sum": [sums_of_shares(variances[: n + 1]) for n in SUBLAYERS],
        "variances": variances,
    }


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"omega": name}) for name in LABELS]


STUDY = Study(id="admin", arms=_arms, measure=_measure, seconds=lambda params: 0.6, seeds=5, full_only=True)


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
            kind="at_least" if role == "post" else "near",
            target=wanted[role],
            tolerance=0.2,
            reason="O(n), O(log n) and O(1) lie about half an exponent apart at these depths: doubled, the tolerance "
            "still tells the first from the others; half of it leaves room for branches that are not alike",
        )
        for role in LABELS
    ]


def _summary(e: Evidence) -> str:
    means = {role: sum(_slopes(e, role)) / len(_slopes(e, role)) for role in LABELS}
    parts = ", ".join(f"{LABELS[e.arm(r)]} {number(means[r], 2)} ({number(t, 2)})" for r, t in targets(e).items())
    return f"noise on weights moves the output's mean square by n^p; p (theory): {parts}"


def _figures(e: Evidence) -> list[Chart]:
    lines = [band(LABELS[e.arm(role)], SUBLAYERS, e.values(role, "moved")) for role in LABELS]
    start = lines[0].y[0]
    variances = e.values("profile", "variances")
    totals = [list(accumulate(row)) for row in variances]
    steps = list(range(1, len(totals[0])))
    mean = sum(t[-1] - t[0] for t in totals) / len(totals) / len(steps)
    law = Series("1 + mean Var F · l", steps, [1 + mean * (layer - 1) for layer in steps], kind="reference")
    return [
        Chart(
            caption="Left: mean-square change of a fresh network's output by small random changes of all its weights, "
            "over their relative square. Right: ω² as one forward profiles it. Bands: min–max "
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
        sentence="Small changes of the weights move a Post-Norm network's output by O(n), n its sublayers. Multiply "
        "the stream by ω_l = √(Σ Var F_i) over all branches before l, as one forward finds them, and it is O(log n); "
        "closed forms are ω = √((n + 1)/ln(n + 1) − 1) for O(log n) and ω = √n for O(1).",
        sentences=(),
        source="Liu et al. 2020, arXiv 2004.08249 (Admin), and its authors' code for the closed forms.",
        measured=f"Fresh stacks of {SUBLAYERS[0]} … {SUBLAYERS[-1]} feed-forward sublayers (ReLU, width {WIDTH}, "
        "Xavier, LayerNorm) in float64 on random input: every weight is changed by a small part of its standard "
        f"deviation; mean-square change of the output over {NETWORKS} networks. Attention is left out: it averages "
        "over positions, so its branches' variance is no constant of the layer.",
        study=STUDY,
        plays={"post": "post", "profiled": "profiled", "log": "log", "constant": "constant", "profile": "profiled"},
        literal=Rule(
            text="Exponents of the change over n: Post-Norm's at least that of n, less 0.2; the others', each ± 0.2, "
            "those of Σ Var F_l / Σ_{i≤l} Var F_i (which is about ln n), of n·ln(n + 1)/(n + 1) and of n/(n + 1).",
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
            "stay; only the weight of the stream against the branch differs between the arms. Post-Norm "
            "grows somewhat faster than n here; why, these arms do not isolate.",
            status="tested",
        ),
    ),
)
