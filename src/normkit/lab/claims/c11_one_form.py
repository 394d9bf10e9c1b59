"""C11: one form for every norm: centre, scale, affine, each norm with its own sets of elements.

Inside a set that shares its statistics, (y − β)/γ must be the straight line (x − μ)/√(σ² + ε) of x. RMSNorm takes
μ := 0 and the mean square for σ². DyT has no statistic, and its tanh is no line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import batch_norm, dyt, group_norm, instance_norm, layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

N, L, C, GROUPS, EPS = 3, 7, 12, 3, 1e-3
_Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
_Split = Callable[[Tensor], Tensor]


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(N * L, C)


# name → the norm of (N, L, C) with γ and β, and how its elements split into rows that share a statistic.
NORMS: dict[str, tuple[_Norm, _Split]] = {
    "batch": (
        lambda x, w, b: batch_norm(x, None, None, w, b, training=True, eps=EPS),
        lambda x: x.reshape(N * L, C).T,
    ),
    "layer": (lambda x, w, b: layer_norm(x, w, b, eps=EPS), _tokens),
    "instance": (lambda x, w, b: instance_norm(x, w, b, eps=EPS), lambda x: x.transpose(1, 2).reshape(N * C, L)),
    "group": (
        lambda x, w, b: group_norm(x, GROUPS, w, b, eps=EPS),
        lambda x: x.unflatten(2, (GROUPS, -1)).transpose(1, 2).reshape(N * GROUPS, -1),
    ),
    "rms": (lambda x, w, b: rms_norm(x, w, b, eps=EPS), _tokens),
    "dyt": (lambda x, w, b: dyt(x, x.new_tensor(0.5), w, b), _tokens),
}
CENTRED = ("batch", "layer", "instance", "group")


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in NORMS]


def composed(x: Tensor, weight: Tensor, bias: Tensor, split: _Split, centred: bool) -> Tensor:
    """Return centre, scale and affine, one after the other, with the statistics of every set of ``split``."""
    rows = split(x)
    mean = rows.mean(1, keepdim=True) if centred else 0.0
    scaled = (rows - mean) / ((rows - mean).square().mean(1, keepdim=True) + EPS).sqrt()
    places = split(torch.arange(x.numel(), device=x.device).view(x.shape))
    back = torch.empty_like(x).view(-1)
    back[places.reshape(-1)] = scaled.reshape(-1)
    return back.view(x.shape) * weight + bias


def _measure(params: Params, bench: Bench) -> Values:
    norm, split = NORMS[params["norm"]]
    device = bench.settings.device
    x = (0.7 + 2 * bench.draws.randn(N, L, C, dtype=torch.float64)).to(device)
    weight, bias = (bench.draws.randn(C, stream=s, dtype=torch.float64).to(device) for s in ("weight", "bias"))
    y = norm(x, weight, bias)
    return {
        key: float((y - composed(x, weight, bias, split, centred)).abs().max())
        for key, centred in (("centred", True), ("uncentred", False))
    }


STUDY = Study(id="one_form", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)


def _same(e: Evidence, role: str, key: str) -> Criterion:
    words = "(x − μ)/√(σ² + ε)·γ + β" if key == "centred" else "the same with μ := 0 and σ² := mean(x²)"
    return Criterion(
        name=f"{role} norm: largest distance from {words}",
        values=e.numbers(role, key),
        kind="at_most",
        target=0.0,
        tolerance=1e-12,
        reason="float64 rounding: sums of at most 28 numbers of order 3, results up to 4 times weights up to 4: "
        "28·u·3·16 = 1.5×10⁻¹³",
        every=True,
    )


def _literal(e: Evidence) -> list[Criterion]:
    return [_same(e, role, "centred") for role in (*CENTRED, "rms")]


def _corrected(e: Evidence) -> list[Criterion]:
    return [*(_same(e, role, "centred") for role in CENTRED), _same(e, "rms", "uncentred")]


def _summary(e: Evidence) -> str:
    most = max(v for role in CENTRED for v in e.numbers(role, "centred"))
    own, other = max(e.numbers("rms", "uncentred")), min(e.numbers("rms", "centred"))
    return (
        f"four norms with μ and σ² are the form to {number(most, 1)}; RMSNorm is {number(other, 2)} off it, and "
        f"{number(own, 1)} off the form with μ := 0"
    )


def _figures(e: Evidence) -> list[Chart]:
    roles = (*CENTRED, "rms", "other")
    names = (*CENTRED, "RMS", "DyT")
    least = 1e-17  # where an exact zero is drawn

    def points(label: str, key: str) -> Series:
        return Series(label, range(6), [max(least, *e.numbers(role, key)) for role in roles], kind="points")

    return [
        Chart(
            caption="Largest distance of a norm from centre, scale and affine composed by hand, with the set's mean "
            "and variance or with μ := 0 and the mean square.",
            alt="With mean and variance, batch, layer, instance and group norm lie at rounding and RMS norm at order "
            "1; with μ := 0 it is the other way round; DyT lies at order 1 both times.",
            panels=[
                Panel(
                    "one form",
                    "norm",
                    "largest distance",
                    [points("mean and variance", "centred"), points("μ := 0, mean square", "uncentred")],
                    y_scale="log",
                    x_names=names,
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C11",
        title="One form for every norm",
        sentence="However many norms there are, all can be written in one form: subtract the mean, divide by the "
        "standard deviation, then a learnable affine map; (x − μ)/√(σ² + ε)·γ + β.",
        sentences=(10,),
        source="Article, “One form for all”.",
        measured=f"normkit's batch (training), layer, instance, group, RMS norm and DyT on ({N}, {L}, {C}) normal "
        "numbers of mean .7 in float64, ε = 10⁻³, random γ and β, against the three steps written out for each set.",
        study=STUDY,
        plays={**{name: name for name in (*CENTRED, "rms")}, "other": "dyt"},
        literal=Rule(
            text="All five, RMSNorm included, are the three steps with the mean and variance of their sets, to 10⁻¹².",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="Batch, layer, instance and group norm are; RMSNorm is with μ := 0 and the mean square in place of "
            "the variance.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="True of the four norms of the article's table. RMSNorm, which the article goes on to, fits only "
        "with μ := 0 and σ² := mean(x²), and what replaces norms by tanh (DyT) does not fit at all.",
        control=Control(
            text="DyT in RMSNorm's place: no statistic, no line, no fit.",
            plays={**{name: name for name in CENTRED}, "rms": "dyt", "other": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The form says that a norm is a straight line inside each set, with a slope and an offset that the "
            "set's own elements decide.",
            status="tested",
        ),
    ),
)
