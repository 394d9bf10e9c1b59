"""R3: the article's RMSNorm beside nn.RMSNorm, with ε aligned and with each one's default.

On a row of root mean square s the output has length 1/√(1 + ε/s²), in units of √d. So an ε that is not written down
can be read off a small row: ε = s²·(1/length² − 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

SHAPE, EPS = (4, 16, 768), 1e-6
SCALES = tuple(10.0**k for k in range(-4, 3))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATOL, RTOL = 1e-6, 1e-5  # the article's assertion: atol as given, rtol by torch.allclose's default
PROBE = 1e-3  # rms of the rows an ε is read off; its square equals the article's ε


class ArticleRMSNorm(nn.Module):
    """The article's class, statement by statement."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square in float32, weight, cast back."""
        dtype = x.dtype
        x = x.float()
        rms = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (x / rms * self.weight).to(dtype)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm("aligned", {"aligned": True}), Arm("defaults", {"aligned": False})]


def _pair(width: int, aligned: bool, device: str) -> tuple[ArticleRMSNorm, nn.RMSNorm]:
    """Return the article's class and torch's, with the same ε or each with its own."""
    if aligned:
        return ArticleRMSNorm(width, EPS).to(device), nn.RMSNorm(width, EPS).to(device)
    return ArticleRMSNorm(width).to(device), nn.RMSNorm(width).to(device)


def _excess(a: Tensor, b: Tensor) -> float:
    """Return the largest |a − b| as a multiple of what torch.allclose would let pass."""
    return float(((a - b).abs() / (ATOL + RTOL * b.abs())).max())


def _epsilon(norm: nn.Module, x: Tensor) -> float:
    """Return the ε that ``norm`` acts with, from the length of its output on small rows x."""
    mean_square = x.double().square().mean(-1)
    length = (norm(x).double() * x.double()).mean(-1) / mean_square.sqrt()
    return float((mean_square * (1 / length.square() - 1)).mean())


def _measure(params: Params, bench: Bench) -> Values:
    device, width = bench.settings.device, SHAPE[-1]
    x = bench.draws.randn(*SHAPE).to(device)
    weight = bench.draws.randn(width, stream="weight").to(device)
    values: Values = {}
    with torch.no_grad():
        ours, torchs = _pair(width, params["aligned"], device)
        for norm in (ours, torchs):
            norm.weight.copy_(weight)
        values["excess"] = [_excess(ours(s * x), torchs(s * x)) for s in SCALES]
        values["normkit"] = max(_excess(rms_norm(s * x, weight, eps=EPS), ours(s * x)) for s in SCALES)
        for name, dtype in DTYPES.items():
            rows = (PROBE * x).to(dtype)
            for who, norm in zip(("article", "torch"), _pair(width, params["aligned"], device), strict=True):
                values[f"epsilon/{who}/{name}"] = _epsilon(norm.to(dtype), rows)
    return values


STUDY = Study(id="article_rmsnorm", arms=_arms, measure=_measure, seconds=lambda params: 0.03, seeds=3)


def _worst(e: Evidence, role: str) -> list[float]:
    return [max(row) for row in e.values(role, "excess")]


def _distance(e: Evidence, role: str) -> list[float]:
    pairs = zip(e.numbers(role, "epsilon/torch/float32"), e.numbers(role, "epsilon/article/float32"), strict=True)
    return [abs(math.log(torchs / ours)) for torchs, ours in pairs]


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="largest difference with ε aligned, as a multiple of 10⁻⁶ + 10⁻⁵·|y|, rows of rms 10⁻⁴ … 10²",
            values=_worst(e, "aligned"),
            kind="at_most",
            target=0.0,
            tolerance=1.0,
            reason="what the article's torch.allclose(atol=1e-6) lets pass; six float32 roundings are 4×10⁻⁷ of |y|",
            every=True,
        ),
        Criterion(
            name="distance of the two default ε, |ln(ratio)|, float32",
            values=_distance(e, "defaults"),
            kind="above",
            target=0.0,
            tolerance=math.log(1.5),
            reason="an ε read off a float32 row is good to 10⁻³; two constants that differ by less than half are not "
            "“different defaults”",
            every=True,
        ),
        Criterion(
            name="distance of the two ε when aligned, |ln(ratio)|, float32",
            values=_distance(e, "aligned"),
            kind="at_most",
            target=0.0,
            tolerance=0.01,
            reason="lengths near √½ are good to 10⁻⁶ in float32, an ε read off them to 10⁻⁵; ample",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    ours = number(e.first("defaults", "epsilon/article/float32"), 3)
    torchs = [number(e.first("defaults", f"epsilon/torch/{name}"), 2) for name in DTYPES]
    return (
        f"aligned: {number(max(_worst(e, 'aligned')), 2)} of what allclose lets pass; default ε {ours} against "
        f"{', '.join(torchs)} ({', '.join(DTYPES)})"
    )


def _figures(e: Evidence) -> list[Chart]:
    lines = [
        Series(words, SCALES, [max(v, 1e-4) for v in e.first(role, "excess")])
        for role, words in {"aligned": "ε = 10⁻⁶ in both", "defaults": "each its default"}.items()
    ]
    limit = Series("allclose fails above", SCALES, [1.0] * len(SCALES), kind="reference")
    return [
        Chart(
            caption="Largest difference between the article's RMSNorm and nn.RMSNorm, as a multiple of what "
            "torch.allclose(atol=1e-6) lets pass, against the size of the rows (first seed, random weights).",
            alt="With ε aligned the difference stays far below one at every scale. With the defaults it passes one "
            "between rms 1 and 0.1 and reaches tens of thousands at 10⁻⁴.",
            panels=[
                Panel(
                    "the article's class against nn.RMSNorm",
                    "root mean square of a row",
                    "difference / allowed difference",
                    [*lines, limit],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="R3",
        title="The article's RMSNorm is nn.RMSNorm",
        sentence="The article's RMSNorm agrees with nn.RMSNorm to 10⁻⁶ when ε is set in both; their defaults differ.",
        sentences=(34,),
        source="Article, RMSNorm, “Implementation”.",
        measured=f"Both classes in float32 on {SHAPE} normal numbers times 10⁻⁴ … 10², with the same random weights, "
        "with ε = 10⁻⁶ in both and with their defaults; and the ε each acts with, read off the length of its output "
        f"on rows of rms {PROBE:g}, also in bfloat16 and float16.",
        study=STUDY,
        plays={"aligned": "aligned", "defaults": "defaults"},
        literal=Rule(
            text="With ε aligned torch.allclose(atol=1e-6) holds at every scale, and the ε read off both is the same; "
            "the default ε differ by more than half.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="Defaults and aligned ε change places: what is not aligned must not agree.",
            plays={"aligned": "defaults", "defaults": "aligned"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="nn.RMSNorm's default, eps=None, is the float32 epsilon 2⁻²³ in whatever dtype the input comes, as "
            "its statistics are taken in float32. On rows of unit size neither ε is visible, which is why a test on "
            "normal numbers passes without aligning anything.",
            status="tested",
        ),
    ),
)
