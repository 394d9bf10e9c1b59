"""C9: norms whose statistics run over positions let a position read the future.

A decoder may use bytes up to t to predict byte t + 1. Any derivative of y_t with respect to a later x_t' is
information that will be missing when text is generated. In training mode, one channel of m elements that share a
statistic has ∂y_i/∂x_j = (δ_ij − 1/m − x̂_i·x̂_j/m)/σ, σ = √(variance + ε), so the leak between different elements is
known exactly, and is measured here in its own unit, 1/(mσ).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

N, T, C, GROUPS = 2, 8, 6, 2
EPS = 1e-5

# name → the norm of (N, T, C), and how (N, T, C) splits into sets that share a statistic: (sets, m) each.
_NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "batch": (
        lambda x: batch_norm(x, None, None, training=True, eps=EPS),
        lambda x: x.permute(2, 0, 1).reshape(C, N * T),
    ),
    "instance": (
        lambda x: instance_norm(x, eps=EPS),
        lambda x: x.permute(0, 2, 1).reshape(N * C, T),
    ),
    "group": (
        lambda x: group_norm(x, GROUPS, eps=EPS),
        lambda x: x.unflatten(2, (GROUPS, -1)).permute(0, 2, 1, 3).reshape(N * GROUPS, -1),
    ),
    "layer": (lambda x: layer_norm(x, eps=EPS), lambda x: x.reshape(N * T, C)),
    "rms": (lambda x: rms_norm(x, eps=EPS), lambda x: x.reshape(N * T, C)),
}
CROSSING, PER_TOKEN = ("batch", "instance", "group"), ("layer", "rms")


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in _NORMS]


def _measure(params: Params, bench: Bench) -> Values:
    norm, shared = _NORMS[params["norm"]]
    x = bench.draws.randn(N, T, C, dtype=torch.float64).to(bench.settings.device)
    jacobian = torch.autograd.functional.jacobian(norm, x)
    assert isinstance(jacobian, Tensor)
    size = jacobian.abs().amax(dim=(0, 2, 3, 5))  # by position of output and of input
    sigma = (shared(x).var(dim=1, unbiased=False) + EPS).sqrt()
    unit = shared(x).shape[1] * float(sigma.min())  # the set with the least σ leaks at least 1/(mσ)
    future = float(size.triu(1).max())
    return {"future": future, "in units": future * unit, "by position": size.tolist()}


STUDY = Study(id="causality", arms=_arms, measure=_measure, seconds=lambda params: 0.1, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    crossing = [
        Criterion(
            name=f"largest |∂y_t/∂x_t'| over t' > t, {role}, in units of 1/(mσ)",
            values=e.numbers(role, "in units"),
            kind="at_least",
            target=1.0,
            tolerance=1e-9,
            reason="|∂y_t/∂x_t'| = |1 + x̂_t·x̂_t'|/(mσ), and of any three positions two have the same sign: at least "
            "one pair reaches 1; float64 rounding only",
            every=True,
        )
        for role in CROSSING
    ]
    isolated = [
        Criterion(
            name=f"largest |∂y_t/∂x_t'| over t' > t, {role}",
            values=e.numbers(role, "future"),
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason="a statistic of one token holds no other token: exactly zero",
            every=True,
        )
        for role in PER_TOKEN
    ]
    return [*crossing, *isolated]


def _summary(e: Evidence) -> str:
    units = ", ".join(f"{role} {number(min(e.numbers(role, 'in units')), 2)}" for role in CROSSING)
    own = max(v for role in PER_TOKEN for v in e.numbers(role, "future"))
    return f"largest derivative by a later input, times mσ: {units}; layer and RMS norm {number(own, 2)}"


def _figures(e: Evidence) -> list[Chart]:
    middle = T // 2 - 1
    rows = {role: e.first(role, "by position")[middle] for role in (*CROSSING, *PER_TOKEN)}
    return [
        Chart(
            caption=f"How strongly the output at position {middle} depends on the input at every position (largest "
            f"derivative over {N} sequences and {C} channels, first seed). Right of position {middle} lies the future.",
            alt="Batch, instance and group norm have marks above zero at every position; layer norm and RMSNorm only "
            f"at position {middle}.",
            panels=[
                Panel(
                    f"what y at position {middle} reads",
                    "position of the input",
                    "largest |∂y/∂x|",
                    [Series(role, list(range(T)), row) for role, row in rows.items()],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C9",
        title="Statistics over positions read the future",
        sentence="BatchNorm's statistics run over batch and sequence, which text generated token by token does not "
        "have; a Transformer needs a norm that depends on nothing but the single token's own features, LayerNorm.",
        sentences=(18, 20),
        source="Article, “Limits of BatchNorm”; the consequence for causality is ours.",
        measured="The whole Jacobian of normkit's batch_norm (training), instance_norm, group_norm, layer_norm and "
        f"rms_norm on random (N, L, C) = ({N}, {T}, {C}) in float64: its largest entry between an output and a later "
        "position's input.",
        study=STUDY,
        plays={name: name for name in _NORMS},
        literal=Rule(
            text="BatchNorm, InstanceNorm and GroupNorm over (L, C/G) depend on later positions, by at least 1/(mσ) "
            "for some pair, as their derivative demands; LayerNorm and RMSNorm by exactly nothing.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="LayerNorm, whose statistics run over channels alone, stands in for the three: no dependence on the "
            "future may be found.",
            plays={"batch": "layer", "instance": "layer", "group": "layer", "layer": "layer", "rms": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Mean and variance carry every element they cover into every other. A language model scored in "
            "parallel with such a norm sees its own targets through them; only scoring prefix by prefix is honest.",
            status="tested",
        ),
    ),
)
