"""D5: what layer norm's backward takes out of a gradient, and how long it leaves it.

With g = γ ⊙ dy, dx = (1/σ)(g − mean(g) − x̂·mean(g ⊙ x̂)): with ε = 0 the projection of g off 1 and off x̂, divided by
σ. A projection lengthens nothing, so ‖dx‖ ≤ ‖g‖/σ. A norm whose μ and σ are constants would give g/σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

ROWS, WIDTH = 64, 60
STEP = 1e-5  # of the central differences


def _detached(x: Tensor, weight: Tensor) -> Tensor:
    """Layer norm whose statistics are constants to the backward."""
    centre, scale = x.mean(-1, keepdim=True).detach(), x.std(-1, unbiased=False, keepdim=True).detach()
    return (x - centre) / scale * weight


_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer": lambda x, w: layer_norm(x, w, eps=0.0),
    "rms": lambda x, w: rms_norm(x, w, eps=0.0),
    "detached": _detached,
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in _NORMS]


def _gradient(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(norm(leaf, weight), leaf, dy)[0]


def differences(norm: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of Σ norm(x) ⊙ dy at one row by central differences."""
    steps = STEP * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return ((norm(x + steps) - norm(x - steps)) * dy).sum(-1) / (2 * STEP)


def _along(gradient: Tensor, direction: Tensor) -> Tensor:
    """Return the length of each row's component along a direction."""
    return (gradient * direction).sum(-1).abs() / torch.linalg.vector_norm(direction, dim=-1)


def _measure(params: Params, bench: Bench) -> Values:
    device, norm = bench.settings.device, _NORMS[params["norm"]]
    scale = bench.draws.randn(ROWS, 1, stream="scale", dtype=torch.float64).exp()
    x = (scale * (bench.draws.randn(ROWS, WIDTH, dtype=torch.float64) + 0.5)).to(device)
    dy = bench.draws.randn(ROWS, WIDTH, stream="gradient", dtype=torch.float64).to(device)
    weight = bench.draws.randn(WIDTH, stream="weight", dtype=torch.float64).to(device)
    sigma = x.std(-1, unbiased=False)
    centred, g = x - x.mean(-1, keepdim=True), weight * dy
    unit = torch.linalg.vector_norm(g, dim=-1) / sigma  # ‖g‖/σ: lengths below are in it
    dx = _gradient(norm, x, weight, dy)
    narrow = _gradient(norm, x.float(), weight.float(), dy.float()).double()
    numeric = torch.stack([differences(lambda rows: norm(rows, weight), row, d) for row, d in zip(x, dy, strict=True)])
    length = torch.linalg.vector_norm(dx, dim=-1) / unit
    ones = torch.ones_like(x)
    return {
        "mean": float((_along(dx, ones) / unit).max()),
        "normed": float((_along(dx, centred) / unit).max()),
        "before": float((_along(g, ones) / torch.linalg.vector_norm(g, dim=-1)).max()),
        "longest": float(length.max()),
        "lost": float(1 - length.square().mean()),
        "differences": float((torch.linalg.vector_norm(numeric - dx, dim=-1) / unit).max()),
        "narrow": float((_along(narrow, ones) / unit).max()),
        "lengths": sorted((torch.linalg.vector_norm(dx, dim=-1)).tolist()),
        "sigma": sigma.tolist(),
        "ratio": (torch.linalg.vector_norm(dx, dim=-1) / torch.linalg.vector_norm(g, dim=-1)).tolist(),
    }


STUDY = Study(id="backward", arms=_arms, measure=_measure, seconds=lambda params: 0.05, seeds=3)

