"""D6: what RMSNorm leaves undone: the angle between its output and layer norm's is that of the row's mean.

With ε = 0, ⟨x − μ, x⟩ = dσ², so the cosine of the two outputs is σ/r = 1/√(1 + (μ/σ)²), r the root mean square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

ROWS, WIDTH = 64, 60
OFFSETS = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


def law(offset: float) -> float:
    """Return the cosine for a row whose mean is ``offset`` deviations."""
    return 1 / math.sqrt(1 + offset**2)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"recentred": name == "recentred"}) for name in ("rms", "recentred")]


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1) / (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1))


def _measure(params: Params, bench: Bench) -> Values:
    z = bench.draws.randn(ROWS, WIDTH, dtype=torch.float64).to(bench.settings.device)
    z = layer_norm(z, eps=0.0)  # mean 0 and deviation 1 in every row, so that the offset is μ/σ
    off: dict[str, list[float]] = {"float64": [], "float32": []}
    cosines: list[float] = []
    for offset in OFFSETS:
        x = 3 * (z + offset)
        for kind, rows in (("float64", x), ("float32", x.float())):
            fed = rows - rows.mean(-1, keepdim=True) if params["recentred"] else rows
            cosine = _cosines(rms_norm(fed, eps=0.0).double(), layer_norm(rows, eps=0.0).double())
            off[kind].append(float((cosine - law(offset)).abs().max()))
            if kind == "float64":
                cosines.append(float(cosine.mean()))
    return {"cosines": cosines, **{f"off/{kind}": row for kind, row in off.items()}}


STUDY = Study(id="mean_offset", arms=_arms, measure=_measure, seconds=lambda params: 0.02, seeds=3)

_TOLERANCE = {"float64": 1e-12, "float32": 32 * 2.0**-24}
_REASON = {
    "float64": f"float64 rounding: sums over {WIDTH} numbers, {WIDTH}·u = 7×10⁻¹⁵, times 1 + 5² for an offset of 5",
    "float32": "each element is off by a few roundings of 2⁻²⁴, and x + 5σ itself by one of five times that: 16, twice",
}


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"{kind}: distance of the cosine from 1/√(1 + (μ/σ)²), largest over rows and offsets",
            values=[max(row) for row in e.values("norm", f"off/{kind}")],
            kind="at_most",
            target=0.0,
            tolerance=_TOLERANCE[kind],
            reason=_REASON[kind],
            every=True,
        )
        for kind in _TOLERANCE
    ]


def _summary(e: Evidence) -> str:
    shown = dict(zip(OFFSETS, e.first("norm", "cosines"), strict=True))
    off = max(max(row) for row in e.values("norm", "off/float64"))
    return (
        f"cosine of RMSNorm's and layer norm's outputs at μ/σ = .1, .5, 1, 2: "
        f"{', '.join(number(shown[k], 3) for k in (0.1, 0.5, 1.0, 2.0))}; off the law by {number(off, 1)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    fine = [5 * i / 50 for i in range(51)]
    return [
        Chart(
            caption="Cosine of the angle between RMSNorm's and layer norm's outputs, by the mean of the row (mean over "
            f"{ROWS} rows, first seed; dashed: the law).",
            alt="The points fall along the curve from 1 at a mean of zero through .71 at one deviation to .2 at five; "
            "with the mean taken away first they stay at 1.",
            panels=[
                Panel(
                    "what centring changes",
                    "mean of the row (σ)",
                    "cosine",
                    [
                        Series("RMSNorm", OFFSETS, e.first("norm", "cosines"), kind="points"),
                        Series("RMSNorm of x − μ", OFFSETS, e.first("recentred", "cosines"), kind="points"),
                        Series("1/√(1 + (μ/σ)²)", fine, [law(v) for v in fine], kind="reference"),
                    ],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D6",
        title="RMSNorm is LayerNorm without the mean",
        sentence="RMSNorm does one reduction less, that of the mean, and has no β.",
        sentences=(35,),
        source="Article, RMSNorm, “Code”; Zhang and Sennrich 2019, arXiv 1910.07467, for why the mean may go.",
        measured=f"normkit.rms_norm and layer_norm with ε = 0 on {ROWS} rows of width {WIDTH} with a mean of 0 to 5 "
        "deviations, in float64 and float32: the cosine of the angle between the two outputs.",
        study=STUDY,
        plays={"norm": "rms", "recentred": "recentred"},
        literal=Rule(
            text="The missing mean is the whole difference: both outputs have length √d and the cosine between them is "
            "1/√(1 + (μ/σ)²), to 10⁻¹² in float64.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The mean put back: RMSNorm of x − μ is layer norm, at an angle of 0 whatever the mean.",
            plays={"norm": "recentred", "recentred": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Centring is a projection, and RMSNorm leaves it out. Where a row's mean is a tenth of its deviation "
            "the outputs differ by 6°, at one deviation by 45°: dropping the mean is harmless where means are small.",
            status="tested",
        ),
    ),
)
