"""I1: what stand-ins for a norm keep of a norm: bounds, what happens to gradients at the bound, and scale.

RMSNorm forgets a token's scale and divides gradients by it. DyT and Derf take no statistic: an entry is squashed by
itself, so scale is kept until it saturates, and there the gradient ends, as 1/cosh²(αx) and exp(−α²x²). SeeDNorm is
RMSNorm with a gain that reads the token, and with it the scale that RMSNorm forgets. Everything here follows from the
formulas and is exact; what it means for training is I1b.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import derf, dyt, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.seednorm import seednorm
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

TOKENS, WIDTH, ALPHA = 32, 60, 0.7
SCALES = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4)
LARGE, CLEAR = 1e4, 0.01  # the largest scale, and entries that it takes to αx = 70 or beyond
DEEP = 4.0  # |αx| at which the gradient is read; far beyond where tanh bends
POINTWISE = ("dyt", "derf")
NAMES = (*POINTWISE, "seed", "seed-zero", "rms")

Function = Callable[[Tensor], Tensor]


def functions(bench: Bench) -> tuple[dict[str, Function], Tensor]:
    """Return every function of x (…, `WIDTH`), all with one gain, and that gain's size; float64, no ε."""
    device = bench.settings.device

    def drawn(stream: str) -> Tensor:
        return bench.draws.randn(WIDTH, stream=stream, dtype=torch.float64).to(device)

    w, alpha, beta = drawn("gain"), drawn("alpha"), drawn("beta") / WIDTH**0.5
    scalar, zero = w.new_tensor(ALPHA), w.new_tensor(0.0)
    made: dict[str, Function] = {
        "dyt": lambda x: dyt(x, scalar, w),
        "derf": lambda x: derf(x, scalar, zero, w),
        "seed": lambda x: seednorm(x, alpha, beta, w, eps=0.0),
        "seed-zero": lambda x: seednorm(x, alpha, torch.zeros_like(beta), w, eps=0.0),
        "rms": lambda x: rms_norm(x, w, eps=0.0),
    }
    return made, w


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"name": name}) for name in NAMES]


def _along(f: Function, x: Tensor) -> float:
    """Return Σ_i |∂y_i/∂x_i| of one token."""
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return float(jacobian.diagonal().abs().sum())


def _measure(params: Params, bench: Bench) -> Values:
    made, w = functions(bench)
    f = made[params["name"]]
    x = bench.draws.randn(TOKENS, WIDTH, dtype=torch.float64).to(w.device)
    x[0, 1:] = 0.0  # a token that is all in one entry, where a norm's output is largest
    outputs = [f(k * x) for k in SCALES]
    at_one, rms = outputs[SCALES.index(1.0)], made["rms"](x)
    clear = x.abs() > CLEAR
    signs = torch.linspace(-1, 1, WIDTH, dtype=torch.float64, device=w.device).sign()  # ±1: every entry as large
    return {
        "largest": max(float((y / w).abs().max()) for y in outputs),
        "change": [float((y - at_one).norm() / at_one.norm()) for y in outputs],
        "size": [float(y.norm() / (w.norm() * TOKENS**0.5)) for y in outputs],
        "to sign": float((f(LARGE * x) / w - x.sign())[clear].abs().max()),
        "slope": _along(f, DEEP / ALPHA * signs) / _along(f, 0.01 / ALPHA * signs),
        "from rms": float((at_one - rms).abs().max() / rms.abs().max()),
    }


STUDY = Study(id="pointwise_functions", arms=_arms, measure=_measure, seconds=lambda params: 0.03, seeds=3)

_ROUNDING = 1e-12
_WHY = f"float64: 1.1×10⁻¹⁶ of the largest of a few sums of {WIDTH} terms, with a factor of a hundred to spare"
_LAWS: dict[str, tuple[str, float]] = {
    "dyt": ("cosh²(0.01)/cosh²(4)", (math.cosh(0.01) / math.cosh(DEEP)) ** 2),
    "derf": ("exp(0.01² − 4²)", math.exp(0.01**2 - DEEP**2)),
}


def _pointwise(e: Evidence, role: str) -> list[Criterion]:
    law, share = _LAWS[role]
    return [
        Criterion(
            name=f"{role}: largest |y/γ| at any scale of x",
            values=e.numbers(role, "largest"),
            kind="at_most",
            target=1.0,
            tolerance=_ROUNDING,
            reason=_WHY,
            every=True,
        ),
        Criterion(
            name=f"{role}: largest |y/γ − sign(x)| at scale {LARGE:g}, entries of |x| > {CLEAR:g}",
            values=e.numbers(role, "to sign"),
            kind="at_most",
            target=0.0,
            tolerance=_ROUNDING,
            reason=f"|αx| > {ALPHA * CLEAR * LARGE:g}: both functions are 1 to the last digit; rounding of a quotient",
            every=True,
        ),
        Criterion(
            name=f"{role}: slope at |αx| = {DEEP:g} over that at 0.01, over {law}",
            values=[v / share for v in e.numbers(role, "slope")],
            kind="near",
            target=1.0,
            tolerance=1e-9,
            reason="1 − tanh² cancels to 1.3×10⁻³ of itself: 10⁻¹³ in float64",
            every=True,
        ),
        Criterion(
            name=f"{role}: relative change of the outputs from scale 1 to 10",
            values=[float(row[SCALES.index(10.0)]) for row in e.values(role, "change")],
            kind="above",
            target=0.0,
            tolerance=0.1,
            reason="scale counts as kept where ten times the input changes the output by a tenth; tanh and erf of "
            "normal numbers of size 0.7 are half saturated",
            every=True,
        ),
    ]


