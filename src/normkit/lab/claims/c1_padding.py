"""C1: what zero-padding does to a batch norm's statistics: an exact law, with and without a mean.

With p the real fraction of positions, zeros added to numbers of mean μ and variance v give
mean′ = p·μ and var′ = p·v + p(1 − p)·μ². The article's toy has μ = 0, where the first half of its sentence
cannot be seen; the study also pads numbers of mean 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from normkit.functional import moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

N, L, C = 4, 16, 8  # the article's
MEANS = (0, 2)
PADS = (0, 4, 16, 48)  # positions added to each sequence; 16 doubles it, as the article does
DOUBLED = PADS.index(L)
REAL = [L / (L + pad) for pad in PADS]


def _arms(settings: Settings) -> list[Arm]:
    return [Arm("padded", {"masked": False}), Arm("masked", {"masked": True})]


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _measure(params: Params, bench: Bench) -> Values:
    values: Values = {}
    for mu in MEANS:
        x = (bench.draws.randn(N, L, C, dtype=torch.float64) + mu).to(bench.settings.device)
        real = moments(x, axes=(0, 1))
        mean, var = real.mean + real.remainder, real.variance()
        rows: dict[str, list[float]] = {"mean": [], "var": [], "law": [], "pull": [], "ratio": []}
        for pad, p in zip(PADS, REAL, strict=True):
            padded = torch.cat([x, x.new_zeros(N, pad, C)], dim=1)
            mask = (torch.arange(L + pad, device=x.device) < L)[:, None]  # broadcasts to (N, L, C)
            seen = moments(padded, axes=(0, 1), mask=mask if params["masked"] else None)
            got_mean, got_var = seen.mean + seen.remainder, seen.variance()
            off_mean = (got_mean - p * mean).abs().max()
            off_var = (got_var - (p * var + p * (1 - p) * mean**2)).abs().max()
            rows["mean"].append(float(got_mean.mean()))
            rows["var"].append(float(got_var.mean()))
            rows["law"].append(float(torch.maximum(off_mean, off_var)))
            rows["pull"].append(_rms((got_mean - mean) / (var / (N * L)).sqrt()))
            rows["ratio"].append(float((got_var / var).mean()))
        values |= {f"{key}/mean-{mu}": row for key, row in rows.items()}
    return values


STUDY = Study(id="padding", arms=_arms, measure=_measure, seconds=lambda params: 0.003, seeds=3)

_EXACT = 1e-12
_EXACT_REASON = (
    "float64 rounding: m·u·(σ² + μ²) with m = 256 numbers a statistic, u = 1.1×10⁻¹⁶ and σ² + μ² near 5 is "
    "1.4×10⁻¹³, times 7 for the several sums compared"
)


def _column(e: Evidence, role: str, key: str, mu: int, index: int) -> list[float]:
    return [float(row[index]) for row in e.values(role, f"{key}/mean-{mu}")]


def _largest(e: Evidence, role: str, key: str) -> list[float]:
    rows = [e.values(role, f"{key}/mean-{mu}") for mu in MEANS]
    return [max(v for row in pair for v in row) for pair in zip(*rows, strict=True)]


def _moved(e: Evidence) -> list[float]:
    """Return, per seed, the largest relative change of a variance that is taken under a mask."""
    rows = [e.values("cure", f"ratio/mean-{mu}") for mu in MEANS]
    return [max(abs(ratio - 1) for row in pair for ratio in row) for pair in zip(*rows, strict=True)]


def _law(e: Evidence) -> Criterion:
    return Criterion(
        name="distance of mean and variance from p·μ and p·v + p(1 − p)·μ², both means, all padding ratios",
        values=_largest(e, "batch", "law"),
        kind="at_most",
        target=0.0,
        tolerance=_EXACT,
        reason=_EXACT_REASON,
        every=True,
    )


def _pull(e: Evidence, mu: int) -> Criterion:
    return Criterion(
        name=f"μ = {mu}: shift of the mean on doubling, in standard errors of a mean over 64 positions",
        values=_column(e, "batch", "pull", mu, DOUBLED),
        kind="above",
        target=0.0,
        tolerance=2.0,
        reason="two standard errors: what can be told from sampling noise by looking at one batch",
        every=True,
    )


def _enters(e: Evidence) -> list[Criterion]:
    return [
        _law(e),
        Criterion(
            name="μ = 0: share of the variance lost at three quarters padding",
            values=[1 - r for r in _column(e, "batch", "ratio", 0, -1)],
            kind="above",
            target=0.0,
            tolerance=math.sqrt(2 / (N * L - 1)),
            reason="the sampling error of a variance over 64 positions, √(2/63): drift must exceed that noise",
            every=True,
        ),
        _pull(e, 2),
        Criterion(
            name="with a mask: relative change of the variance, all padding ratios",
            values=_moved(e),
            kind="at_most",
            target=0.0,
            tolerance=_EXACT,
            reason=_EXACT_REASON,
            every=True,
        ),
    ]


def _halved(e: Evidence) -> list[Criterion]:
    return [
        *(_pull(e, mu) for mu in MEANS),
        *(
            Criterion(
                name=f"μ = {mu}: variance after doubling over variance before",
                values=_column(e, "batch", "ratio", mu, DOUBLED),
                kind="near",
                target=0.5,
                tolerance=0.05,
                reason="the batch's own mean adds a quarter of its square, at most .012 for 64 positions "
                "and 8 channels at μ = 0, doubled, and doubled again for halving",
                every=True,
            )
            for mu in MEANS
        ),
    ]


def _halved_corrected(e: Evidence) -> list[Criterion]:
    return [_law(e), _pull(e, 2)]


def _summary_enters(e: Evidence) -> str:
    first, last = (estimate(_column(e, "batch", "var", 0, i)) for i in (0, -1))
    return (
        f"μ = 0: variance {first} unpadded, {last} at {100 * (1 - REAL[-1]):.0f} % padding; off the law by at most "
        f"{number(max(_largest(e, 'batch', 'law')), 1)}"
    )


def _summary_halved(e: Evidence) -> str:
    def mean(key: str, mu: int, digits: int) -> str:
        return number(interval(_column(e, "batch", key, mu, DOUBLED)).mean, digits)

    ratios = ", ".join(f"× {mean('ratio', mu, 3)} at mean {mu}" for mu in MEANS)
    pulls = " and ".join(mean("pull", mu, 2) for mu in MEANS)
    return f"doubled by zeros: variance {ratios}; mean moved by {pulls} standard errors"


def _figures(e: Evidence) -> Sequence[Chart]:
    fine = [i / 50 for i in range(46)]

    def panel(mu: int, key: str) -> Panel:
        mean, var = (interval(_column(e, "batch", k, mu, 0)).mean for k in ("mean", "var"))
        law = [(1 - q) * mean if key == "mean" else (1 - q) * var + q * (1 - q) * mean**2 for q in fine]
        x = [1 - p for p in REAL]
        return Panel(
            f"{'mean' if key == 'mean' else 'variance'}, data of mean {mu}",
            "share of padding",
            "mean" if key == "mean" else "variance",
            [
                replace(band("padded", x, e.values("batch", f"{key}/mean-{mu}")), kind="points"),
                band("masked", x, e.values("cure", f"{key}/mean-{mu}")),
                Series("law", fine, law, kind="reference"),
            ],
        )

    return [
        Chart(
            caption="Batch statistics (average over channels) as zeros are appended. Dashed: the law, "
            "from the unpadded batches (mean over channels and seeds). Bars and bands: min–max over seeds.",
            alt="For data of mean 0 the padded variance falls in a straight line; for mean 2 it first "
            "rises by half, then falls, while the mean falls linearly. Masked statistics stay level "
            "throughout.",
            panels=[panel(mu, key) for mu in MEANS for key in ("mean", "var")],
        )
    ]


_CONTROL = "The roles are swapped: masked statistics are judged as if they were padded ones, and do not follow the law."

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C1",
        title="Padding enters batch statistics",
        sentence="Values at padded positions enter the batch's mean and variance, which then drift with "
        "the share of padding.",
        sentences=(15,),
        source="Article, “The limits of BatchNorm”, first point.",
        measured=f"Per-channel mean and variance over (N, L) of {N} × {L} × {C} numbers of mean 0 and of "
        "mean 2, in float64, with 0, 20, 50 and 75 % of the positions zero padding; the same with a mask.",
        study=STUDY,
        plays={"batch": "padded", "cure": "masked"},
        literal=Rule(
            text="mean′ = p·μ and var′ = p·v + p(1 − p)·μ² to 10⁻¹²; the drift exceeds a batch's sampling "
            "noise; a mask removes it to 10⁻¹².",
            origin="theory",
            criteria=_enters,
        ),
        control=Control(text=_CONTROL, plays={"batch": "masked", "cure": "padded"}),
        summary=_summary_enters,
        figures=_figures,
        explanation=Explanation(
            text="A padded zero is one more number in the average: it scales the mean by the real share "
            "and adds the spread between zero and the mean to the variance. Leaving it out of the sums "
            "restores both.",
            status="tested",
        ),
    ),
    Claim(
        id="C1b",
        title="Zeros halve the variance",
        sentence="Doubling a batch's length with zeros pulls its mean towards 0 and halves its variance.",
        sentences=(22,),
        source="Article, “The limits of BatchNorm”, second code block.",
        measured="The same study at the article's doubling (p = ½): the ratio of variances and the shift "
        f"of the mean in units of the standard error σ/√{N * L}, for data of mean 0 (the article's) and of "
        "mean 2.",
        study=STUDY,
        plays={"batch": "padded", "cure": "masked"},
        literal=Rule(
            text="At both means the mean moves by more than two standard errors and the variance falls to "
            "0.5 ± 0.05 of itself.",
            origin="sentence",
            criteria=_halved,
        ),
        corrected=Rule(
            text="mean′ = p·μ and var′ = p·v + p(1 − p)·μ² to 10⁻¹² at both means, and at μ = 2 the mean "
            "moves by more than two standard errors.",
            origin="theory",
            criteria=_halved_corrected,
        ),
        correction="Each half is right for one kind of data. At mean 0, the article's toy, the variance "
        "halves but there is no mean to pull: what moves is sampling noise. At mean 2 the mean halves "
        "visibly, and the variance grows by half. In general var′ = p·v + p(1 − p)·μ².",
        control=Control(
            text="Masked statistics in the same judgement: they neither halve nor follow the law.",
            plays={"batch": "masked", "cure": "padded"},
        ),
        summary=_summary_halved,
        figures=_figures,
        explanation=Explanation(
            text="Zeros far from the mean spread the numbers: p(1 − p)·μ² outweighs the loss (1 − p)·v once μ² > v/p.",
            status="tested",
        ),
    ),
)
