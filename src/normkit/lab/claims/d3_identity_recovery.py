"""D3: can γ and β undo the norm? Per channel, yes; per token, no constant can.

The best γ and β are found in closed form, a least-squares line of x on N(x) for each feature, so that no training
run can be blamed for what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.conventions import TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.functional import normalize
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

TOKENS, UNSEEN, WIDTH = 4096, 2048, 64
NORMS = ("batch", "layer", "rms")


def left_over(centred: bool) -> float:
    """Return the share of variance that the best γ and β leave, for independent normal features.

    With y = N(x) of unit mean square, a feature's line has slope E[s], the mean of the token's own divisor s; what
    is left is 1 − E[s]². s² is χ² with d − 1 (centred) or d degrees of freedom over d, whose root has a known
    mean. To first order it is 3/2d with centring and 1/2d without.
    """
    freedom = WIDTH - 1 if centred else WIDTH
    mean = math.sqrt(2 / WIDTH) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return 1 - mean**2


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in NORMS]


def _recovered(x: Tensor, name: str, fitted_on: int) -> Tensor:
    """Return γ·N(x) + β with the γ and β, one each per feature, that come closest to x on its first tokens."""
    spec = TORCH_RMS_NORM if name == "rms" else TORCH_LAYER_NORM
    y = normalize(x, spec, axes=0 if name == "batch" else -1, eps=0.0)
    y_mean, x_mean = y[:fitted_on].mean(0), x[:fitted_on].mean(0)
    dy, dx = y[:fitted_on] - y_mean, x[:fitted_on] - x_mean
    gamma = (dy * dx).sum(0) / dy.square().sum(0)
    return gamma * (y - y_mean) + x_mean


def _explained(truth: Tensor, guess: Tensor) -> float:
    """Return the squared correlation: the share of ``truth``'s variance that a line through ``guess`` explains."""
    t, g = truth - truth.mean(), guess - guess.mean()
    return float((t * g).sum() ** 2 / (t.square().sum() * g.square().sum()))


def _measure(params: Params, bench: Bench) -> Values:
    name, device = params["norm"], bench.settings.device
    x = bench.draws.randn(TOKENS, WIDTH, dtype=torch.float64).to(device)
    rest = x - _recovered(x, name, fitted_on=TOKENS)
    scale = bench.draws.randn(TOKENS, 1, stream="scale", dtype=torch.float64).to(device).mul(0.5).exp()
    shift = bench.draws.randn(TOKENS, 1, stream="shift", dtype=torch.float64).to(device)
    uneven = scale * x + shift
    back = _recovered(uneven, name, fitted_on=TOKENS - UNSEEN)  # the others show what γ and β know of a new token
    return {
        "residual": float(rest.square().sum() / (x - x.mean(0)).square().sum()),
        "worst": float(rest.abs().max()),
        "shift": _explained(uneven[-UNSEEN:].mean(-1), back[-UNSEEN:].mean(-1)),
        "scale": _explained(uneven[-UNSEEN:].std(-1), back[-UNSEEN:].std(-1)),
    }


STUDY = Study(id="identity_recovery", arms=_arms, measure=_measure, seconds=lambda params: 0.03, seeds=3)

_EXACT_SHARE = 1e-24
_EXACT_REASON = "a relative error of 10⁻¹² squared; 4096-term float64 sums stay below 4096·u = 5×10⁻¹³"
_PER_TOKEN = {"layer": True, "rms": False}


def _exact(e: Evidence, role: str) -> Criterion:
    return Criterion(
        name=f"{role} norm: share of x's variance that the best γ, β leave",
        values=e.numbers(role, "residual"),
        kind="at_most",
        target=0.0,
        tolerance=_EXACT_SHARE,
        reason=_EXACT_REASON,
        every=True,
    )


def _identity_literal(e: Evidence) -> list[Criterion]:
    return [_exact(e, role) for role in NORMS]


def _identity_corrected(e: Evidence) -> list[Criterion]:
    impossible = [
        Criterion(
            name=f"{role} norm: share of x's variance that the best γ, β leave",
            values=e.numbers(role, "residual"),
            kind="near",
            target=left_over(centred),
            tolerance=8 * math.sqrt(2 / TOKENS) * left_over(centred),
            reason="8 standard errors: a token's share is a sum of χ² terms with a relative deviation of at most √2",
            every=True,
        )
        for role, centred in _PER_TOKEN.items()
    ]
    return [_exact(e, "batch"), *impossible]


def _restored_literal(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"share of the tokens' {what} that the best γ, β bring back (squared correlation)",
            values=e.numbers("norm", key),
            kind="at_least",
            target=1.0,
            tolerance=0.1,
            reason="“made up for”: nine tenths of what was erased",
            every=True,
        )
        for key, what in (("shift", "means"), ("scale", "deviations"))
    ]


def _restored_corrected(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"share of the tokens' {what} that the best γ, β bring back (squared correlation)",
            values=e.numbers("norm", key),
            kind="at_most",
            target=0.0,
            tolerance=32 / UNSEEN,
            reason="unrelated numbers show a squared correlation of χ²₁/T over T tokens; half of 32 is four deviations",
            every=True,
        )
        for key, what in (("shift", "means"), ("scale", "deviations"))
    ]


def _identity_summary(e: Evidence) -> str:
    batch, layer = (interval(e.numbers(role, "residual")).mean for role in ("batch", "layer"))
    return (
        f"best γ, β leave {number(batch, 1)} of the variance after batch norm, {number(100 * layer, 3)} % after layer "
        f"norm (theory {number(100 * left_over(True), 3)} %)"
    )


