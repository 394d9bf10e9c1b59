"""X3: does LayerNorm help by its backward, or by its forward?

With g = γ ⊙ dy, the gradient through LayerNorm is (g − mean(g) − x̂·mean(g ⊙ x̂))/σ. The second term is there because μ
depends on x, the third because σ does; together they project g off 1 and off x̂. Hold μ or σ constant in the backward
pass alone, and a term is gone while every forward value stays. Holding both leaves g/σ: LayerNorm without projection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normkit.functional import layer_norm, moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.training import Schedule, train_model
from normkit.lab.model.transformer import TransformerConfig, build, put_norms
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

LAYERS, WIDTH, STEPS, ROWS, EPS = 4, 64, 100, 4, 1e-5
RATES = (1e-3, 3e-3, 1e-2)
HELD = {"both": "mean, scale", "scale": "scale", "mean": "mean"}
LABELS = {
    "none": "no norm",
    "layer": "LayerNorm",
    "both": "μ and σ held",
    "scale": "σ held",
    "mean": "μ held",
}


class HeldStatistics(nn.Module):
    """LayerNorm whose μ, or σ, or both are constants to the backward; forward values are LayerNorm's.

    Args:
        width: size of the last dimension, which statistics run over.
        held: ``"mean"``, ``"scale"``, ``"mean, scale"``.
    """

    def __init__(self, width: int, held: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.held = held.split(", ")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, width)."""
        found = moments(x, axes=-1)
        mean, variance = found.mean + found.remainder, found.m2 / found.count
        mean = mean.detach() if "mean" in self.held else mean
        variance = variance.detach() if "scale" in self.held else variance
        return (x - mean[..., None]) * torch.rsqrt(variance[..., None] + EPS) * self.weight + self.bias


class Plain(nn.Module):
    """LayerNorm by normkit's own operator, or, with ``norm`` false, its γ and β alone."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x (…, width)."""
        return layer_norm(x, self.weight, self.bias, eps=EPS) if self.norm else x * self.weight + self.bias


def norm_of(kind: str, width: int) -> nn.Module:
    """Return the norm of an arm: a key of `LABELS`."""
    return HeldStatistics(width, HELD[kind]) if kind in HELD else Plain(width, kind == "layer")


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(f"{kind}/lr-{lr:g}", {"kind": kind, "lr": lr}) for kind in LABELS for lr in RATES]


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    network = build(TransformerConfig(layers=LAYERS, width=WIDTH), bench.draws)
    model = put_norms(network, lambda width: norm_of(params["kind"], width))
    schedule = Schedule(params["lr"], steps=STEPS, rows=ROWS)
    run = train_model(model, schedule, bench.corpus, bench.draws, bench.settings.device)
    return {"heldout": run.heldout, "outcome": run.outcome, "margin": run.plateau.margin}


STUDY = Study(
    id="detached_statistics",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 1.5,
    seeds=5,
    corpus=True,
    full_only=True,
)


def best_rate(e: Evidence, role: str) -> float:
    """Return the learning rate of the lowest mean held-out loss; a rate at which a seed diverged never wins."""
    paths = {f"{role}/lr-{lr:g}": lr for lr in RATES}
    return paths[e.lowest(list(paths), "heldout")]


def best(e: Evidence, role: str) -> list[float]:
    """Return the held-out losses at `best_rate`, seed by seed."""
    return e.numbers(f"{role}/lr-{best_rate(e, role):g}", "heldout")


def gain(e: Evidence, role: str) -> list[float]:
    """Return by how much a role ends below no norm, seed by seed, each at its best rate."""
    return [none - loss for none, loss in zip(best(e, "none"), best(e, role), strict=True)]


