"""L4: Gemma's 1 + w beside w: one function, two parametrizations.

Exactly the same function of x: γ = 1 + w. What differs is what is stored, rounded and decayed. A bfloat16 number near
1 is off by up to 2⁻⁸; a small w is off by 2⁻⁹ of its own size. Weight decay λ pulls γ towards 0 in one form and
towards 1 in the other: for a loss ½(γ − g)² the minimum lies at g/(1 + λ) and at (g + λ)/(1 + λ).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.conventions import GEMMA, MUSE_SPARK, TORCH_RMS_NORM
from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval
from normkit.modules import RMSNorm

WIDTH, ROWS, EPS = 65536, 32, 1e-6
SPREAD = 0.02  # standard deviation of γ around 1, as a trained norm may have
DECAY, RATE, STEPS = 1.0, 0.4, 80
TARGETS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SPECS = {"plain": TORCH_RMS_NORM, "one-plus": GEMMA, "one-plus-rounded": MUSE_SPARK}
_NAMES = {"plain": "w", "one-plus": "1 + w in float32", "one-plus-rounded": "1 + w in bfloat16"}


def storage_error(spread: float) -> tuple[float, float]:
    """Return the rms rounding error of γ and of γ − 1 in bfloat16, γ ~ N(1, spread²), 2⁻⁷ ≪ spread ≪ ½.

    An error is uniform over one spacing, so its mean square is spacing²/12: 2⁻⁷ above 1, 2⁻⁸ below, and for w the
    spacing 2^(k−7) of its octave [2^k, 2^(k+1)).
    """
    near_one = math.sqrt((2.0**-14 + 2.0**-16) / 2 / 12)

    def below(v: float) -> float:
        return math.erf(v / (spread * math.sqrt(2)))  # probability of |w| < v

    octaves = range(-60, 2)
    square = sum(4.0 ** (k - 7) / 12 * (below(2.0 ** (k + 1)) - below(2.0**k)) for k in octaves)
    return near_one, math.sqrt(square)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"form": name}) for name in SPECS]


def _stored(form: str, gain: Tensor) -> Tensor:
    return gain if form == "plain" else gain - 1


def _trained(form: str, decay: float, device: str) -> list[float]:
    """Return the gains after gradient descent with weight decay on ½ Σ(γ_j − g_j)², in float64."""
    width = len(TARGETS)
    norm = RMSNorm(width, eps=0.0, spec=SPECS[form], device=device, dtype=torch.float64)
    x = torch.ones(1, width, dtype=torch.float64, device=device)  # its norm is itself, so that y is the gain
    target = torch.tensor(TARGETS, dtype=torch.float64, device=device)
    optimizer = torch.optim.SGD(norm.parameters(), lr=RATE, weight_decay=decay)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * (norm(x) - target).square().sum()).backward()
        optimizer.step()
    return norm(x)[0].tolist()


def _measure(params: Params, bench: Bench) -> Values:
    form, device = params["form"], bench.settings.device
    spec = SPECS[form]
    gain = 1 + SPREAD * bench.draws.randn(WIDTH, stream="gain", dtype=torch.float64).to(device)
    x = bench.draws.randn(ROWS, 512, dtype=torch.float64).to(device)
    part = gain[:512]
    exact = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * part
    y = rms_norm(x, _stored(form, part), eps=EPS, spec=spec)
    ones = torch.ones(1, WIDTH, device=device)  # float32, and its norm is itself: the output shows the gain alone
    shown = rms_norm(ones, _stored(form, gain).bfloat16(), eps=0.0, spec=spec)[0].double()
    large = torch.full((4,), 15.8125, dtype=torch.bfloat16, device=device)  # a bfloat16; 16.8125 lies between two
    values: Values = {
        "function": float((y - exact).abs().max()),
        "storage": float((shown - gain).square().mean().sqrt()),
        "sum of 1 and 15.8125": float(rms_norm(ones[:, :4], large, eps=0.0, spec=spec)[0, 0]),
        "decayed": _trained(form, DECAY, device),
        "undecayed": _trained(form, 0.0, device),
    }
    return values


STUDY = Study(id="one_plus_weight", arms=_arms, measure=_measure, seconds=lambda params: 0.15, seeds=3)

_DECAYED = {
    "plain": [g / (1 + DECAY) for g in TARGETS],
    "one-plus": [(g + DECAY) / (1 + DECAY) for g in TARGETS],
}
_EXACT_REASON = "float64: a mean of 512 squares is good to 10⁻¹³ by any order, outputs up to 5; twice that"
_TRAINED_REASON = (
    "each of 80 steps leaves 0.6 of the distance to the minimum or less, 10⁻¹⁷ in the end; float64 rounding"
)


def _same_function(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"largest distance from γ·x/√(mean x² + ε) in float64, {_NAMES[role]}",
            values=e.numbers(role, "function"),
            kind="at_most",
            target=0.0,
            tolerance=1e-12,
            reason=_EXACT_REASON,
            every=True,
        )
        for role in ("plain", "one-plus")
    ]


def _ratios(e: Evidence) -> list[float]:
    pairs = zip(e.numbers("plain", "storage"), e.numbers("one-plus", "storage"), strict=True)
    return [a / b for a, b in pairs]


def _distance(e: Evidence, role: str, key: str, law: list[float]) -> list[float]:
    return [max(abs(a - b) for a, b in zip(row, law, strict=True)) for row in e.values(role, key)]


def _literal(e: Evidence) -> list[Criterion]:
    apart = [
        max(abs(a - b) for a, b in zip(p, q, strict=True))
        for p, q in zip(e.values("plain", "decayed"), e.values("one-plus", "decayed"), strict=True)
    ]
    return [
        *_same_function(e),
        Criterion(
            name=f"largest difference of the gains after training with weight decay {DECAY:g}",
            values=apart,
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason=_TRAINED_REASON,
            every=True,
        ),
    ]


def _corrected(e: Evidence) -> list[Criterion]:
    near_one, small = storage_error(SPREAD)
    decayed = [
        Criterion(
            name=f"distance of the decayed gain from {law}, {_NAMES[role]}",
            values=_distance(e, role, "decayed", _DECAYED[role]),
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason=_TRAINED_REASON,
            every=True,
        )
        for role, law in {"plain": "g/(1 + λ)", "one-plus": "(g + λ)/(1 + λ)"}.items()
    ]
    undecayed = [
        Criterion(
            name=f"distance of the gain from g without decay, {_NAMES[role]}",
            values=_distance(e, role, "undecayed", list(TARGETS)),
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason=_TRAINED_REASON,
            every=True,
        )
        for role in ("plain", "one-plus")
    ]
    return [
        *_same_function(e),
        *decayed,
        *undecayed,
        Criterion(
            name="rms error of a bfloat16 w around 1 over that of a bfloat16 w around 0",
            values=_ratios(e),
            kind="near",
            target=near_one / small,
            tolerance=0.04 * near_one / small,
            reason=f"theory for γ ~ N(1, {SPREAD}²); over {WIDTH} weights each error is good to .4 %, and every seed "
            "is judged: five times that, twice",
            every=True,
        ),
        Criterion(
            name="rms error of the gain, 1 + w added in bfloat16",
            values=e.numbers("one-plus-rounded", "storage"),
            kind="near",
            target=near_one,
            tolerance=0.04 * near_one,
            reason="as of a stored gain near 1; the same sampling error",
            every=True,
        ),
        Criterion(
            name="1 + 15.8125 added in bfloat16",
            values=e.numbers("one-plus-rounded", "sum of 1 and 15.8125"),
            kind="near",
            target=16.75,
            tolerance=0.0,
            reason="exact: 16.8125 lies halfway between 16.75 and 16.875, and 16.75 is even",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    at = TARGETS.index(1.0)
    gains = [number(e.first(role, "decayed")[at], 2) for role in ("plain", "one-plus")]
    return (
        f"same function to {number(max(e.numbers('one-plus', 'function')), 1)}; a bfloat16 w is off by "
        f"{number(interval(_ratios(e)).mean, 3)} × as much as in 1 + w; a gain of 1 decays to {gains[0]} and {gains[1]}"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(SPECS)))
    errors = [interval(e.numbers(role, "storage")).mean for role in SPECS]
    lines = [
        Series(words, TARGETS, e.first(role, "decayed")) for role, words in {"plain": "w", "one-plus": "1 + w"}.items()
    ]
    wanted = Series("the gain the loss wants", TARGETS, TARGETS, kind="reference")
    return [
        Chart(
            caption=f"Left: rms error of the gain when γ ~ N(1, {SPREAD}²) is stored in bfloat16, by form. Right: the "
            "gain at which training with weight decay ends, against the gain that the loss alone wants.",
            alt=f"Stored as w the error is {number(errors[0], 2)}; stored around zero and added in float32 "
            f"{number(errors[1], 2)}; added in bfloat16 as large as for w. With decay the line of w is half the wanted "
            "gain; the line of 1 + w lies halfway between the wanted gain and one.",
            panels=[
                Panel(
                    "storage in bfloat16",
                    "form of the weight",
                    "rms error of the gain",
                    [Series("", positions, errors, kind="bars")],
                    y_scale="log",
                    x_names=[_NAMES[role] for role in SPECS],
                ),
                Panel(
                    f"weight decay, λ = {DECAY:g}", "gain the loss wants, g", "gain after training", [*lines, wanted]
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L4",
        title="1 + w and w are equivalent",
        sentence="Gemma's RMSNorm multiplies by 1 + w with w starting at 0 instead of by w starting at 1, which is "
        "mathematically equivalent.",
        sentences=(33,),
        source="Article, RMSNorm, “Engineering details”, last point; the two forms as in google/gemma_pytorch and "
        "PyTorch.",
        measured=f"rms_norm in float64 with γ as w and as 1 + w; the gain that {WIDTH} weights γ ~ N(1, {SPREAD}²), "
        "stored in bfloat16, come to in float32, in both forms and with 1 + w added in bfloat16; and the gains after "
        f"{STEPS} steps of gradient descent on ½(γ − g)², g from {TARGETS[0]:g} to {TARGETS[-1]:g}, with weight decay "
        f"{DECAY:g} and without.",
        study=STUDY,
        plays={name: name for name in SPECS},
        literal=Rule(
            text="The two forms compute the same function (10⁻¹² in float64), and trained alike, with weight decay, "
            "they come to the same gains.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="The same function; without decay the same gains. With decay λ the forms end at g/(1 + λ) and "
            "(g + λ)/(1 + λ), and in bfloat16 the form around 1 has the larger storage error by the ratio that the "
            "spacing of bfloat16 numbers gives, also when 1 is added in bfloat16.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="Equivalent as functions, and not as parameters: weight decay draws w towards a gain of 0 and 1 + w "
        "towards a gain of 1, and a bfloat16 w around 0 keeps fifty times more of a gain near 1, if 1 is added in "
        "float32. Added in bfloat16, that is lost again.",
        control=Control(
            text="The two forms change places: the limits of decay must not fit.",
            plays={"plain": "one-plus", "one-plus": "plain", "one-plus-rounded": "one-plus-rounded"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Floating-point numbers are dense around 0, and decay means a pull towards 0: both distinguish a "
            "weight that rests at 0 from one that rests at 1.",
            status="tested",
        ),
    ),
)
