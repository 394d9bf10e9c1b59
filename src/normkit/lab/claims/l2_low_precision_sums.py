"""L2: a running sum in half precision stops growing long before its row ends.

A format with p significant bits holds every integer up to 2^p and only even ones above: 2^p + 1 lies halfway and is
rounded to even, back to 2^p. A running sum of ones ends there, at 256 in bfloat16 (p = 8) and at 2048 in float16
(p = 11). A float32 sum of n such numbers is off by n·2⁻²⁴ at most, whatever the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

ROWS, WIDTH, LONGEST = 64, 4096, 4096
LENGTHS = tuple(2**k for k in range(4, 13))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STOPS = {"bfloat16": 2**8, "float16": 2**11}
UNIT = {name: torch.finfo(dtype).eps / 2 for name, dtype in DTYPES.items()}  # the largest relative rounding error


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{where}/{dtype}", {"dtype": dtype, "accumulate": dtype if where == "own" else "float32"})
        for where in ("own", "float32")
        for dtype in DTYPES
    ]


def running_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all partial sums of the rows of x, added from the left with every result rounded to ``dtype``."""
    total, partial = torch.zeros_like(x[:, 0], dtype=dtype), torch.empty_like(x, dtype=dtype)
    for i, column in enumerate(x.to(dtype).unbind(1)):
        total = total + column
        partial[:, i] = total
    return partial


def _measure(params: Params, bench: Bench) -> Values:
    dtype, device = DTYPES[params["dtype"]], bench.settings.device
    accumulate = getattr(torch, params["accumulate"])
    ones = running_sum(torch.ones(1, LONGEST, device=device), accumulate)[0].double()
    x = bench.draws.randn(ROWS, WIDTH).to(device, dtype)
    squares = (x.to(accumulate) * x.to(accumulate)).to(accumulate)
    found, truth = running_sum(squares, accumulate).double(), x.double().square().cumsum(1)
    share = found / truth
    # The norm of a row of ones is a row of ones, and 1/√ of the sum's share where the sum is all there is of it.
    y = rms_norm(torch.ones(1, WIDTH, device=device, dtype=dtype), eps=0.0)
    length = float(y.double().mean()) if accumulate is torch.float32 else float((WIDTH / ones[WIDTH - 1]).sqrt())
    return {
        "stop": float(ones.max()),
        "share": float(share[:, -1].mean()),
        "worst": float((share[:, -1] - 1).abs().max()),
        "least": float((share[:, -1] - 1).abs().min()),
        "shares": [float(share[:, n - 1].mean()) for n in LENGTHS],
        "length of ones": length,
    }


STUDY = Study(id="low_precision_sums", arms=_arms, measure=_measure, seconds=lambda params: 0.15, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    criteria: list[Criterion] = []
    for dtype, stop in STOPS.items():
        criteria += [
            Criterion(
                name=f"largest running sum of {LONGEST} ones, {dtype}",
                values=e.numbers(f"own/{dtype}", "stop"),
                kind="near",
                target=stop,
                tolerance=0.0,
                reason="exact: 2^p + 1 is rounded back to 2^p",
                every=True,
            ),
            Criterion(
                name=f"least relative error of Σx² over {WIDTH} numbers, {dtype}",
                values=e.numbers(f"own/{dtype}", "least"),
                kind="above",
                target=UNIT[dtype],
                tolerance=UNIT[dtype],
                reason="one rounding of the finished sum to the format; an accumulated error must exceed it twice",
                every=True,
            ),
            Criterion(
                name=f"largest relative error of Σx² over {WIDTH} numbers, {dtype} accumulated in float32",
                values=e.numbers(f"float32/{dtype}", "worst"),
                kind="at_most",
                target=0.0,
                tolerance=2 * WIDTH * 2.0**-24,
                reason="n·2⁻²⁴ bounds a float32 sum in any order; squares of the halves add at most one rounding each",
                every=True,
            ),
            Criterion(
                name=f"RMSNorm of {WIDTH} ones, {dtype} with float32 statistics",
                values=e.numbers(f"float32/{dtype}", "length of ones"),
                kind="near",
                target=1.0,
                tolerance=0.0,
                reason="exact: Σ1² = 4096 in float32, 1/√1 = 1",
                every=True,
            ),
        ]
    return criteria


def _summary(e: Evidence) -> str:
    stops = " and ".join(f"{number(e.first(f'own/{d}', 'stop'))} ({d})" for d in DTYPES)
    shares = ", ".join(number(e.first(f"own/{d}", "share"), 2) for d in DTYPES)
    worst = max(v for d in DTYPES for v in e.numbers(f"float32/{d}", "worst"))
    return (
        f"sums of ones stop at {stops}; Σx² of {WIDTH} keeps {shares} of the truth; in float32 it is off by "
        f"{number(worst, 1)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    lines = [band(f"added in {d}", LENGTHS, e.values(f"own/{d}", "shares")) for d in DTYPES]
    wide = [band(f"{d}, added in float32", LENGTHS, e.values(f"float32/{d}", "shares")) for d in DTYPES]
    truth = Series("truth", LENGTHS, [1.0] * len(LENGTHS), kind="reference")
    return [
        Chart(
            caption=f"A running Σx² over normal numbers as a share of the exact sum (mean of {ROWS} rows; bands: "
            "min–max over seeds).",
            alt="Sums in float32 stay at one. The bfloat16 sum leaves it after some hundred numbers and ends near "
            f"{number(e.first('own/bfloat16', 'share'), 2)}, the float16 sum near "
            f"{number(e.first('own/float16', 'share'), 2)}.",
            panels=[
                Panel(
                    "running sum of squares",
                    "numbers added",
                    "sum / exact sum",
                    [*lines, *wide, truth],
                    x_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="L2",
        title="Half-precision sums stop",
        sentence="In bfloat16 and float16 training the statistics are accumulated in float32 and converted back "
        "afterwards, to reduce rounding errors.",
        sentences=(13,),
        source="Article, “One form for all” and RMSNorm, “Engineering details”.",
        measured=f"Running sums, rounded to bfloat16 or float16 after each addition, of {LONGEST} ones and of the "
        f"squares of {WIDTH} normal numbers ({ROWS} rows), against the same sums kept in float32; and normkit's "
        "rms_norm of a row of ones.",
        study=STUDY,
        plays={"own": "own", "float32": "float32"},
        literal=Rule(
            text="A half-precision running sum of ones ends at 2^p, 256 and 2048, and its Σx² is off by more than two "
            "roundings of the format in every row; accumulated in float32 it is off by no more than 2n·2⁻²⁴, and the "
            "norm of ones is ones.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The float32 sums in the place of the half-precision ones: nothing may stop.",
            plays={"own": "float32", "float32": "own"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A sum whose neighbours are 2 apart cannot grow by numbers below 1: it rounds them away, one after "
            "the other. Summed pairwise or in blocks the same formats do better; what cures it is a wider sum.",
            status="tested",
        ),
    ),
)
