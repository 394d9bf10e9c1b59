"""J3: a query and key norm over each head, or over all heads at once, and what that means when heads are sharded.

A statistic over head_dim never leaves its head: a device that holds some heads needs nothing from the others. A
statistic over the whole width does: each device contributes Σx², one number per token, and the sum over devices
divided by the full width is the statistic again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import QKNorm

TOKENS, HEADS, DIM, SHARDS, EPS = 32, 8, 32, 4, 1e-6
ARMS = {
    "head": "per head, shards alone",
    "full-local": "full width, shards alone",
    "full-reduced": "full width, Σx² summed over shards",
    "head-for-full": "per head instead of full width",
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"arm": name}) for name in ARMS]


def _norm(heads: int, coverage: str, device: str, weight: Tensor | None = None) -> QKNorm:
    norm = QKNorm(
        DIM, heads, coverage="full" if coverage == "full" else "head", eps=EPS, dtype=torch.float64, device=device
    )
    if weight is not None:
        norm.q_norm.weight = torch.nn.Parameter(weight)
    return norm


def reduced(shards: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return the full-width RMSNorm of each shard (T, heads, D), knowing of the others their Σx² alone."""
    total = torch.stack([x.square().sum((-2, -1), keepdim=True) for x in shards]).sum(0)  # the all-reduce
    width = sum(x.shape[-2] * x.shape[-1] for x in shards)
    root = (total / width + EPS).sqrt()
    return [x / root * w.reshape(x.shape[-2:]) for x, w in zip(shards, weights, strict=True)]


def _measure(params: Params, bench: Bench) -> Values:
    arm, device = params["arm"], bench.settings.device
    scale = 0.5 + 1.5 * torch.rand(HEADS, 1, generator=bench.draws.shared("scale"), dtype=torch.float64)
    q = (scale * bench.draws.randn(TOKENS, HEADS, DIM, dtype=torch.float64)).to(device)
    gain = (1 + 0.1 * bench.draws.randn(HEADS * DIM, stream="gain", dtype=torch.float64)).to(device)
    shards, gains = list(q.split(HEADS // SHARDS, 1)), list(gain.split(HEADS * DIM // SHARDS))
    with torch.no_grad():
        if arm == "head":
            shared = gain[:DIM]
            whole = _norm(HEADS, "head", device, shared).q_norm(q)
            parts = [_norm(HEADS // SHARDS, "head", device, shared).q_norm(x) for x in shards]
        else:
            whole = _norm(HEADS, "full", device, gain).q_norm(q)
            if arm == "full-reduced":
                parts = reduced(shards, gains)
            elif arm == "full-local":
                parts = [
                    _norm(HEADS // SHARDS, "full", device, w).q_norm(x) for x, w in zip(shards, gains, strict=True)
                ]
            else:
                parts = [_norm(HEADS, "head", device).q_norm(q) * gain.reshape(HEADS, DIM)]
        error = (torch.cat(parts, 1) - whole).abs()
    return {"error": float(error.max()), "by head": error.amax((0, 2)).tolist()}


STUDY = Study(id="qk_coverage", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)

_EXACT = 1e-12
_EXACT_REASON = "float64: Σx² of 256 numbers in another order, 256·u = 3×10⁻¹⁴ of outputs up to 6; ample"
_APART = 0.1
_APART_REASON = (
    "heads whose scales spread over [.5, 2] are divided by a root that is off by tens of per cent: outputs of size 1 "
    "must move by more than a tenth"
)


def _criteria(e: Evidence) -> list[Criterion]:
    exact = [
        Criterion(
            f"largest difference from the unsharded norm, {ARMS[role]}",
            e.numbers(role, "error"),
            "at_most",
            0.0,
            _EXACT,
            _EXACT_REASON,
            every=True,
        )
        for role in ("head", "full-reduced")
    ]
    apart = [
        Criterion(
            f"largest difference from the full-width norm, {ARMS[role]}",
            e.numbers(role, "error"),
            "above",
            0.0,
            _APART,
            _APART_REASON,
            every=True,
        )
        for role in ("full-local", "head-for-full")
    ]
    return [*exact, *apart]


def _summary(e: Evidence) -> str:
    worst = {role: number(max(e.numbers(role, "error")), 2) for role in ARMS}
    return (
        f"{SHARDS} shards of {HEADS} heads: per head off by {worst['head']}; full width by {worst['full-local']} "
        f"alone, by {worst['full-reduced']} with Σx² summed (one number per token)"
    )


def _figures(e: Evidence) -> list[Chart]:
    heads = list(range(HEADS))
    floor = 2.0**-53
    series = [
        Series(words, heads, [max(v, floor) for v in e.first(role, "by head")], kind="points")
        for role, words in ARMS.items()
    ]
    return [
        Chart(
            caption="Largest difference from the norm that sees all heads, by head (first seed; differences of zero "
            "are drawn at 2⁻⁵³).",
            alt="Per-head norms and full-width norms with summed squares lie near 10⁻¹⁶ for every head; full-width "
            "norms of each shard alone, and per-head norms in a full-width norm's place, lie between 0.1 and a few.",
            panels=[Panel("heads on four devices", "head", "largest difference", series, y_scale="log")],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="J3",
        title="Over head_dim, not over all heads",
        sentence="QK-norm is RMSNorm(head_dim): its statistic runs over the channels of one head.",
        sentences=(46,),
        source="Article, QK-Norm, “Implementation”. Full width: OLMo 2, arXiv 2501.00656.",
        measured=f"normkit's QKNorm in float64 of {TOKENS} tokens, {HEADS} heads of {DIM} with scales from .5 to 2, "
        f"per head and over the full width; the same by {SHARDS} shards of heads that know nothing of each other, and "
        "that share Σx².",
        study=STUDY,
        plays={name: name for name in ARMS},
        literal=Rule(
            text="Per head, shards need nothing of each other (10⁻¹²). Over the full width they are off by more than "
            ".1 alone and exact with Σx² summed over shards; and per head is no substitute for full width.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Shards that do not share Σx² in the place of those that do.",
            plays={**{name: name for name in ARMS}, "full-reduced": "full-local", "full-local": "full-reduced"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Heads differ in scale. A norm per head removes that difference, a norm over all heads keeps it; the "
            "two are different models, and only the second needs communication.",
            status="tested",
        ),
    ),
)
