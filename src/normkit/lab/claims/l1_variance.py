"""L1: the same variance by five routes in float32, as the mean grows beside the deviation.

Let u = 2⁻²⁴ and κ = √(1 + (μ/σ)²). Chan, Golub and LeVeque (1983) bound the relative error of the variance of n
numbers by n·u·κ² for E[x²] − μ² in one pass, by n·u·κ for Welford's update, and by n·u for deviations from the mean
whose own mean is taken off again.

The one-pass form can be held to more than a bound. Where E[x²] ≈ μ² = 4^k both terms are float32 numbers near 4^k,
which lie 2^(2k−24) apart or more, so their difference is a multiple of that. From k = 13 on it is a multiple of 4: for
a variance near 1 it is 0, off by all of it, or off by more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.functional import layer_norm, moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

ROWS, WIDTH = 64, 4096
POWERS = tuple(range(1, 18, 2))  # odd, so that 4^k always sits alike between float32 numbers; 2¹⁷ = 1.3×10⁵
OFFSETS = tuple(2.0**k for k in POWERS)  # μ/σ
LOST = 13  # the power of two from which a difference of squares cannot show a variance of 1
U = 2.0**-24
ALGORITHMS = ("one-pass", "welford", "two-pass", "corrected", "layer-norm")
_NAMES = {
    "one-pass": "E[x²] − μ²",
    "welford": "Welford",
    "two-pass": "two passes",
    "corrected": "two passes, corrected",
    "layer-norm": "layer_norm",
}


def _one_pass(x: Tensor) -> Tensor:
    mean = x.mean(-1)
    return (x * x).mean(-1) - mean * mean


def _welford(x: Tensor) -> Tensor:
    mean, m2 = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for count, column in enumerate(x.unbind(1), 1):
        from_old = column - mean
        mean = mean + from_old / count
        m2 = m2 + from_old * (column - mean)
    return m2 / x.shape[1]


def _two_pass(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return (d * d).mean(-1)


def _corrected(x: Tensor) -> Tensor:
    return moments(x, axes=(1,)).variance()


def _from_layer_norm(x: Tensor) -> Tensor:
    """Return the variance that layer_norm divided by: y = d/√v, so v = (Σd²/Σ(d·y))²."""
    wide = x.double()
    d = wide - wide.mean(-1, keepdim=True)
    return ((d * d).sum(-1) / (d * layer_norm(x, eps=0.0).double()).sum(-1)).square()


_VARIANCES = {
    "one-pass": _one_pass,
    "welford": _welford,
    "two-pass": _two_pass,
    "corrected": _corrected,
    "layer-norm": _from_layer_norm,
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"algorithm": name}) for name in ALGORITHMS]


def _measure(params: Params, bench: Bench) -> Values:
    z = bench.draws.randn(ROWS, WIDTH).to(bench.settings.device)
    x = torch.cat([offset + z for offset in OFFSETS])  # float32, and so are the numbers the truth is computed from
    truth = x.double().var(-1, correction=0)
    found = _VARIANCES[params["algorithm"]](x).double()
    error = ((found - truth) / truth).abs().unflatten(0, (len(OFFSETS), ROWS))
    lost = [k >= LOST for k in POWERS]
    return {
        "median": error.median(1).values.tolist(),
        "largest": error.amax(1).tolist(),
        "least when lost": float(error[lost].min()),
        "negative": float((found < 0).double().mean()),
    }


STUDY = Study(
    id="variance_algorithms",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.13 if params["algorithm"] == "welford" else 0.05,
    seeds=3,
)


def _worst(e: Evidence, role: str) -> list[float]:
    return [max(row) for row in e.values(role, "largest")]


def _literal(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"largest relative error of the variance, {role}",
            values=_worst(e, role),
            kind="at_most",
            target=0.0,
            tolerance=2.0**-7,
            reason="half of it goes into 1/√v: 2⁻⁸, the largest rounding error of a bfloat16 output",
            every=True,
        )
        for role in ALGORITHMS
    ]


def _slopes(e: Evidence, role: str) -> list[float]:
    """Return the log-log slope of the median error against μ/σ where the bounds rise and nothing has saturated."""
    chosen = [i for i, k in enumerate(POWERS) if 3 <= k <= 11]
    x = [OFFSETS[i] for i in chosen]
    return [log_log_slope(x, [max(row[i], U / 16) for i in chosen]) for row in e.values(role, "median")]


def _theory(e: Evidence) -> list[Criterion]:
    bound = WIDTH * U
    accurate = [
        Criterion(
            name=f"largest relative error of the variance, {role}, μ/σ up to 2¹⁷",
            values=_worst(e, role),
            kind="at_most",
            target=0.0,
            tolerance=2 * bound,
            reason="n·u = 2.4×10⁻⁴ for a sum in any order, whatever μ/σ; twice it, for the division and the squares",
            every=True,
        )
        for role in ("corrected", "layer-norm")
    ]
    return [
        *accurate,
        Criterion(
            name="least relative error of the variance, one-pass, μ/σ ≥ 2¹³",
            values=e.numbers("one-pass", "least when lost"),
            kind="at_least",
            target=1.0,
            tolerance=0.0,
            reason="exact: a multiple of 4 stands for a number near 1",
            every=True,
        ),
        Criterion(
            name="log-log slope of the median error against μ/σ, one-pass, 2³ … 2¹¹",
            values=_slopes(e, "one-pass"),
            kind="near",
            target=2.0,
            tolerance=0.3,
            reason="error ∝ κ²; a median of 64 rows is good to 16 %, and five of them over eight octaves give a slope "
            "good to .036; eight times that, as every seed is judged",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    at = POWERS.index(LOST)
    one, corrected = (max(row[at] for row in e.values(role, "median")) for role in ("one-pass", "corrected"))
    negative = 100 * max(e.numbers("one-pass", "negative"))
    return (
        f"float32, μ/σ = 2¹³: median error of the variance {number(one, 2)} in one pass ({number(negative, 2)} % of "
        f"all rows negative), {number(corrected, 2)} corrected"
    )


def _figures(e: Evidence) -> list[Chart]:
    floor = U / 16  # no zero on a logarithmic axis
    lines = [
        band(_NAMES[role], OFFSETS, [[max(v, floor) for v in row] for row in e.values(role, "median")])
        for role in ALGORITHMS
    ]
    laws = [
        Series("u·(μ/σ)²", OFFSETS, [U * r * r for r in OFFSETS], kind="reference"),
        Series("u·μ/σ", OFFSETS, [U * r for r in OFFSETS], kind="reference"),
    ]
    return [
        Chart(
            caption=f"Median error of the float32 variance over {ROWS} rows of {WIDTH} numbers (bands: min–max over "
            "seeds). Dashed: u·(μ/σ)² and u·μ/σ, u = 2⁻²⁴.",
            alt="On double logarithmic axes the one-pass error rises with slope two and passes one near 10⁴, Welford's "
            "more slowly, below the line of slope one; layer_norm and the corrected passes stay level near 10⁻⁷, which "
            "two plain passes leave late.",
            panels=[
                Panel(
                    "variance in float32",
                    "mean over deviation, μ/σ",
                    "relative error of the variance",
                    [*lines, *laws],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L1",
        title="Float32 statistics, by which formula?",
        sentence="In half precision the statistics μ and σ² are usually accumulated in float32, which keeps rounding "
        "errors low.",
        sentences=(13,),
        source="Article, “One form for all”; the bounds: Chan, Golub and LeVeque 1983, The American Statistician 37.",
        measured=f"The variance in float32 of {ROWS} rows of {WIDTH} numbers N(μ, 1), μ = 2 … 2¹⁷, as E[x²] − μ² in "
        "one pass, by Welford's update element by element, in two passes, in two passes with the deviations' own mean "
        "taken off (normkit's moments), and as normkit's layer_norm divides by it, against float64 on the same data.",
        study=STUDY,
        plays={name: name for name in ALGORITHMS},
        literal=Rule(
            text="Whichever way it is computed, the float32 variance is good enough that a bfloat16 output cannot "
            "show its error: off by at most 2⁻⁷.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="normkit's moments and layer_norm stay within 2n·u at every μ/σ; E[x²] − μ² is off by the whole "
            "variance or more in every row from μ/σ = 2¹³ on, and on the way there its error grows as (μ/σ)².",
            origin="theory",
            criteria=_theory,
        ),
        correction="Float32 keeps the error low if deviations from the mean are summed. E[x²] − μ², the formula that "
        "needs one pass, loses u·(μ/σ)² and with it the whole variance from μ/σ ≈ 10⁴ on; a negative variance then "
        "turns into NaN.",
        control=Control(
            text="One pass and the corrected passes change places: the bound must break.",
            plays={
                "one-pass": "corrected",
                "corrected": "one-pass",
                "layer-norm": "one-pass",
                "welford": "welford",
                "two-pass": "two-pass",
            },
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="E[x²] and μ² agree in all digits that a large mean fills, and subtracting leaves their rounding. "
            "Deviations from a nearby mean are small numbers, often without any rounding.",
            status="tested",
        ),
    ),
)
