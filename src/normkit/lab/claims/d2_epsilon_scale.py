"""D2: what ε does to LayerNorm: it saves the division by zero, and with it scale invariance ends at small scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normkit.conventions import TORCH_LAYER_NORM
from normkit.functional import normalize
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.spec import NormSpec

ROWS, WIDTH = 16, 512
EPSILONS = (1e-5, 1e-6)  # the two the article names
ALPHAS = tuple(10.0**k for k in (3, 2, 1, 0, -1, -2, -3, -4))
_OUTSIDE = NormSpec(centered=True, eps="outside")


def law(eps: float, deviation: float) -> float:
    """Return how much shorter ε inside the root makes the output: 1/√(1 + ε/σ²)."""
    return 1 / math.sqrt(1 + eps / deviation**2)


def _arms(settings: Settings) -> list[Arm]:
    inside = [Arm(f"inside/{eps:g}", {"spec": "inside", "eps": eps}) for eps in EPSILONS]
    outside = [Arm(f"outside/{eps:g}", {"spec": "outside", "eps": eps}) for eps in EPSILONS]
    return [*inside, *outside, Arm("none", {"spec": "inside", "eps": 0.0})]


def _measure(params: Params, bench: Bench) -> Values:
    spec = TORCH_LAYER_NORM if params["spec"] == "inside" else _OUTSIDE
    eps = float(params["eps"])
    x = bench.draws.randn(ROWS, WIDTH, dtype=torch.float64).to(bench.settings.device)
    exact = normalize(x, TORCH_LAYER_NORM, eps=0.0)
    sigma = x.var(-1, correction=0, keepdim=True).sqrt()
    lengths: list[float] = []
    off_law, change = 0.0, 0.0
    for alpha in ALPHAS:
        y = normalize(alpha * x, spec, eps=eps)
        factor = (y * exact).mean(-1, keepdim=True)  # ‖exact‖² is the width
        lengths.append(float(factor.mean()))
        expected = 1 / (1 + eps / (alpha * sigma) ** 2).sqrt()
        off_law = max(off_law, float(((y - expected * exact) / expected).abs().max()))
        change = max(change, float((y - normalize(x, spec, eps=eps)).abs().max()))
    flat = normalize(torch.full_like(x, 3.0), spec, eps=eps)
    return {
        "lengths": lengths,
        "off_law": off_law,
        "change": change,
        "flat_finite": float(flat.isfinite().double().mean()),
        "flat_size": float(flat.nan_to_num(nan=math.inf).abs().max()) if bool(flat.isfinite().all()) else None,
    }


STUDY = Study(id="epsilon_scale", arms=_arms, measure=_measure, seconds=lambda params: 0.005, seeds=3)

_ROUNDING = 1e-12
_ROUNDING_REASON = (
    "float64 rounding: 512·u = 6×10⁻¹⁴ bounds the error of each sum, outputs reach 4, and two results are "
    "compared; doubled"
)


def _eps_paths(role: str) -> list[str]:
    return [f"{role}/{eps:g}" for eps in EPSILONS]


def _invariant(e: Evidence, paths: Sequence[str], words: str) -> list[Criterion]:
    return [
        Criterion(
            name=f"{words}: largest change of the output for α = 10⁻⁴ … 10³",
            values=e.numbers(path, "change"),
            kind="at_most",
            target=0.0,
            tolerance=_ROUNDING,
            reason=_ROUNDING_REASON,
            every=True,
        )
        for path in paths
    ]


def _scale_literal(e: Evidence) -> list[Criterion]:
    return [
        criterion
        for path, eps in zip(_eps_paths("norm"), EPSILONS, strict=True)
        for criterion in _invariant(e, [path], f"ε = {number(eps)}")
    ]


def _scale_corrected(e: Evidence) -> list[Criterion]:
    laws = [
        Criterion(
            name=f"ε = {number(eps)}: relative distance of LN(αx) from x̂/√(1 + ε/(ασ)²), α = 10⁻⁴ … 10³",
            values=e.numbers(path, "off_law"),
            kind="at_most",
            target=0.0,
            tolerance=_ROUNDING,
            reason=_ROUNDING_REASON,
            every=True,
        )
        for path, eps in zip(_eps_paths("norm"), EPSILONS, strict=True)
    ]
    return [*laws, *_invariant(e, ["exact"], "ε = 0")]


def _zero(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"ε = {number(eps)}: share of finite outputs on constant rows",
            values=e.numbers(path, "flat_finite"),
            kind="at_least",
            target=1.0,
            tolerance=0.0,
            reason="exact: one NaN is one too many",
            every=True,
        )
        for path, eps in zip(_guard_paths(e), EPSILONS, strict=True)
    ]


def _guard_paths(e: Evidence) -> list[str]:
    """Return the paths of the guarded arms; the control's one arm without ε stands in for both."""
    return ["guard", "guard"] if e.arm("guard") == "none" else _eps_paths("guard")


def _at(e: Evidence, eps: float, alpha: float) -> float:
    return float(e.first(f"norm/{eps:g}", "lengths")[ALPHAS.index(alpha)])


def _scale_summary(e: Evidence) -> str:
    off = max(v for path in _eps_paths("norm") for v in e.numbers(path, "off_law"))
    eps = EPSILONS[0]
    return (
        f"ε = {number(eps)}: output at σ = 10⁻³ shortened to {number(_at(e, eps, 1e-3), 3)}; "
        f"off 1/√(1 + ε/σ²) by at most {number(off, 1)}"
    )


