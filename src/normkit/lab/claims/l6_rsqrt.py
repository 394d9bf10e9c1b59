"""L6: the accuracy of 1/√v, of rsqrt, and of the bit trick, over every float32 in [1, 4).

A factor of 4 in v halves the result exactly, so that [1, 4), all 2²⁴ numbers of it, stands for every normal number.
Errors are relative, in units of u = 2⁻²⁴. IEEE arithmetic rounds once for √ and once for the division, each off by u
at most: 2u together. The bit trick subtracts half the bits of v from a constant, which reads as a rough 1/√v;
a Newton step y·(1.5 − .5·v·y²) turns a relative error e into −1.5e² − .5e³.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

U = 2.0**-24
_FIRST, _LAST = 0x3F800000, 0x40800000  # the bits of 1 and 4
_CHUNK = 1 << 20
MAGIC = 0x5F3759DF
NEWTON_STEPS = (0, 1, 2, 3)
ARMS = ("rsqrt", "divide", *(f"newton-{n}" for n in NEWTON_STEPS))
_NAMES = {"rsqrt": "rsqrt", "divide": "1/√v", **{f"newton-{n}": f"bit trick, {n} Newton" for n in NEWTON_STEPS}}


def bit_trick(v: Tensor, steps: int) -> Tensor:
    """Return 1/√v from the bits of v and ``steps`` Newton steps, in float32."""
    y = (MAGIC - (v.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(steps):
        y = y * (1.5 - 0.5 * v * y * y)
    return y


def _inverse_root(v: Tensor, arm: str) -> Tensor:
    if arm == "rsqrt":
        return torch.rsqrt(v)
    if arm == "divide":
        return 1 / torch.sqrt(v)
    return bit_trick(v, int(arm.removeprefix("newton-")))


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"arm": name}) for name in ARMS]


def _measure(params: Params, bench: Bench) -> Values:
    largest, total, right = 0.0, 0.0, 0
    for first in range(_FIRST, _LAST, _CHUNK):
        bits = torch.arange(first, first + _CHUNK, dtype=torch.int32, device=bench.settings.device)
        v = bits.view(torch.float32)
        found, truth = _inverse_root(v, params["arm"]), 1 / v.double().sqrt()
        error = ((found.double() - truth) / truth).abs()
        largest = max(largest, float(error.max()))
        total += float(error.sum())
        right += int((found == truth.float()).sum())
    count = _LAST - _FIRST
    return {"largest": largest / U, "mean": total / count / U, "correctly rounded": right / count}


STUDY = Study(id="rsqrt", arms=_arms, measure=_measure, seconds=lambda params: 0.4, seeds=1)

_MARGIN_REASON = (
    "a quarter of the error: less than that drowns in the rounding of the multiplication that follows, 1u of its own"
)
_TWO_ULP_REASON = (
    "two roundings of u each; twice that for square roots that vector libraries round less strictly, and for the "
    "two units that graphics processors document"
)


def _literal(e: Evidence) -> list[Criterion]:
    ratio = [a / b for a, b in zip(e.numbers("rsqrt", "largest"), e.numbers("divide", "largest"), strict=True)]
    return [
        Criterion(
            name="largest error of rsqrt over that of 1/√v",
            values=ratio,
            kind="below",
            target=1.0,
            tolerance=0.25,
            reason=_MARGIN_REASON,
            every=True,
        )
    ]


def newton(e: float) -> float:
    """Return the size of the relative error that a Newton step makes of ``e``, the bit trick's errors being of −|e|."""
    return abs(-1.5 * e * e + 0.5 * e * e * e)


