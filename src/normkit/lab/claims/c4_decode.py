"""C4: a batch norm in training mode, given the one token of a decoding step, returns its bias and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit.conventions import TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.functional import batch_norm, normalize
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

WIDTH, TOKENS, STRANGERS, EPS = 64, 8, 7, 1e-5
_AXES = {"batch": (0, 1), "layer": (-1,), "rms": (-1,)}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in _AXES]


def _norm(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    spec = TORCH_RMS_NORM if name == "rms" else TORCH_LAYER_NORM
    return normalize(x, spec, weight, bias, axes=_AXES[name], eps=EPS)


def _refuses(train_step: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        train_step(x)
    except ValueError:
        return True
    return False


def _measure(params: Params, bench: Bench) -> Values:
    name, device = params["norm"], bench.settings.device
    weight = bench.draws.randn(WIDTH, stream="weight", dtype=torch.float64).to(device)
    bias = bench.draws.randn(WIDTH, stream="bias", dtype=torch.float64).to(device)
    tokens = bench.draws.randn(TOKENS, 1, 1, WIDTH, dtype=torch.float64).to(device)  # one step each, N = L = 1
    outputs = torch.stack([_norm(name, token, weight, bias) for token in tokens])
    others = [
        bench.draws.randn(STRANGERS, 1, WIDTH, stream=f"strangers-{i}", dtype=torch.float64).to(device) for i in (0, 1)
    ]
    mine = [_norm(name, torch.cat([tokens[0], other]), weight, bias)[0] for other in others]
    one = tokens[0].float()
    return {
        "from_bias": float((outputs - bias).abs().max()),
        "apart": float((outputs[1:] - outputs[0]).abs().max()),
        "strangers": float((mine[0] - mine[1]).abs().max()),
        "normkit_refuses": name == "batch" and _refuses(lambda x: batch_norm(x, None, None, training=True), one),
        "torch_refuses": name == "batch" and _refuses(nn.BatchNorm1d(WIDTH, device=device), one[0]),
    }


STUDY = Study(id="decode", arms=_arms, measure=_measure, seconds=lambda params: 0.003, seeds=3)

_SIZE = "outputs are of order 1; a hundredth is far above rounding (10⁻¹⁵) and far below the spread of "
"normal numbers"


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="statistic over (N, L): distance of the output from the bias, 8 tokens one at a time",
            values=e.numbers("across", "from_bias"),
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason="exact: the mean of one number is that number, and 0·γ + β rounds to β",
            every=True,
        ),
        Criterion(
            name="statistic over C: distance between the outputs of different tokens",
            values=e.numbers("within", "apart"),
            kind="above",
            target=0.0,
            tolerance=0.01,
            reason=_SIZE,
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    off, apart = max(e.numbers("across", "from_bias")), min(e.numbers("within", "apart"))
    return (
        f"a token alone in its step: batch norm is off its bias by {number(off, 2)}; layer norm keeps tokens "
        f"{number(apart, 2)} apart"
    )


def _figures(e: Evidence) -> list[Chart]:
    roles = {"across": "batch norm", "within": "layer norm", "rms": "RMS norm"}

    def panel(title: str, key: str, label: str) -> Panel:
        heights = [max(e.numbers(role, key)) for role in roles]
        bars = Series("", list(range(len(roles))), heights, kind="bars")
        return Panel(title, "norm", label, [bars], x_names=list(roles.values()))

    return [
        Chart(
            caption="Decoding in training mode, largest over channels and seeds. Left: what is left of a "
            "token decoded alone. Right: what other requests in the same step do to it.",
            alt="Left: nothing remains of the token under batch norm, while layer and RMS norm tell tokens "
            "apart. Right: only batch norm's output depends on the other requests.",
            panels=[
                panel("alone (N = L = 1)", "apart", "largest difference between tokens' outputs"),
                panel(f"with {STRANGERS} other requests", "strangers", "largest change when the others change"),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C4",
        title="Decoding has no batch statistics",
        sentence="Autoregressive decoding has no batch statistics to speak of: each step brings one new "
        "token, so the premise of statistics along the batch is gone.",
        sentences=(18,),
        source="Article, “The limits of BatchNorm”, fourth point.",
        measured=f"{TOKENS} tokens of width {WIDTH}, one at a time (N = L = 1), in float64, through the "
        "formula with statistics over (N, L) and over C, with random weight and bias; then one token "
        f"together with two different sets of {STRANGERS} others; and whether normkit.batch_norm and "
        "nn.BatchNorm1d accept a batch of one in training.",
        study=STUDY,
        plays={"across": "batch", "within": "layer", "rms": "rms"},
        literal=Rule(
            text="With statistics over (N, L) every token's output is the bias, exactly; with statistics "
            "over C tokens stay apart.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Layer norm in batch norm's place and the reverse: layer norm's output is not its bias.",
            plays={"across": "layer", "within": "batch", "rms": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A single value equals its own mean and has variance 0: x − μ = 0, and the affine step "
            "returns β. With more requests in the step there are statistics, but they mix strangers' "
            "requests.",
            status="tested",
        ),
    ),
)