def _zero_summary(e: Evidence) -> str:
    guarded = 100 * min(v for path in _guard_paths(e) for v in e.numbers(path, "flat_finite"))
    bare = 100 * max(e.numbers("bare", "flat_finite"))
    return f"constant rows: {guarded:.0f} % of the outputs are finite with either ε, {bare:.0f} % with ε = 0"


def _figures(e: Evidence) -> list[Chart]:
    fine = [10 ** (-4 + 7 * i / 60) for i in range(61)]
    named = {eps: number(eps) for eps in EPSILONS}
    series = [
        Series(f"ε = {words}", ALPHAS, e.first(f"norm/{eps:g}", "lengths"), kind="points")
        for eps, words in named.items()
    ]
    laws = [
        Series("" if i else "1/√(1 + ε/σ²)", fine, [law(eps, a) for a in fine], kind="reference")
        for i, eps in enumerate(EPSILONS)  # one label for both: they end at the same point
    ]
    exact = Series("ε = 0", ALPHAS, e.first("exact", "lengths"), kind="points")
    return [
        Chart(
            caption="Length of LayerNorm's output, in units of √d, against the scale of its input (first "
            "seed; dashed: the law).",
            alt="Level at 1 down to a scale of 0.1; below, the curve for 10⁻⁵ falls to "
            f"{_at(e, 1e-5, 1e-3):.2f} and the one for 10⁻⁶ to {_at(e, 1e-6, 1e-3):.2f} at a scale of 0.001. Without ε "
            f"the points stay at {e.first('exact', 'lengths')[-1]:.2f}.",
            panels=[
                Panel(
                    "what ε does at small scales",
                    "standard deviation of the input",
                    "‖y‖ / √d",
                    [*series, exact, *laws],
                    x_scale="log",
                )
            ],
        )
    ]


def _zero_figures(e: Evidence) -> list[Chart]:
    shares = [*(e.first(path, "flat_finite") for path in _guard_paths(e)), e.first("bare", "flat_finite")]
    bars = Series("", [0, 1, 2], [100 * s for s in shares], kind="bars")
    names = [*(number(eps) for eps in EPSILONS), "0"]
    panel = Panel("constant rows", "ε", "finite outputs (%)", [bars], x_names=names)
    return [
        Chart(
            caption="Share of finite outputs on rows whose variance is zero.",
            alt="Finite outputs: " + ", ".join(f"{s:.0%} with ε = {n}" for s, n in zip(shares, names, strict=True)),
            panels=[panel],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D2",
        title="ε ends scale invariance",
        sentence="LN(αx) = LN(x) for α > 0: scaling the input does not change the result.",
        sentences=(25,),
        source="Article, LayerNorm, “Properties”.",
        measured=f"LayerNorm of α·x in float64 for {ROWS} rows of {WIDTH} normal numbers, α = 10⁻⁴ … 10³, "
        "with ε = 10⁻⁵, 10⁻⁶ and 0, compared entry by entry with LN(x), and with x̂/√(1 + ε/(ασ)²).",
        study=STUDY,
        plays={"norm": "inside", "exact": "none"},
        literal=Rule(
            text="With the ε the article uses, LN(αx) = LN(x) to rounding (10⁻¹²) for every α.",
            origin="sentence",
            criteria=_scale_literal,
        ),
        corrected=Rule(
            text="LN(αx) = x̂/√(1 + ε/(ασ)²) to 10⁻¹², and with ε = 0 the sentence holds to 10⁻¹².",
            origin="theory",
            criteria=_scale_corrected,
        ),
        correction="Exact only for ε = 0. With ε inside the root the output shrinks by 1/√(1 + ε/σ²): "
        "nothing to see at σ = 1, but at σ = 10⁻³ a factor 0.30 for ε = 10⁻⁵ and 0.71 for 10⁻⁶. Inputs "
        "that small need a smaller ε.",
        control=Control(
            text="ε added outside the root: neither invariant nor on the same law, so the exact law is no "
            "artefact of a loose test.",
            plays={"norm": "outside", "exact": "none"},
        ),
        summary=_scale_summary,
        figures=_figures,
        explanation=Explanation(
            text="ε is added to a variance that scales with α²: as soon as α²σ² is no longer large beside "
            "ε, it counts.",
            status="tested",
        ),
    ),
    Claim(
        id="D2b",
        title="ε prevents division by zero",
        sentence="The small ε, usually 10⁻⁵ or 10⁻⁶, stands inside the root so that a variance of zero "
        "causes no division by zero.",
        sentences=(12,),
        source="Article, “One form for all”.",
        measured=f"LayerNorm of constant rows ({WIDTH} times the number 3): the share of finite outputs.",
        study=STUDY,
        plays={"guard": "inside", "bare": "none"},
        literal=Rule(
            text="With ε = 10⁻⁵ and 10⁻⁶ every output is finite.",
            origin="sentence",
            criteria=_zero,
        ),
        control=Control(
            text="The same rows with ε = 0: the outputs must not be finite.",
            plays={"guard": "none", "bare": "inside/1e-05"},
        ),
        summary=_zero_summary,
        figures=_zero_figures,
        explanation=Explanation(
            text="A constant row has variance 0 and centred values 0: 0/√ε is 0, 0/0 is not a number.",
            status="tested",
        ),
    ),
)