def _corrected(e: Evidence) -> list[Criterion]:
    accurate = [
        Criterion(
            name=f"largest error of {_NAMES[role]}, in u = 2⁻²⁴",
            values=e.numbers(role, "largest"),
            kind="at_most",
            target=0.0,
            tolerance=4.0,
            reason=_TWO_ULP_REASON,
            every=True,
        )
        for role in ("rsqrt", "divide")
    ]
    steps = [
        Criterion(
            name=f"largest error after {n} Newton steps over 1.5e² of the one before",
            values=[
                U * after / newton(U * before)
                for before, after in zip(
                    e.numbers(f"newton-{n - 1}", "largest"), e.numbers(f"newton-{n}", "largest"), strict=True
                )
            ],
            kind="near",
            target=1.0,
            tolerance=0.1,
            reason="exact arithmetic gives 1 where the largest error is negative, 1 + |e| where it is positive, |e| "
            "= .034; four float32 roundings add 4u, .05 of the second step's error",
            every=True,
        )
        for n in (1, 2)
    ]
    return [
        *accurate,
        *steps,
        Criterion(
            name="largest error of the bit trick after one Newton step, in u = 2⁻²⁴",
            values=e.numbers("newton-1", "largest"),
            kind="above",
            target=2.0**14,
            tolerance=2.0**12,
            reason="theory says 1.5·.034² = 29000u; 2¹⁴u = 2⁻¹⁰ is already what float16 resolves. A quarter of it",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    rsqrt, divide = (number(e.first(role, "largest"), 3) for role in ("rsqrt", "divide"))
    tricks = ", ".join(number(U * e.first(f"newton-{n}", "largest"), 2) for n in (0, 1, 2))
    return (
        f"largest error: rsqrt {rsqrt}u, 1/√v {divide}u (u = 2⁻²⁴, all of [1, 4)); bit trick with 0, 1, 2 Newton "
        f"steps {tricks}"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(ARMS)))
    largest = [U * e.first(role, "largest") for role in ARMS]
    mean = [U * e.first(role, "mean") for role in ARMS]
    return [
        Chart(
            caption="Relative error of an inverse square root over all float32 numbers in [1, 4). Dashed: u = 2⁻²⁴. "
            "Trick +n: the bit trick with n Newton steps.",
            alt="rsqrt and 1/√v stand side by side at a few times 10⁻⁸. The bit trick starts at "
            f"{number(largest[2], 2)} and squares its error with each Newton step until it reaches them after three.",
            panels=[
                Panel(
                    "accuracy of 1/√v in float32",
                    "method",
                    "relative error",
                    [
                        Series("largest", positions, largest, kind="bars"),
                        Series("mean", positions, mean, kind="points"),
                        Series("u", positions, [U] * len(positions), kind="reference"),
                    ],
                    y_scale="log",
                    x_names=["rsqrt", "1/√v", *(f"trick +{n}" for n in NEWTON_STEPS)],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L6",
        title="rsqrt is numerically more stable",
        sentence="Take rsqrt instead of a square root and a division: it is usually a single instruction, faster and "
        "numerically more stable.",
        sentences=(31,),
        source="Article, RMSNorm, “Engineering details”, second point. Its own code divides by a square root. Speed is "
        "a matter of the hardware's instruction and is not judged here.",
        measured="torch.rsqrt, 1 / torch.sqrt, and the bit trick with 0 to 3 Newton steps, of every float32 in [1, 4), "
        "against float64.",
        study=STUDY,
        plays={name: name for name in ARMS},
        literal=Rule(
            text="The largest error of rsqrt is smaller than that of 1/√v by a quarter or more.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="Neither is better by a quarter, and both are within 4u. A fast inverse root of the kind that gives "
            "up accuracy does so visibly: the bit trick with one Newton step is off by more than float16 resolves, and "
            "each step takes an error e to 1.5e².",
            origin="theory",
            criteria=_corrected,
        ),
        correction="Where rsqrt is computed to float32 accuracy it is as good as a root and a division, not better. "
        "Where it is a fast approximation it is worse, and needs Newton steps to come back. The reason to take it is "
        "speed.",
        control=Control(
            text="The bit trick with one Newton step in rsqrt's place: an inaccurate one must not pass.",
            plays={**{name: name for name in ARMS}, "rsqrt": "newton-1", "newton-1": "rsqrt"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="v is a mean of squares plus ε, a positive number far from the ends of the range: its inverse root "
            "is well conditioned whichever way it is taken, and a rounding or two is all that can go wrong.",
            status="conjecture",
        ),
    ),
)
