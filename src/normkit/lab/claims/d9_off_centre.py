"""D9: RMSNorm beside LayerNorm when the initial weights do not average to zero.

Weights N(c, σ²) give every unit the same offset c·Σx beside its own σ-sized part. LayerNorm subtracts it; RMSNorm
divides by it, so the own parts come out small, and smaller again at every further layer. The RMSNorm
paper drew c = 0.2 in a recurrent translator and found no loss; here it is a feed-forward network on bytes of text.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.byte_mlp import BYTES, EMBEDDING, WIDTH, batches, heldout_rows
from normkit.lab.model.training import margin_of
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

CENTRE, LAYERS, STEPS, ROWS = 0.2, 2, 200, 128
RATES = (1e-2, 3e-2, 1e-1)
LABELS = {"none": "no norm", "rms": "RMSNorm", "layer": "LayerNorm"}


def _arms(settings: Settings) -> list[Arm]:
    pairs = [("none", CENTRE), ("rms", CENTRE), ("layer", CENTRE), ("rms", 0.0), ("layer", 0.0)]
    return [
        Arm(f"{norm}/centre-{centre:g}/lr-{lr:g}", {"norm": norm, "centre": centre, "lr": lr})
        for norm, centre in pairs
        for lr in RATES
    ]


def initial(centre: float, draws: Draws) -> list[Tensor]:
    """Return embedding, hidden maps and head: hidden weights N(centre, Xavier's variance), the rest centred."""
    weights = [draws.randn(256, EMBEDDING, stream="embedding")]
    for i, (fan_in, fan_out) in enumerate(pairwise([BYTES * EMBEDDING, *[WIDTH] * LAYERS])):
        std = math.sqrt(2 / (fan_in + fan_out))
        weights.append(centre + std * draws.randn(fan_in, fan_out, stream=f"hidden/{i}"))
    return [*weights, math.sqrt(2 / (WIDTH + 256)) * draws.randn(WIDTH, 256, stream="head")]


def logits(norm: str, weights: list[Tensor], gains: list[Tensor], biases: list[Tensor], rows: Tensor) -> Tensor:
    """Return the logits of the byte after each row: embed, then tanh(norm(x·W)·γ + β) a layer, then the head."""
    x = weights[0][rows].flatten(1)
    for weight, gain, bias in zip(weights[1:-1], gains, biases, strict=True):
        y = x @ weight
        if norm == "layer":
            y = layer_norm(y, gain, bias)
        elif norm == "rms":
            y = rms_norm(y, gain) + bias
        else:
            y = y * gain + bias  # the same parameters without a norm
        x = torch.tanh(y)
    return x @ weights[-1]


def _measure(params: Params, bench: Bench) -> Values:
    corpus, device = bench.corpus, bench.settings.device
    assert corpus is not None
    weights = [w.to(device).requires_grad_() for w in initial(params["centre"], bench.draws)]
    gains = [torch.ones(WIDTH, device=device, requires_grad=True) for _ in range(LAYERS)]
    biases = [torch.zeros(WIDTH, device=device, requires_grad=True) for _ in range(LAYERS)]
    optimizer = torch.optim.Adam([*weights, *gains, *biases], lr=params["lr"], betas=(0.9, 0.98), fused=True)

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(logits(params["norm"], weights, gains, biases, rows[:, :-1]), rows[:, -1])

    for rows in batches(corpus, STEPS, ROWS, bench.draws).to(device):
        optimizer.zero_grad()
        loss_of(rows).backward()
        optimizer.step()
    with torch.no_grad():
        heldout = float(loss_of(heldout_rows(corpus).to(device)))
    return {
        "heldout": heldout if math.isfinite(heldout) else None,
        "margin": margin_of(corpus),
    }


STUDY = Study(
    id="off_centre",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.6,
    seeds=5,
    corpus=True,
    full_only=True,
)


def best(e: Evidence, role: str) -> list[float]:
    """Return the held-out losses, seed by seed, at the learning rate of the lowest mean; diverged runs never win."""
    return e.numbers(e.lowest([f"{role}/lr-{lr:g}" for lr in RATES], "heldout"), "heldout")


def _difference(e: Evidence) -> list[float]:
    return [a - b for a, b in zip(best(e, "rms"), best(e, "layer"), strict=True)]


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="held-out loss, RMSNorm minus LayerNorm, each at its best learning rate, paired (nats/byte)",
            values=_difference(e),
            kind="at_most",
            target=0.0,
            tolerance=float(e.first(f"layer/lr-{RATES[0]:g}", "margin")),
            reason="not worse means: by less than a tenth of what the previous byte tells about a byte in this text",
        )
    ]


def _summary(e: Evidence) -> str:
    told = ", ".join(f"{role} {estimate(best(e, key))}" for role, key in (("RMSNorm", "rms"), ("LayerNorm", "layer")))
    return f"held-out loss at the best rate: {told}; difference {estimate(_difference(e))} nats/byte"


def _figures(e: Evidence) -> list[Chart]:
    lines = [
        band(label, RATES, list(zip(*(e.numbers(f"{role}/lr-{lr:g}", "heldout") for lr in RATES), strict=True)))
        for role, label in (("rms", "judged"), ("layer", "LayerNorm"), ("none", "no norm"))
    ]
    shown = [Series(s.label, s.x, s.y, s.low, s.high) for s in lines if all(map(math.isfinite, s.y))]
    return [
        Chart(
            caption="Held-out loss after training, over learning rates. Bands: min–max over seeds.",
            alt="At every rate the network with RMSNorm (judged) and the one without a norm lie above LayerNorm's.",
            panels=[
                Panel(
                    f"hidden weights centred on {CENTRE:g}",
                    "learning rate",
                    "held-out loss (nats/byte)",
                    shown,
                    x_scale="log",
                )
            ],
        )
    ]


_OFF, _ON = f"centre-{CENTRE:g}", "centre-0"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D9",
        title="RMSNorm from weights off centre",
        sentence="Re-centring is dispensable: even when the initial weights are drawn around 0.2 instead of 0, RMSNorm "
        "is not worse than LayerNorm.",
        sentences=(),
        source="Zhang and Sennrich 2019, arXiv 1910.07467 (RMSNorm), on robustness to the centre of initialization; "
        "theirs is a recurrent translator.",
        measured=f"A network of {LAYERS} hidden layers of width {WIDTH} (map, norm, tanh) predicts the byte after "
        f"{BYTES} bytes of real text; hidden weights N({CENTRE:g}, Xavier's variance). {STEPS} steps of {ROWS} rows, "
        f"Adam, learning rates {', '.join(f'{r:g}' for r in RATES)}, each norm at its own best on held-out text.",
        study=STUDY,
        plays={"rms": f"rms/{_OFF}", "layer": f"layer/{_OFF}", "none": f"none/{_OFF}"},
        literal=Rule(
            text="RMSNorm's held-out loss exceeds LayerNorm's by no more than a tenth of what the previous byte tells "
            "about a byte.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="No norm at all in RMSNorm's place.",
            plays={"rms": f"none/{_OFF}", "layer": f"layer/{_OFF}", "none": f"rms/{_OFF}"},
        ),
        planted=Control(
            text="The same networks from weights centred on 0, where there is no offset to take out.",
            plays={"rms": f"rms/{_ON}", "layer": f"layer/{_ON}", "none": f"none/{_OFF}"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Off centre, all units of a layer share a large offset. LayerNorm takes it out; RMSNorm scales by it, "
            "so what tells inputs apart arrives small, the more so with every layer. From centred weights there is no "
            "such offset, and the two norms do alike.",
            status="tested",
        ),
    ),
)
