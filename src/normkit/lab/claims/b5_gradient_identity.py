"""B5: what a batch norm layer takes off a gradient's length, exactly.

With ε = 0, one channel of m elements has ∂y_i/∂x_j = (γ/σ)(δ_ij − 1/m − x̂_i·x̂_j/m), a projection times γ/σ, so
‖dx‖² = (γ/σ)²·(‖g‖² − ⟨1, g⟩²/m − ⟨x̂, g⟩²/m): the bound of Santurkar et al. 2018, which the layer itself meets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.functional import batch_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

N, L, C = 3, 7, 40
COUNT = N * L


def _arms(settings: Settings) -> list[Arm]:
    return [Arm("batch", {"running": False}), Arm("running", {"running": True})]


def _over_batch(a: Tensor) -> Tensor:
    return a.sum((0, 1))


def right_side(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """Return (γ/σ)²·(‖g‖² − ⟨1, g⟩²/m − ⟨x̂, g⟩²/m) of every channel."""
    mean, sigma = x.mean((0, 1)), x.std((0, 1), unbiased=False)
    along = _over_batch(g).square() + _over_batch((x - mean) / sigma * g).square()
    return (weight / sigma).square() * (_over_batch(g.square()) - along / COUNT)


def bound(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """Return (γ/σ)²·‖g‖² of every channel: the length without the projection."""
    return (weight / x.std((0, 1), unbiased=False)).square() * _over_batch(g.square())


def _measure(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    spread = bench.draws.randn(C, stream="spread", dtype=torch.float64).exp()
    x = ((bench.draws.randn(N, L, C, dtype=torch.float64) + 1) * spread).to(device)
    g = bench.draws.randn(N, L, C, stream="gradient", dtype=torch.float64).to(device)
    weight = bench.draws.randn(C, stream="weight", dtype=torch.float64).to(device)
    statistics = (x.mean((0, 1)), x.var((0, 1), unbiased=False)) if params["running"] else (None, None)
    leaf = x.clone().requires_grad_()
    y = batch_norm(leaf, *statistics, weight, training=not params["running"], eps=0.0)
    (dx,) = torch.autograd.grad(y, leaf, g)
    length, longest = _over_batch(dx.square()), bound(x, g, weight)
    return {
        "off": float(((length - right_side(x, g, weight)).abs() / longest).max()),
        "longest": float((length / longest).max()),
        "kept": (length / longest).tolist(),
        "predicted": (right_side(x, g, weight) / longest).tolist(),
    }


STUDY = Study(id="gradient_identity", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    reason = f"float64 rounding: sums over {COUNT} numbers, a few of them one after another, {COUNT}·u = 2×10⁻¹⁵"
    return [
        Criterion(
            name="distance of ‖dx‖² from the right side, in (γ/σ)²‖g‖², largest over channels",
            values=e.numbers("norm", "off"),
            kind="at_most",
            target=0.0,
            tolerance=1e-12,
            reason=reason,
            every=True,
        ),
        Criterion(
            name="largest ‖dx‖² in (γ/σ)²‖g‖²",
            values=e.numbers("norm", "longest"),
            kind="at_most",
            target=1.0,
            tolerance=1e-12,
            reason=reason,
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    kept = [v for row in e.values("norm", "kept") for v in row]
    off = max(e.numbers("norm", "off"))
    return (
        f"‖dx‖² is the right side to {number(off, 1)}; of (γ/σ)²‖g‖² {number(100 * sum(kept) / len(kept), 3)} % are "
        f"left on average (1 − 2/m = {number(100 - 200 / COUNT, 3)} %)"
    )


def _figures(e: Evidence) -> list[Chart]:
    return [
        Chart(
            caption="Squared length of a channel's gradient after the layer, in (γ/σ)²‖g‖², against the right side of "
            f"the identity ({C} channels, first seed; dashed: equality).",
            alt="Batch norm's channels lie on the diagonal; with running statistics all lie at 1, above it.",
            panels=[
                Panel(
                    "the identity",
                    "1 − (⟨1, g⟩² + ⟨x̂, g⟩²)/(m‖g‖²)",
                    "‖dx‖² / (γ/σ)²‖g‖²",
                    [
                        Series(
                            "batch statistics", e.first("norm", "predicted"), e.first("norm", "kept"), kind="points"
                        ),
                        Series(
                            "running statistics", e.first("other", "predicted"), e.first("other", "kept"), kind="points"
                        ),
                        Series("equality", [0.5, 1.0], [0.5, 1.0], kind="reference"),
                    ],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="B5",
        title="A batch norm shortens gradients by what it projects",
        sentence="The explanation accepted today is that normalization smooths the loss surface: gradients become "
        "steadier, and larger learning rates possible.",
        sentences=(5,),
        source="Article, “Why deep networks are hard to train”; Santurkar et al. 2018, arXiv 1805.11604, theorem 4.1.",
        measured=f"The gradient of normkit.batch_norm in training (ε = 0, float64, {N}·{L} tokens, {C} channels, "
        "random weight and gradient): the squared length of each channel's dx beside the theorem's right side.",
        study=STUDY,
        plays={"norm": "batch", "other": "running"},
        literal=Rule(
            text="The theorem's inequality is an equality for the layer: ‖dx‖² = (γ/σ)²(‖g‖² − ⟨1, g⟩²/m − ⟨x̂, g⟩²/m) "
            "to 10⁻¹² of (γ/σ)²‖g‖², so ‖dx‖ ≤ γ/σ·‖g‖.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The same layer with the same statistics as running ones, constants to the backward: nothing is "
            "projected, and the identity must not hold.",
            plays={"norm": "running", "other": "batch"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Mean and variance of the batch turn with the input, which takes two directions of m out of the "
            "gradient. That is all the layer itself does; γ/σ is the larger effect, and whether a whole network gets "
            "smoother by it is for experiments with training.",
            status="tested",
        ),
    ),
)
