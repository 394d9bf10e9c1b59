"""D7: the root mean square estimated from the first k of d features (pRMSNorm), and what it costs.

Of independent normal features, (k/d)·(RMS_k/RMS_d)² follows a Beta(k/2, (d − k)/2) distribution, which gives mean and
deviation of the estimate exactly; for k ≪ d the relative deviation is 1/√(2k).
"""

from __future__ import annotations

import math

from torch import Tensor

from normkit.functional import moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

ROWS, WIDTH = 16384, 512
PARTS = (8, 16, 32, 64, 128)
K = 32  # 6.25 % of 512, the paper's


def estimate(k: int) -> tuple[float, float]:
    """Return mean and standard deviation of RMS_k/RMS_d for independent normal features."""
    a, both = k / 2, WIDTH / 2
    root = math.exp(math.lgamma(a + 0.5) - math.lgamma(a) + math.lgamma(both) - math.lgamma(both + 0.5))
    mean = math.sqrt(WIDTH / k) * root
    return mean, math.sqrt(1 - mean**2)  # the mean square of the ratio is 1


def _arms(settings: Settings) -> list[Arm]:
    return [Arm("alike", {"spread": 0.0}), Arm("uneven", {"spread": 1.0})]


def _rms(x: Tensor) -> Tensor:
    found = moments(x, axes=-1)
    return (found.variance() + (found.mean + found.remainder).square()).sqrt()


def _measure(params: Params, bench: Bench) -> Values:
    scale = (params["spread"] * bench.draws.randn(WIDTH, stream="scale")).exp()
    x = (scale * bench.draws.randn(ROWS, WIDTH)).to(bench.settings.device)
    whole = _rms(x)
    values: Values = {}
    for k in PARTS:
        ratio = (_rms(x[:, :k]) / whole).double()
        values |= {f"mean/{k}": float(ratio.mean()), f"std/{k}": float(ratio.std())}
    return values


STUDY = Study(id="partial_rms", arms=_arms, measure=_measure, seconds=lambda params: 0.3, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    deviations = [
        Criterion(
            name=f"k = {k}: relative deviation of the estimate over theory",
            values=[v / estimate(k)[1] for v in e.numbers("features", f"std/{k}")],
            kind="near",
            target=1.0,
            tolerance=8 / math.sqrt(2 * ROWS),
            reason=f"8 standard errors of a deviation from {ROWS} rows",
            every=True,
        )
        for k in PARTS
    ]
    means = [
        Criterion(
            name=f"k = {k}: mean of the estimate",
            values=e.numbers("features", f"mean/{k}"),
            kind="near",
            target=estimate(k)[0],
            tolerance=8 * estimate(k)[1] / math.sqrt(ROWS),
            reason=f"8 standard errors of a mean of {ROWS} rows",
            every=True,
        )
        for k in PARTS
    ]
    return [*deviations, *means]


def _summary(e: Evidence) -> str:
    std, mean, uneven = (
        interval(e.numbers(role, f"{key}/{K}")).mean
        for role, key in (("features", "std"), ("features", "mean"), ("uneven", "mean"))
    )
    return (
        f"{K} of {WIDTH} features: RMS off by {number(100 * std, 3)} % (1/√2k: {number(100 / math.sqrt(2 * K), 3)} %), "
        f"mean {number(mean, 3)}; with uneven features {number(uneven, 3)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    def rows(role: str, key: str) -> list[list[float]]:
        return [list(row) for row in zip(*(e.numbers(role, f"{key}/{k}") for k in PARTS), strict=True)]

    def panel(title: str, label: str, key: str, theory: list[float], scale: bool) -> Panel:
        series = [band("alike", PARTS, rows("features", key)), band("uneven", PARTS, rows("uneven", key))]
        law = Series("theory", PARTS, theory, kind="reference")
        return Panel(
            title, "features looked at, k", label, [*series, law], x_scale="log", y_scale="log" if scale else "linear"
        )

    exact = [estimate(k) for k in PARTS]
    return [
        Chart(
            caption=f"The root mean square from the first k of {WIDTH} features over that of all of them, over {ROWS} "
            "rows; features alike, or with log-normal scales. Bands: min–max over seeds.",
            alt="Left: the deviation falls as 1/√(2k) along its theory. Right: the mean is 1 where features are alike "
            "and leaves 1 where they are not.",
            panels=[
                panel("noise", "relative deviation", "std", [s for _, s in exact], True),
                panel("bias", "mean ratio", "mean", [m for m, _ in exact], False),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D7",
        title="RMS from a part of the features",
        sentence="Of the paper, not of the article: pRMSNorm takes the root mean square from the first 6.25 % of the "
        "features, which is where the largest of the paper's speed-ups, 64 %, comes from.",
        sentences=(),
        source="Zhang and Sennrich 2019, arXiv 1910.07467, section 5.",
        measured=f"normkit.moments of the first k of {WIDTH} normal features of {ROWS} rows, k = {PARTS[0]} … "
        f"{PARTS[-1]}: mean and deviation of RMS_k/RMS_d.",
        study=STUDY,
        plays={"features": "alike", "uneven": "uneven"},
        literal=Rule(
            text="Mean and deviation of the estimate are those of √(d/k·Beta(k/2, (d − k)/2)), within 8 standard "
            f"errors: at k = {K} a bias of {100 * (1 - estimate(K)[0]):.1f} % and a deviation of "
            f"{100 * estimate(K)[1]:.1f} %.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Features of log-normal scales, as trained models have them: the first k say little of the rest.",
            plays={"features": "uneven", "uneven": "alike"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A mean of k squares has a relative deviation of √(2/k), its root half of that. It rests on features "
            "being alike, which nothing in a network promises.",
            status="tested",
        ),
    ),
)