def _criteria(e: Evidence) -> list[Criterion]:
    def exact(name: str, values: list[float], target: float = 0.0) -> Criterion:
        return Criterion(name, values, "near", target, _ROUNDING, _WHY, every=True)

    keeps = Criterion(
        name="seed: relative change of the outputs from scale 1 to 10",
        values=[float(row[SCALES.index(10.0)]) for row in e.values("seed", "change")],
        kind="above",
        target=0.0,
        tolerance=0.1,
        reason="as for the others; ⟨x, β⟩ is of size 1 here, and tanh of it not yet at its end",
        every=True,
    )
    inverse = [v * DEEP / 0.01 for v in e.numbers("rms", "slope")]
    return [
        *(c for role in POINTWISE for c in _pointwise(e, role)),
        keeps,
        exact("seed with β = 0: largest difference from RMSNorm, relative", e.numbers("seed-zero", "from rms")),
        exact(
            "rms: largest relative change of the outputs over all scales", [max(r) for r in e.values("rms", "change")]
        ),
        exact("rms: slope at scale 4 over that at 0.01, times 400: a gradient that never ends", inverse, 1.0),
        Criterion(
            name="rms: largest |y/γ|, over √d",
            values=[v / WIDTH**0.5 for v in e.numbers("rms", "largest")],
            kind="near",
            target=1.0,
            tolerance=_ROUNDING,
            reason=f"a token all in one entry reaches the bound √d itself; {_WHY}",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    def changed(role: str) -> str:
        return number(max(row[SCALES.index(10.0)] for row in e.values(role, "change")), 2)

    tanh, erf = (number(e.numbers(role, "slope")[0], 2) for role in POINTWISE)
    return (
        f"slope at |αx| = 4: {tanh} (DyT), {erf} (Derf) of that at 0; ten times x changes y by "
        f"{changed('dyt')}, {changed('derf')}, {changed('seed')} (SeeDNorm), {changed('rms')} (RMSNorm)"
    )


_LABELS = {"dyt": "DyT", "derf": "Derf", "seed": "SeeDNorm", "seed-zero": "SeeDNorm, β = 0", "rms": "RMSNorm"}


def _figures(e: Evidence) -> list[Chart]:
    z = [i / 20 for i in range(101)]
    lines = [
        ("DyT: 1/cosh²(αx)", [1 / math.cosh(v) ** 2 for v in z]),
        ("Derf: exp(−α²x²)", [math.exp(-v * v) for v in z]),
    ]
    sizes = [
        Series(_LABELS[e.arm(role)], list(SCALES), e.first(role, "size")) for role in ("dyt", "derf", "seed", "rms")
    ]
    marks = [Series(f"{_LABELS[e.arm(r)]}, measured", [DEEP], [e.first(r, "slope")], kind="points") for r in POINTWISE]
    return [
        Chart(
            caption=f"Left: size of the outputs over the scale of the inputs, first seed, one gain γ, α = {ALPHA:g}. "
            "Right: what is left of the slope at |αx|, by formula (dashed) and as differentiated.",
            alt="Left: RMSNorm is level; DyT and Derf rise in proportion and end on a plateau; SeeDNorm goes from one "
            "level to another. Right: both slopes fall by orders of magnitude, Derf's far more steeply.",
            panels=[
                Panel("scale", "scale of x", "‖y‖ / ‖γ‖", sizes, x_scale="log", y_scale="log"),
                Panel(
                    "gradient",
                    "|αx|",
                    "slope / slope at 0",
                    [*(Series(label, z, y, kind="reference") for label, y in lines), *marks],
                    y_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="I1",
        title="DyT, Derf and SeeDNorm as functions",
        sentence="A norm's work is to bring what a sublayer reads back to one fixed scale. Stand-ins exist: DyT and "
        "Derf bound every entry by itself, without a statistic; SeeDNorm lets the gain depend on the token.",
        sentences=(9,),
        source="Article, “Normalization and the residual stream”, of the norm's work; Zhu et al. 2025, arXiv "
        "2503.10622 (DyT); Chen et al. 2025, arXiv 2512.10938 (Derf); arXiv 2510.22777 (SeeDNorm).",
        measured=f"normkit's dyt, derf (α = {ALPHA:g}) and rms_norm, and SeeDNorm after its formula, all with one "
        f"random gain, on {TOKENS} random tokens of {WIDTH} entries at scales {SCALES[0]:g} to {SCALES[-1]:g} in "
        "float64: bounds, change with the scale, and the diagonal of the Jacobian by differentiation.",
        study=STUDY,
        plays={name: name for name in NAMES},
        literal=Rule(
            text="DyT and Derf stay within ±γ and reach it; their slope at |αx| = 4 is 1/cosh²4 and exp(−16) of that "
            "at 0; ten times the input changes their output, and SeeDNorm's, by more than a tenth; SeeDNorm with β = 0 "
            "is RMSNorm; RMSNorm's output does not know the scale, its gradient is inverse to it, its bound √d·γ.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="RMSNorm plays the three: it is bounded by √d·γ, forgets scale, and its gradient does not end.",
            plays=dict.fromkeys(NAMES, "rms"),
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A norm takes scale out and hands gradients back divided by it; a pointwise squashing keeps scale up "
            "to its bound and hands back nothing beyond it. Which entries are beyond is for α to learn.",
            status="tested",
        ),
    ),
)