def share(e: Evidence, role: str) -> list[float]:
    """Return the share of LayerNorm's gain that a role keeps, seed by seed: 1 is all of it, 0 none."""
    pairs = zip(gain(e, role), gain(e, "layer"), strict=True)
    return [kept / whole if whole else math.nan for kept, whole in pairs]


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="held-out loss, no norm minus LayerNorm, each at its best rate, paired (nats/byte)",
            values=gain(e, "layer"),
            kind="above",
            target=0.0,
            tolerance=float(e.first(f"layer/lr-{RATES[0]:g}", "margin")),
            reason="there must be a benefit to explain: a tenth of what the previous byte tells about a byte",
        ),
        Criterion(
            name="share of that gain which is kept with μ and σ constant in the backward pass",
            values=share(e, "detached"),
            kind="at_most",
            target=0.5,
            tolerance=0.125,
            reason="doubled, the line lies halfway between the half that is asked for and what no effect leaves, 1",
        ),
    ]


def _summary(e: Evidence) -> str:
    kept = ", ".join(
        f"{label} {estimate(share(e, role))}" for role, label in (("detached", "both"), ("scale", "σ"), ("mean", "μ"))
    )
    return f"LayerNorm gains {estimate(gain(e, 'layer'))} nats/byte; share kept with statistics held: {kept}"


def _figures(e: Evidence) -> list[Chart]:
    roles = ("none", "layer", "mean", "scale", "detached")
    names = [f"{LABELS[e.arm(role)]}, lr {best_rate(e, role):g}" for role in roles]
    found = [interval(best(e, role)) for role in roles]
    told = "; ".join(f"{name}: {estimate(best(e, role))}" for name, role in zip(names, roles, strict=True))
    bars = Series(
        "held-out loss",
        list(range(len(roles))),
        [f.mean for f in found],
        [f.low for f in found],
        [f.high for f in found],
        kind="points",
    )
    lines: list[Series] = []
    for role in roles:
        means = [math.fsum(v) / len(v) for v in (e.numbers(f"{role}/lr-{lr:g}", "heldout") for lr in RATES)]
        if all(map(math.isfinite, means)):
            lines.append(Series(LABELS[e.arm(role)], list(RATES), means))
    return [
        Chart(
            caption=f"Held-out loss after {STEPS} steps. Left: each norm at its best rate, whiskers the 95 % interval. "
            "Right: means over the seeds at every rate, for norms that never diverged.",
            alt=f"Points with whiskers. {told}.",
            panels=[
                Panel("at the best rate", "norm", "held-out loss (nats/byte)", [bars], x_names=names),
                Panel("over the grid", "learning rate", "held-out loss (nats/byte)", lines, x_scale="log"),
            ],
        )
    ]


_PLAYS = {"none": "none", "layer": "layer", "detached": "both", "scale": "scale", "mean": "mean"}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="X3",
        title="The gradient's projection as a cause",
        sentence="LayerNorm's gradient subtracts components because mean and variance depend on the input, and that is "
        "one of the reasons why it steadies training.",
        sentences=(),
        source="Article, LayerNorm, “Properties”; Xu et al. 2019, arXiv 1911.07013, who find the backward terms of "
        "mean and variance to matter more than the forward normalization.",
        measured=f"Pre-Norm networks of {LAYERS} blocks (width {WIDTH}, SwiGLU, RoPE, Xavier), the same weights and "
        f"batches under each norm: none (γ and β alone), LayerNorm, and LayerNorm with μ, σ or both constant in the "
        f"backward pass, its forward values unchanged. {STEPS} steps of {ROWS} × {CONTEXT} bytes of real text, Adam, "
        f"each norm at the best of {len(RATES)} rates ({RATES[0]:g} to {RATES[-1]:g}) by its mean held-out loss. What "
        "is judged is the share of LayerNorm's gain over no norm that is left without the terms.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text="LayerNorm ends below no norm, and of that gain at most half is kept once μ and σ are constant in the "
            "backward pass: at least half goes with the projection.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="Nothing held: LayerNorm itself in the place of the norm without projection. Its gain must stay.",
            plays={**_PLAYS, "detached": "layer"},
        ),
        planted=Control(
            text="No norm in the place of the norm without projection: as if all of the gain went with it.",
            plays={**_PLAYS, "detached": "none"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Two things make up the gain: forward values of a fixed scale, without which a stream of this depth "
            "grows until training hardly moves, and the projection of gradients. Held statistics leave the first and "
            "take the second, so what they keep is the forward's share and what they lack is the projection's.",
            status="tested",
        ),
    ),
)
