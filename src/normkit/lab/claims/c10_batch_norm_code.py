"""C10: the article's batch norm: which variance normalises, which one is remembered, and what momentum weighs.

Every arm is the same formula with one choice made differently, run beside torch's own layer on the same batches. The
batches are small, n = 10 numbers a channel, so that n/(n − 1) = 1.11 is not mistaken for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import BatchNorm

N, L, C, STEPS = 2, 5, 12, 6
EPS, MOMENTUM = 1e-5, 0.1
COUNT = N * L


@dataclass
class Formula:
    """Batch norm of (N, L, C) as the article writes it, each choice a switch.

    Args:
        normalise: n − this many divide the variance that normalises.
        remember: the same of the variance that is remembered.
        newest: the weight of the newest batch in the running statistics.
    """

    normalise: int = 0
    remember: int = 1
    newest: float = MOMENTUM

    def __post_init__(self) -> None:
        self.mean, self.var = torch.zeros(C, dtype=torch.float64), torch.ones(C, dtype=torch.float64)

    def train(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise with the batch's statistics and remember them."""
        mean, var = x.mean((0, 1)), x.var((0, 1), correction=self.normalise)
        keep = 1 - self.newest
        self.mean = keep * self.mean.to(x.device) + self.newest * mean.detach()
        self.var = keep * self.var.to(x.device) + self.newest * x.detach().var((0, 1), correction=self.remember)
        return (x - mean) / (var + EPS).sqrt() * weight + bias

    def infer(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise with what was remembered."""
        return (x - self.mean) / (self.var + EPS).sqrt() * weight + bias


class Module:
    """A library's layer under the same two calls; ``across`` puts the channels where it wants them."""

    def __init__(self, layer: nn.Module, across: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.across = layer, across

    @property
    def mean(self) -> Tensor:
        """The running mean."""
        return self.layer.get_buffer("running_mean")

    @property
    def var(self) -> Tensor:
        """The running variance."""
        return self.layer.get_buffer("running_var")

    def _call(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.get_parameter("weight").copy_(weight)
            self.layer.get_parameter("bias").copy_(bias)
        return self.across(self.layer(self.across(x)))

    def train(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """One training call."""
        self.layer.train()
        return self._call(x, weight, bias)

    def infer(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """One call for inference."""
        self.layer.eval()
        return self._call(x, weight, bias)


def _torch() -> Module:
    layer = nn.BatchNorm1d(C, eps=EPS, momentum=MOMENTUM, dtype=torch.float64)
    return Module(layer, lambda x: x.transpose(1, 2))


def _normkit() -> Module:
    return Module(BatchNorm(C, EPS, momentum=MOMENTUM, dtype=torch.float64), lambda x: x)


CODES: Mapping[str, Callable[[], Formula | Module]] = {
    "article": Formula,
    "normkit": _normkit,
    "remembers-biased": lambda: Formula(remember=0),
    "normalises-unbiased": lambda: Formula(normalise=1),
    "momentum-of-the-old": lambda: Formula(newest=1 - MOMENTUM),
}
KEYS: tuple[str, ...] = ("output", "gradient", "running_mean", "running_var", "inference")


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"code": name}) for name in CODES]


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def _step(
    code: Formula | Module, x: Tensor, parameters: tuple[Tensor, Tensor], cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = code.train(leaf, *parameters)
    (dx,) = torch.autograd.grad(y, leaf, cotangent)
    return y.detach(), dx


def _measure(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    code, reference = CODES[params["code"]](), _torch()
    for side in (code, reference):
        if isinstance(side, Module):
            side.layer.to(device)
    x = 3 + 2 * bench.draws.randn(STEPS + 1, N, L, C, dtype=torch.float64).to(device)
    cotangents = bench.draws.randn(STEPS, N, L, C, stream="cotangents", dtype=torch.float64).to(device)
    weight, bias = (bench.draws.randn(C, stream=s, dtype=torch.float64).to(device) for s in ("weight", "bias"))
    off = dict.fromkeys(KEYS, 0.0)
    ratios: list[float] = []
    for batch, cotangent in zip(x[:STEPS], cotangents, strict=True):
        before = code.var.to(device).clone()
        (y, dx), (want, want_dx) = (_step(side, batch, (weight, bias), cotangent) for side in (code, reference))
        moved = (code.var - 0.9 * before) / 0.1  # what was put in, if a tenth of it was
        ratios.append(float((moved / batch.var((0, 1), correction=0)).mean()))
        pairs: dict[str, tuple[Tensor, Tensor]] = {
            "output": (y, want),
            "gradient": (dx, want_dx),
            "running_mean": (code.mean, reference.mean),
            "running_var": (code.var, reference.var),
        }
        off |= {key: max(off[key], _apart(*pair)) for key, pair in pairs.items()}
    last = (side.infer(x[STEPS], weight, bias) for side in (code, reference))
    return off | {"inference": _apart(*last), "ratios": ratios, "ratio": max(ratios, key=lambda r: abs(r - 1))}


STUDY = Study(id="batch_norm_code", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)

_EXACT_REASON = (
    "float64 rounding: sums of 10 numbers near 5 and divisions by a deviation rarely below .5, weights up to 3: "
    "10·u·5²·3/.5² = 3×10⁻¹³ in the worst column"
)


def _criteria(e: Evidence) -> list[Criterion]:
    words = {
        "output": "training output",
        "gradient": "gradient of the input",
        "running_mean": "running mean",
        "running_var": "running variance",
        "inference": "output in inference",
    }
    same = [
        Criterion(
            name=f"{role}: {words[key]} against nn.BatchNorm1d, largest distance over {STEPS} steps",
            values=e.numbers(role, key),
            kind="at_most",
            target=0.0,
            tolerance=1e-12,
            reason=_EXACT_REASON,
            every=True,
        )
        for role in ("code", "ours")
        for key in KEYS
    ]
    ratio = Criterion(
        name="the variance that is remembered over the biased variance of the batch",
        values=e.numbers("code", "ratio"),
        kind="near",
        target=COUNT / (COUNT - 1),
        tolerance=1e-11,
        reason="n/(n − 1) to float64 rounding; undoing the average multiplies it by 1/.1",
        every=True,
    )
    return [*same, ratio]


def _summary(e: Evidence) -> str:
    off = max(v for role in ("code", "ours") for key in KEYS for v in e.numbers(role, key))
    return (
        f"the article's code and normkit's stay within {number(off, 1)} of nn.BatchNorm1d over {STEPS} steps; it "
        f"remembers {number(e.first('code', 'ratio'), 3)} × the biased variance at n = {COUNT}"
    )


def _figures(e: Evidence) -> list[Chart]:
    steps = list(range(1, STEPS + 1))
    shown = {"code": "the article", "biased": "biased"}
    series = [Series(words, steps, e.first(role, "ratios")) for role, words in shown.items()]
    law = Series("n/(n − 1)", steps, [COUNT / (COUNT - 1)] * STEPS, kind="reference")
    return [
        Chart(
            caption=f"What enters the running variance at each step, over the batch's biased variance (mean over {C} "
            "channels, first seed).",
            alt=f"The article's code lies on n/(n − 1) = {COUNT / (COUNT - 1):.2f} at every step; the variant that "
            "remembers the biased variance lies at 1.",
            panels=[Panel("what is remembered", "training step", "ratio of variances", [*series, law])],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C10",
        title="The article's BatchNorm is PyTorch's",
        sentence="The article's BatchNorm over (N, L) normalises with the biased variance and, by PyTorch's "
        "convention, puts the unbiased one into running_var, both running statistics with a momentum of 0.1.",
        sentences=(21,),
        source="Article, “The limits of BatchNorm”, its code; Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 2.",
        measured=f"The formula and normkit.BatchNorm beside nn.BatchNorm1d in float64 on {STEPS} batches of {N}·{L} "
        f"tokens with {C} channels, mean 3 and deviation 2, random weight and bias: outputs, input gradients and "
        "running statistics after each step, then the output in inference.",
        study=STUDY,
        plays={"code": "article", "ours": "normkit", "biased": "remembers-biased"},
        literal=Rule(
            text="Outputs, gradients and running statistics of both agree with nn.BatchNorm1d to 10⁻¹², and what the "
            f"article remembers is n/(n − 1) = {COUNT / (COUNT - 1):.3f} times the variance it normalises with.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="The same formula remembering the biased variance: it must not agree.",
            plays={"code": "remembers-biased", "ours": "normkit", "biased": "article"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Training normalises the sample at hand, which its own biased variance does exactly; inference needs "
            "the variance of the population, which the biased one underestimates by (n − 1)/n. PyTorch's momentum "
            "weighs the newest batch, not the past.",
            status="tested",
        ),
    ),
)
