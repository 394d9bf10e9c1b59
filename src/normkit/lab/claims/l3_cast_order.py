"""L3: round to bfloat16 and then multiply by the weight, or multiply in float32 and round once.

A rounding to bfloat16 is off by up to half a unit in the last place, 2⁻⁸ of the number's power of two, uniformly.
For a significand m spread log-uniformly over [1, 2) its relative error has the mean square 2⁻¹⁶/3 · E[1/m²] with
E[1/m²] = 3/(8 ln 2). Two independent roundings add up to twice that, √2 in root mean square. The first rounding
moves the second one across a boundary with probability ¼·E[m′]·E[1/m] = 1/(8 ln² 2) for two such significands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.conventions import GEMMA, LLAMA, OLMO2
from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

ROWS, WIDTH, EPS = 256, 1024, 1e-6
SPREADS = (0.0, 0.001, 0.005, 0.02, 0.1, 0.25, 1.0)  # standard deviation of w around 1
HEADLINE = 0.25
SPECS = {"llama": LLAMA, "olmo2": OLMO2, "gemma": GEMMA}

ONE_ROUNDING = 2.0**-8 * math.sqrt(3 / (8 * math.log(2)) / 3)
MISROUNDED = 1 / (8 * math.log(2) ** 2)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"spec": name}) for name in SPECS]


def _exact(x: Tensor, gain: Tensor) -> Tensor:
    """Return the norm of the bfloat16 inputs as they are, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


def _measure(params: Params, bench: Bench) -> Values:
    name, device = params["spec"], bench.settings.device
    # Rows of unit scale would be divided by nearly 1, which maps bfloat16 onto itself and rounds too little.
    octave = torch.rand(ROWS, 1, generator=bench.draws.shared("scale")).exp2()
    x = (octave * bench.draws.randn(ROWS, WIDTH)).bfloat16().to(device)
    spread = bench.draws.randn(WIDTH, stream="weight").to(device)
    values: Values = {}
    for s in SPREADS:
        offset = (s * spread).bfloat16()
        weight = offset if name == "gemma" else (1 + offset.float()).bfloat16()
        gain = 1 + weight.float() if name == "gemma" else weight
        truth = _exact(x, gain)
        y = rms_norm(x, weight, eps=EPS, spec=SPECS[name])
        nonzero = truth != 0
        relative = (y.double() - truth)[nonzero] / truth[nonzero]
        values[f"error/{s}"] = float(relative.square().mean().sqrt())
        values[f"misrounded/{s}"] = float((y != truth.bfloat16()).double().mean())
    return values


STUDY = Study(id="cast_order", arms=_arms, measure=_measure, seconds=lambda params: 0.17, seeds=3)

_N = ROWS * WIDTH
_RATIO_ERROR = math.sqrt(2) / math.sqrt(2 * _N)  # of a ratio of two root mean squares over n roundings each, relative


def _ratios(e: Evidence, spread: float) -> list[float]:
    pairs = zip(e.numbers("twice", f"error/{spread}"), e.numbers("once", f"error/{spread}"), strict=True)
    return [a / b for a, b in pairs]


def _ratio_reason() -> str:
    return (
        "twice: 4 standard errors over 256·1024 roundings, and .006 because 1 % of the weights round to a "
        "power of two, which the second rounding leaves exact"
    )


def _ratio_tolerance() -> float:
    return 2 * (4 * _RATIO_ERROR * math.sqrt(2) + 0.006)


def _literal(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"rms error of cast-then-multiply over multiply-then-cast, w ~ N(1, {HEADLINE}²)",
            values=_ratios(e, HEADLINE),
            kind="near",
            target=1.0,
            tolerance=_ratio_tolerance(),
            reason=_ratio_reason(),
            every=True,
        )
    ]


