"""L5: how one float16 value makes a norm return zeros or NaN, and what it takes to cure it.

float16 ends at 65504; 65520 and more is rounded to infinity. Two different things overflow. An activation of 66246.39,
as T5's feed-forward layers have produced, is infinite as soon as it is stored: its square and the mean square are
infinite, 1/√∞ = 0, and ∞·0 is NaN. An activation of 300 is harmless, but its square is not: the row comes out as
zeros, silently. Statistics in float32 cure the second; the first has to be clamped, or kept wide, before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

WIDTH, EPS = 1024, 1e-6
VALUE = 66246.39  # seen in T5's feed-forward, huggingface/transformers issue 5651
LIMIT = torch.finfo(torch.float16).max - 1000  # where that fix clamps
PEAKS = {"square": 300.0, "value": VALUE}  # what overflows → the row's largest element
ARMS = {
    # name → (statistics, clamp before they are taken, the row reaches the norm in float16)
    "half": ("half", False, True),
    "half-clamped": ("half", True, True),
    "wide": ("wide", False, True),
    "wide-clamped": ("wide", True, True),
    "wide-stream": ("wide", False, False),
}
_NAMES = {
    "half": "float16 throughout",
    "half-clamped": "float16, clamped",
    "wide": "float32 statistics",
    "wide-clamped": "float32 statistics, clamped",
    "wide-stream": "float32 up to the norm",
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"arm": name}) for name in ARMS]


def half_norm(x: Tensor) -> dict[str, Tensor]:
    """Return each step of RMSNorm with every step in x's own dtype."""
    square = x * x
    mean = square.mean(-1, keepdim=True)
    root = torch.rsqrt(mean + EPS)
    return {"square": square, "mean": mean, "root": root, "y": x * root}


def _norm(row: Tensor, statistics: str, narrow: bool) -> Tensor:
    if statistics == "half":
        return half_norm(row.half())["y"]
    return rms_norm(row.half() if narrow else row, eps=EPS).half()


def _measure(params: Params, bench: Bench) -> Values:
    statistics, clamp, narrow = ARMS[params["arm"]]
    values: Values = {}
    for what, peak in PEAKS.items():
        row = bench.draws.randn(1, WIDTH).to(bench.settings.device)
        row[0, 3] = peak
        given = row.clamp(-LIMIT, LIMIT) if clamp else row
        exact = given.double() / (given.double().square().mean(-1, keepdim=True) + EPS).sqrt()
        y = _norm(given, statistics, narrow).double()
        finite = bool(y.isfinite().all())
        values[f"{what}/nan"] = int(y.isnan().sum())
        values[f"{what}/zero"] = int((y == 0).sum())
        values[f"{what}/length"] = float(y.square().mean().sqrt()) if finite else None
        values[f"{what}/error"] = float((y - exact).norm() / exact.norm()) if finite else None
    stored = torch.full((1, 8), VALUE, device=bench.settings.device).half()
    steps = {"x": stored, **half_norm(stored)}
    values["chain"] = ", ".join(f"{key} {number(float(step[0, 0]))}" for key, step in steps.items())
    return values


STUDY = Study(id="half_overflow", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)


def _right(e: Evidence, role: str, what: str) -> Criterion:
    return Criterion(
        name=f"relative error of the row whose {what} overflows, {_NAMES[role]}",
        values=e.numbers(role, f"{what}/error"),
        kind="at_most",
        target=0.0,
        tolerance=4 * 2.0**-11,
        reason="two roundings to float16, of the input and of the output, 2⁻¹¹ each; twice that. NaN does not pass",
        every=True,
    )


def _count(e: Evidence, role: str, key: str, target: int, words: str) -> Criterion:
    return Criterion(
        name=f"{words}, {_NAMES[role]}",
        values=e.numbers(role, key),
        kind="near",
        target=target,
        tolerance=0.0,
        reason="exact: IEEE arithmetic",
        every=True,
    )


def _literal(e: Evidence) -> list[Criterion]:
    return [_right(e, "wide", what) for what in PEAKS]


def _corrected(e: Evidence) -> list[Criterion]:
    return [
        _count(e, "half", "square/zero", WIDTH, "zeros in the row whose square overflows"),
        _count(e, "half", "value/nan", 1, "NaN in the row whose value overflows"),
        _count(e, "half", "value/zero", WIDTH - 1, "zeros in the row whose value overflows"),
        _count(e, "half-clamped", "value/zero", WIDTH, "zeros in the row whose value overflows"),
        _right(e, "wide", "square"),
        _count(e, "wide", "value/nan", 1, "NaN in the row whose value overflows"),
        *(_right(e, role, what) for role in ("wide-clamped", "wide-stream") for what in PEAKS),
    ]


def _summary(e: Evidence) -> str:
    zeros = e.first("half", "square/zero")
    cured = max(v for role in ("wide-clamped", "wide-stream") for w in PEAKS for v in e.numbers(role, f"{w}/error"))
    return (
        f"300 in float16 gives {zeros} zeros of {WIDTH}; 66246: {e.first('half', 'chain')}; float32 statistics and a "
        f"clamp are off by {number(cured, 1)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(ARMS)))

    def lengths(what: str) -> list[float]:
        shown = [e.first(role, f"{what}/length") for role in ARMS]
        return [0.0 if v is None else v for v in shown]

    series = [
        Series("row with 300 in it", positions, lengths("square"), kind="bars"),
        Series("row with 66246 in it", positions, lengths("value"), kind="bars"),
    ]
    return [
        Chart(
            caption="Root mean square of RMSNorm's output, which should be 1, where a square or a value leaves "
            "float16. No bar: the row is all zeros or holds NaN.",
            alt="In float16 throughout neither row comes out, clamped or not. With float32 statistics the row with 300 "
            "comes out at length one; the row with 66246 needs the clamp, or float32 up to the norm, as well.",
            panels=[
                Panel(
                    "what overflow leaves of a row",
                    "arithmetic",
                    "rms of the output",
                    series,
                    x_names=[_NAMES[role] for role in ARMS],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L5",
        title="Float32 statistics make float16 safe",
        sentence="In float16 training, μ and σ² are accumulated in float32 and converted back, which protects the "
        "element-wise arithmetic that follows.",
        sentences=(13,),
        source="Article, “One form for all”; the value: huggingface/transformers issue 5651 (T5 in float16).",
        measured=f"RMSNorm of {WIDTH} normal numbers with one element of 300 or of {VALUE}: step by step in float16, "
        "and by normkit's rms_norm with float32 statistics; each with and without a clamp to 64504 before, and with "
        "the row kept in float32 up to the norm. Against float64 on the row that was given.",
        study=STUDY,
        plays={name: name for name in ARMS},
        literal=Rule(
            text="With float32 statistics both rows come out right, to the rounding of float16.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="In float16 throughout, 300 turns the row into zeros and 66246.39 into zeros and a NaN. Float32 "
            "statistics cure the first and leave the NaN; with a clamp before, or with float32 up to the norm, both "
            "come out right. A clamp without float32 statistics leaves zeros.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="Float32 statistics cure squares that overflow. A value that has overflowed is infinite before the "
        "norm sees it: clamp it while it is still finite, or keep the residual stream wide.",
        control=Control(
            text="Float16 throughout and float32 statistics change places: the cure must not cure.",
            plays={**{name: name for name in ARMS}, "half": "wide", "wide": "half"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The order is value, square, mean, 1/√, product: the first infinity decides. After a finite value "
            "1/√∞ = 0 wipes the row out; after an infinite one it meets ∞·0.",
            status="tested",
        ),
    ),
)