def _restored_summary(e: Evidence) -> str:
    mean, deviation = (number(100 * interval(e.numbers("norm", key)).mean, 2) for key in ("shift", "scale"))
    return f"best γ, β bring back {mean} % of the variance of tokens' means, {deviation} % of that of their deviations"


def _bars(title: str, label: str, role_names: dict[str, str], height: Callable[[str], float]) -> Panel:
    bars = Series("", list(range(len(role_names))), [height(role) for role in role_names], kind="bars")
    return Panel(title, "norm", label, [bars], x_names=list(role_names.values()))


def _identity_figures(e: Evidence) -> list[Chart]:
    panel = _bars(
        "what γ and β cannot restore",
        "variance left (%)",
        {"batch": "batch", "layer": "layer", "rms": "RMS"},
        lambda role: 100 * interval(e.numbers(role, "residual")).mean,
    )
    theory = Series("1 − E[s]²", [0, 1, 2], [0.0, 100 * left_over(True), 100 * left_over(False)], kind="points")
    return [
        Chart(
            caption=f"Share of the input's variance left after the best γ and β, {TOKENS} tokens of width "
            f"{WIDTH}; points: theory.",
            alt=", ".join(f"{interval(e.numbers(role, 'residual')).mean:.2%} left after {role} norm" for role in NORMS)
            + ", each beside its theory.",
            panels=[Panel(panel.title, panel.x_label, panel.y_label, [*panel.series, theory], x_names=panel.x_names)],
        )
    ]


def _restored_figures(e: Evidence) -> list[Chart]:
    names = {"norm": "layer", "uncentred": "RMS", "per_channel": "batch"}

    def panel(title: str, key: str) -> Panel:
        return _bars(title, "brought back (%)", names, lambda role: 100 * interval(e.numbers(role, key)).mean)

    return [
        Chart(
            caption="Share of each token's own mean and deviation that the best γ and β bring back (tokens "
            "whose scale and mean vary).",
            alt="Nothing after layer norm, part of the mean after RMS norm, everything after batch norm.",
            panels=[panel("the tokens' means", "shift"), panel("the tokens' deviations", "scale")],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D3",
        title="γ = σ, β = μ undo the norm",
        sentence="If the identity is the best transformation, the network can learn γ = σ and β = μ.",
        sentences=(11,),
        source="Article, “One form for all”, third point; Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.",
        measured=f"For {TOKENS} random tokens of width {WIDTH} in float64 with ε = 0: the share of their "
        "variance that the least-squares best γ and β per feature leave after batch, layer and RMS norm.",
        study=STUDY,
        plays={name: name for name in NORMS},
        literal=Rule(
            text="After each of the three norms the best γ and β give x back: at most 10⁻²⁴ of its variance is left.",
            origin="sentence",
            criteria=_identity_literal,
        ),
        corrected=Rule(
            text="Batch norm is undone to 10⁻²⁴; layer and RMS norm leave 1 − E[s]² of the variance, s a "
            f"token's own divisor, {left_over(True):.4f} and {left_over(False):.4f} at width {WIDTH}, "
            "within 8 standard errors.",
            origin="theory",
            criteria=_identity_corrected,
        ),
        correction="True of batch norm, for which it was written: its σ and μ belong to a channel, as γ "
        "and β do. Layer and RMS norm divide each token by its own number, and no constant per feature "
        "equals all of them.",
        control=Control(
            text="Batch and layer norm change places: neither the exact recovery nor the theory's remainder may fit.",
            plays={"batch": "layer", "layer": "batch", "rms": "rms"},
        ),
        summary=_identity_summary,
        figures=_identity_figures,
        explanation=Explanation(
            text="γ and β are constants per channel. They can undo what is constant per channel and, of "
            "what varies per token, only its average.",
            status="tested",
        ),
    ),
    Claim(
        id="D3b",
        title="γ, β restore what LayerNorm erased",
        sentence="LayerNorm wipes out the input's shift and scale, and the part wiped out is made up for "
        "by the learnable γ and β.",
        sentences=(26,),
        source="Article, LayerNorm, “Properties”.",
        measured="Tokens with scales from a log-normal and shifts from a normal distribution, normalized "
        f"and mapped back with the γ and β that fit the first {TOKENS - UNSEEN} best: the squared "
        f"correlation, over the {UNSEEN} others, between the means before and after, and between the "
        "deviations.",
        study=STUDY,
        plays={"norm": "layer", "uncentred": "rms", "per_channel": "batch"},
        literal=Rule(
            text="At least nine tenths of the variance of the tokens' means and deviations come back.",
            origin="sentence",
            criteria=_restored_literal,
        ),
        corrected=Rule(
            text="None comes back: the squared correlations are those of unrelated numbers, at most 32/T "
            "over T tokens.",
            origin="theory",
            criteria=_restored_corrected,
        ),
        correction="The shift and scale of a token are erased for good: γ and β are the same for every "
        "token and know nothing of the one at hand. They set the output's scale, they do not restore the "
        "input's.",
        control=Control(
            text="RMSNorm, which does not subtract the mean and so keeps part of it: the finding that "
            "nothing comes back must fail.",
            plays={"norm": "rms", "uncentred": "layer", "per_channel": "batch"},
        ),
        summary=_restored_summary,
        figures=_restored_figures,
        explanation=Explanation(
            text="LN(αx + c·1) = LN(x), so any function of the output, γ and β included, is the same for x "
            "and for αx + c·1.",
            status="tested",
        ),
    ),
)