def _corrected(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"rms error of cast-then-multiply over multiply-then-cast, w ~ N(1, {HEADLINE}²)",
            values=_ratios(e, HEADLINE),
            kind="near",
            target=math.sqrt(2),
            tolerance=_ratio_tolerance(),
            reason=_ratio_reason(),
            every=True,
        ),
        Criterion(
            name="the same ratio with every weight 1",
            values=_ratios(e, 0.0),
            kind="near",
            target=1.0,
            tolerance=0.0,
            reason="exact: multiplying by 1 rounds nothing, both orders give the same bits",
            every=True,
        ),
        Criterion(
            name="rms relative error of multiply-then-cast",
            values=e.numbers("once", f"error/{HEADLINE}"),
            kind="near",
            target=ONE_ROUNDING,
            tolerance=0.02 * ONE_ROUNDING,
            reason="one rounding and nothing else; twice (4 standard errors, .3 % each for errors of wide spread)",
            every=True,
        ),
        Criterion(
            name="share of elements that cast-then-multiply does not round correctly",
            values=e.numbers("twice", f"misrounded/{HEADLINE}"),
            kind="near",
            target=MISROUNDED,
            tolerance=2 * (4 * math.sqrt(MISROUNDED * (1 - MISROUNDED) / _N) + 0.004),
            reason="twice: 4 standard errors, and .004 for weights at powers of two and weights not quite log-uniform",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    first, last = (100 * interval(e.numbers(role, f"misrounded/{HEADLINE}")).mean for role in ("twice", "once"))
    return (
        f"w ~ N(1, {HEADLINE}²): casting first has {number(interval(_ratios(e, HEADLINE)).mean, 3)} × the rms error of "
        f"casting last and misrounds {number(first, 2)} % against {number(last, 1)} %"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(SPREADS)))
    names = [f"{s:g}" for s in SPREADS]
    roles = {"twice": "cast, then multiply (Llama)", "once": "multiply, then cast (OLMo 2)", "gemma": "1 + w (Gemma)"}

    def rows(role: str, key: str, factor: float) -> list[list[float]]:
        columns = [e.numbers(role, f"{key}/{s}") for s in SPREADS]
        return [[factor * v for v in row] for row in zip(*columns, strict=True)]

    def panel(title: str, label: str, key: str, factor: float, laws: dict[str, float]) -> Panel:
        lines = [band(words, positions, rows(role, key, factor)) for role, words in roles.items()]
        references = [Series(name, positions, [y] * len(positions), kind="reference") for name, y in laws.items()]
        return Panel(title, "standard deviation of w around 1", label, [*lines, *references], x_names=names)

    return [
        Chart(
            caption="RMSNorm in bfloat16 against float64, by the spread of the weights. Dashed: one "
            "rounding, √2 times that, and 1/(8 ln² 2). Bands: min–max over seeds.",
            alt="With all weights 1 the orders agree; as the weights spread, casting first rises to the line of "
            "two roundings and a quarter of misrounded elements, casting last stays at one rounding and almost none.",
            panels=[
                panel(
                    "error",
                    "rms relative error (10⁻³)",
                    "error",
                    1e3,
                    {"one rounding": 1e3 * ONE_ROUNDING, "two roundings": 1e3 * math.sqrt(2) * ONE_ROUNDING},
                ),
                panel(
                    "elements not correctly rounded",
                    "share (%)",
                    "misrounded",
                    100,
                    {"theory": 100 * MISROUNDED},
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L3",
        title="Cast back, then multiply",
        sentence="Statistics are taken in float32; bfloat16 activations are converted up for them and cast "
        "back before the element-wise multiplication, so that no error accumulates.",
        sentences=(30,),
        source="Article, RMSNorm, “Engineering details”, first point. The article's own code multiplies "
        "before it casts.",
        measured=f"RMSNorm of {ROWS} rows of {WIDTH} normal numbers, row scales spread over an octave, in "
        "bfloat16 with bfloat16 weights N(1, s²), s = 0 … 1, in the cast orders of Llama (round, then "
        "weight), OLMo 2 (weight in float32, round once) and Gemma (1 + w in float32), against float64 on "
        "the same bits: root mean square of each element's relative error, and the share of elements that "
        "are not the nearest bfloat16.",
        study=STUDY,
        plays={"twice": "llama", "once": "olmo2", "gemma": "gemma"},
        literal=Rule(
            text="Casting back before the multiplication is as good as after it: the two errors are equal.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="Casting last leaves the error of one rounding alone, so float32 statistics do what is "
            "said of them; casting first costs √2 of it and misrounds 1/(8 ln² 2) = 26 % of the elements "
            "once weights spread (s = 0.25), and nothing when every weight is 1.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="Float32 statistics leave no accumulated error. Casting back before the weight rounds "
        "twice, which costs a factor √2 and changes a quarter of the elements; multiply in float32 and "
        "round once, unless a checkpoint was trained the other way.",
        control=Control(
            text="The two orders change places: the loss must become a gain.",
            plays={"twice": "olmo2", "once": "llama", "gemma": "gemma"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Two independent roundings add their mean squares. With every weight 1 the second "
            "rounding has nothing to do, and the orders agree bit for bit.",
            status="tested",
        ),
    ),
)
