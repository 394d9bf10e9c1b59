"""C2: how noisy a batch's statistics are, by the number of tokens, and by the number that counts.

Of m independent normal numbers the mean has the deviation σ/√m and the unbiased variance σ²·√(2/(m − 1)). Tokens of
one sequence resemble each other: with a correlation ρ inside sequences of length L, m tokens say as much about
the mean as m/(1 + (L − 1)ρ) independent ones.
"""

from __future__ import annotations

import math

from torch import Tensor

from normkit.functional import moments
from normkit.kernels.statistics import Moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

DRAWS = 16384  # batches drawn for each size: the channels of one tensor
SIZES = (2, 8, 32, 128, 512)
LENGTH, CORRELATION = 8, 0.3
WHOLE = SIZES[1:]  # sizes that are whole sequences
WIDTH = 64


def effective(tokens: int) -> float:
    """Return how many independent tokens say as much about the mean as ``tokens`` in sequences."""
    return tokens / (1 + (LENGTH - 1) * CORRELATION)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"statistic": name}) for name in ("batch", "sequences", "layer")]


def _batch(bench: Bench, tokens: int, correlated: bool) -> Tensor:
    """Return ``tokens`` unit normals for each of `DRAWS` channels, (tokens, DRAWS)."""
    x = bench.draws.randn(tokens, DRAWS, stream=f"tokens-{tokens}").to(bench.settings.device)
    if not correlated or tokens % LENGTH:
        return x
    topic = bench.draws.randn(tokens // LENGTH, 1, DRAWS, stream=f"topics-{tokens}").to(bench.settings.device)
    common = topic.expand(-1, LENGTH, -1).reshape(tokens, DRAWS)
    return math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * x


def _statistics(bench: Bench, tokens: int, kind: str) -> Moments:
    if kind != "layer":
        return moments(_batch(bench, tokens, kind == "sequences"), axes=0)
    # A token's own statistic is the same whatever batch it comes in: one token of each of DRAWS batches.
    return moments(bench.draws.randn(DRAWS, WIDTH, stream=f"tokens-{tokens}").to(bench.settings.device), axes=1)


def _measure(params: Params, bench: Bench) -> Values:
    values: Values = {}
    for tokens in SIZES:
        found = _statistics(bench, tokens, params["statistic"])
        values[f"mean/{tokens}"] = float((found.mean + found.remainder).double().std())
        values[f"var/{tokens}"] = float(found.variance(unbiased=True).double().std())
    return values


STUDY = Study(
    id="batch_noise",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: {"batch": 0.4, "sequences": 0.6, "layer": 0.2}[params["statistic"]],
    seeds=3,
)


def sampling(kurtosis: float) -> float:
    """Return the relative standard error of a standard deviation from `DRAWS` values of that kurtosis."""
    return math.sqrt((kurtosis - 1) / (4 * DRAWS))


def _near(name: str, values: list[float], law: float, kurtosis: float) -> Criterion:
    return Criterion(
        name=name,
        values=[v / law for v in values],
        kind="near",
        target=1.0,
        tolerance=8 * sampling(kurtosis),
        reason=f"8 standard errors of a deviation from {DRAWS} batches",
        every=True,
    )


def _criteria(e: Evidence) -> list[Criterion]:
    means = [
        _near(f"m = {m}: deviation of the mean over σ/√m", e.numbers("batch", f"mean/{m}"), m**-0.5, 3.0) for m in SIZES
    ]
    variances = [
        # s² is χ² with m − 1 degrees of freedom, whose kurtosis is 3 + 12/(m − 1).
        _near(
            f"m = {m}: deviation of the variance over σ²√(2/(m − 1))",
            e.numbers("batch", f"var/{m}"),
            math.sqrt(2 / (m - 1)),
            3 + 12 / (m - 1),
        )
        for m in SIZES
    ]
    sequences = [
        _near(
            f"m = {m} in sequences of {LENGTH}: deviation of the mean over σ/√(effective m)",
            e.numbers("sequences", f"mean/{m}"),
            effective(m) ** -0.5,
            3.0,
        )
        for m in WHOLE
    ]
    return [*means, *variances, *sequences]


def _summary(e: Evidence) -> str:
    few, many = (100 * interval(e.numbers("batch", f"var/{m}")).mean for m in (8, 512))
    lost = interval(e.numbers("sequences", "mean/512")).mean / interval(e.numbers("batch", "mean/512")).mean
    return (
        f"variance off by {number(few, 3)} % at 8 tokens, {number(many, 2)} % at 512; means of sequences with "
        f"ρ = {CORRELATION} are {number(lost, 3)} × as noisy"
    )


def _figures(e: Evidence) -> list[Chart]:
    fine = [2 * 256 ** (i / 40) for i in range(41)]

    def rows(role: str, key: str, sizes: tuple[int, ...]) -> list[list[float]]:
        columns = [e.numbers(role, f"{key}/{m}") for m in sizes]
        return [list(row) for row in zip(*columns, strict=True)]

    laws = {
        "1/√m": Series("", fine, [m**-0.5 for m in fine], kind="reference"),
        "sequences": Series(
            "", [m for m in fine if m >= LENGTH], [effective(1) ** -0.5 * m**-0.5 for m in fine if m >= LENGTH],
            kind="reference",
        ),
        "variance": Series("", fine, [math.sqrt(2 / (m - 1)) for m in fine], kind="reference"),
    }  # fmt: skip
    return [
        Chart(
            caption=f"Deviation of a batch's statistics over {DRAWS} batches, by the number of tokens; dashed: theory. "
            "Bands: min–max over seeds.",
            alt="On logarithmic axes both statistics of independent tokens fall along straight lines of slope −½; "
            "tokens in sequences lie on a parallel line above.",
            panels=[
                Panel(
                    "mean",
                    "tokens in the batch, m",
                    "deviation (σ)",
                    [
                        band("independent", SIZES, rows("batch", "mean", SIZES)),
                        band(f"in sequences of {LENGTH}, ρ = {CORRELATION}", WHOLE, rows("sequences", "mean", WHOLE)),
                        laws["1/√m"],
                        laws["sequences"],
                    ],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel(
                    "variance",
                    "tokens in the batch, m",
                    "deviation (σ²)",
                    [band("independent", SIZES, rows("batch", "var", SIZES)), laws["variance"]],
                    x_scale="log",
                    y_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C2",
        title="Small batches make noisy statistics",
        sentence="Statistics of a small batch are noisy: they depend on the whole batch, and the smaller it is the "
        "noisier they get, while the batch on each device of a large training run is often very small.",
        sentences=(16,),
        source="Article, “The limits of BatchNorm”, second point.",
        measured=f"normkit.moments of {DRAWS} batches of m = {SIZES[0]} … {SIZES[-1]} unit normals: the deviation "
        f"between batches of the mean and of the unbiased variance; once with independent tokens, once with "
        f"sequences of {LENGTH} tokens that share a common part (correlation {CORRELATION}).",
        study=STUDY,
        plays={"batch": "batch", "sequences": "sequences"},
        literal=Rule(
            text="The mean deviates by σ/√m and the variance by σ²√(2/(m − 1)) at every m; in sequences the mean "
            "deviates as of m/(1 + (L − 1)ρ) independent tokens. Within 8 standard errors.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text=f"A token's own mean and variance over {WIDTH} features, as layer norm takes them, in batches of the "
            "same sizes: their noise does not know the batch.",
            plays={"batch": "layer", "sequences": "layer"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="m counts tokens, not sequences, so one long sequence is a large batch by number; but tokens of a "
            "sequence resemble each other, and only what is independent averages out.",
            status="tested",
        ),
    ),
)