_EXACT = 1e-12
_EXACT_REASON = (
    f"float64 rounding: inner products of {WIDTH} numbers, {WIDTH}·u = 7×10⁻¹⁵, some of them one after another"
)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="|component of dx along 1|, in ‖g‖/σ",
            values=e.numbers("norm", "mean"),
            kind="at_most",
            target=0.0,
            tolerance=_EXACT,
            reason=_EXACT_REASON,
            every=True,
        ),
        Criterion(
            name="float32 gradient: |component along 1|, in ‖g‖/σ",
            values=e.numbers("norm", "narrow"),
            kind="at_most",
            target=0.0,
            tolerance=2 * math.sqrt(WIDTH) * 4 * 2.0**-24,
            reason=f"each of {WIDTH} elements is off by at most 4 roundings of 2⁻²⁴ of the row's largest terms: √d·4u "
            "in the worst case, twice",
            every=True,
        ),
        Criterion(
            name="largest ‖dx‖, in ‖g‖/σ",
            values=e.numbers("norm", "longest"),
            kind="at_most",
            target=1.0,
            tolerance=_EXACT,
            reason=_EXACT_REASON,
            every=True,
        ),
        Criterion(
            name="|component of dx along x̂|, in ‖g‖/σ",
            values=e.numbers("norm", "normed"),
            kind="at_most",
            target=0.0,
            tolerance=_EXACT,
            reason=_EXACT_REASON,
            every=True,
        ),
        Criterion(
            name="largest distance of dx from central differences, in ‖g‖/σ",
            values=e.numbers("norm", "differences"),
            kind="at_most",
            target=0.0,
            tolerance=1e-6,
            reason="steps of h = 10⁻⁵: truncation h²·y‴/6 with y‴ ~ 1/σ³ and σ ≥ .05, 7×10⁻⁹, rounding u/h = 10⁻¹¹",
            every=True,
        ),
        Criterion(
            name="the component along 1 that g had, largest over rows, in ‖g‖",
            values=e.numbers("norm", "before"),
            kind="above",
            target=0.0,
            tolerance=0.01,
            reason="a random direction has N(0, 1/d) of any other, so the largest of 64 is near .3",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    off, longest = max(e.numbers("norm", "mean")), max(e.numbers("norm", "longest"))
    lost = 100 * sum(e.numbers("norm", "lost")) / len(e.seeds)
    return (
        f"dx keeps {number(off, 1)} of the mean direction and is at most {number(longest, 3)} ‖g‖/σ long; the two "
        f"projections take {number(lost, 2)} % of ‖g‖² (2/d = {number(200 / WIDTH, 2)} %)"
    )


def _figures(e: Evidence) -> list[Chart]:
    names = {"norm": "layer norm", "constant": "statistics held constant"}
    low, high = min(e.first("norm", "sigma")), max(e.first("norm", "sigma"))
    bars = {"norm": "layer", "rms": "RMS", "constant": "constant"}

    def parts(key: str, label: str) -> Series:
        return Series(label, range(3), [max(e.numbers(role, key)) for role in bars], kind="points")

    return [
        Chart(
            caption="Left: how much longer or shorter a row's gradient becomes in the backward, against the row's σ "
            "(first seed; dashed: 1/σ, the bound). Right: largest component left along two directions.",
            alt="Left: all rows lie on or just below the line 1/σ, above 1 where σ is below 1. Right: layer norm "
            "leaves nothing along either direction, RMS norm something of the mean, constant statistics of both.",
            panels=[
                Panel(
                    "length",
                    "σ of the row",
                    "‖dx‖/‖g‖",
                    [
                        *(
                            Series(words, e.first(r, "sigma"), e.first(r, "ratio"), kind="points")
                            for r, words in names.items()
                        ),
                        Series("1/σ", [low, high], [1 / low, 1 / high], kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel(
                    "directions",
                    "norm",
                    "largest component (‖g‖/σ)",
                    [parts("mean", "along 1"), parts("normed", "along x̂")],
                    x_names=list(bars.values()),
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D5",
        title="The backward projects",
        sentence="As mean and variance are part of the computation, LayerNorm's gradient holds a term that subtracts "
        "the gradient's component along the mean direction, so that it bounds the scale of gradients as well.",
        sentences=(27,),
        source="Article, LayerNorm, “Properties”; Xu et al. 2019, arXiv 1911.07013, for statistics held constant.",
        measured=f"The gradient of normkit.layer_norm (ε = 0, random weight) on {ROWS} rows of width {WIDTH} with "
        "scales over an order of magnitude, in float64 and float32: its components along 1 and x̂, its length beside "
        "‖g‖/σ with g = γ ⊙ dy, and its distance from central differences.",
        study=STUDY,
        plays={"norm": "layer", "constant": "detached", "rms": "rms"},
        literal=Rule(
            text="dx has no component along 1 (nor along x̂), to 10⁻¹² in float64, is never longer than ‖g‖/σ, and is "
            "the gradient by central differences to 10⁻⁶.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The same norm with μ and σ held constant in the backward: the components stay, and central "
            "differences disagree.",
            plays={"norm": "detached", "constant": "layer", "rms": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Adding a constant or stretching the row does not change the output, so no gradient can point there. "
            "The bound is in units of 1/σ: a row with a small σ gets a longer gradient, not a shorter one, and of "
            "a random gradient the two projections take 2/d. That this stabilises training is not tested here.",
            status="conjecture",
        ),
    ),
)
