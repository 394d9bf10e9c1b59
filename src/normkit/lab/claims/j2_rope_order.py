"""J2: a query and key norm before or after RoPE is the same thing only as long as γ commutes with the rotation.

RoPE turns pairs of channels by an angle that grows with the position, so that ⟨R_t q, R_s k⟩ depends on t − s alone. It
keeps lengths: an RMS statistic is the same before and after. A gain commutes with it if both channels of a pair have
the same γ. A gain per channel does not, nor does subtracting the mean; normed after RoPE, the logit of one and the
same query and key at one and the same distance then depends on where they stand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.conventions import TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.attention import rotate
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import QKNorm

TOKENS, HEADS, DIM, DISTANCE = 128, 2, 64, 5
BASE = 10_000.0
GAINS = ("none", "per-pair", "per-channel")
_NAMES = {"none": "γ = 1", "per-pair": "γ per pair", "per-channel": "γ per channel", "layer": "LayerNorm, γ = 1"}


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{order}/{gain}", {"order": order, "gain": gain})
        for order in ("before", "after")
        for gain in (*GAINS, "layer")
    ]


def turns(length: int, dim: int) -> Tensor:
    """Return e^(i·t·ω_j) in complex128: the lab's own table is complex64, whose rounding would show here."""
    frequency = BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def _gain(params: Params, bench: Bench, stream: str) -> Tensor:
    drawn = 0.5 + 1.5 * torch.rand(DIM, generator=bench.draws.shared(stream), dtype=torch.float64)
    if params["gain"] in ("none", "layer"):
        return torch.ones_like(drawn)
    return drawn[::2].repeat_interleave(2) if params["gain"] == "per-pair" else drawn


def _measure(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    spec = TORCH_LAYER_NORM if params["gain"] == "layer" else TORCH_RMS_NORM
    norm = QKNorm(DIM, HEADS, eps=0.0, spec=spec, dtype=torch.float64, device=device)
    table = turns(TOKENS, DIM).to(device)
    vectors = [bench.draws.randn(1, HEADS, DIM, stream=s, dtype=torch.float64).to(device) for s in "qk"]
    q, k = (v.expand(TOKENS, HEADS, DIM).contiguous() for v in vectors)  # one query and one key at every position
    with torch.no_grad():
        norm.q_norm.weight, norm.k_norm.weight = (
            torch.nn.Parameter(_gain(params, bench, s).to(device)) for s in ("gain q", "gain k")
        )
        if params["order"] == "before":
            q, k = norm(q, k)
            q, k = rotate(q, table), rotate(k, table)
        else:
            q, k = norm(rotate(q, table), rotate(k, table))
    scores = (q[DISTANCE:] * k[:-DISTANCE]).sum(-1) / math.sqrt(DIM)  # (positions, heads), all at one distance
    return {"spread": float((scores.amax(0) - scores.amin(0)).max()), "logits": scores[:, 0].tolist()}


STUDY = Study(id="rope_order", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)

_EXACT = 1e-10
_EXACT_REASON = "float64: angles up to 128 are rounded to 10⁻¹⁴ and logits reach 30: below 10⁻¹²; ample"


def _level(e: Evidence, path: str, words: str) -> Criterion:
    return Criterion(
        f"spread of one logit over positions, {words}",
        e.numbers(path, "spread"),
        "at_most",
        0.0,
        _EXACT,
        _EXACT_REASON,
        every=True,
    )


def _moves(e: Evidence, path: str, words: str) -> Criterion:
    return Criterion(
        f"spread of one logit over positions, {words}",
        e.numbers(path, "spread"),
        "above",
        0.0,
        0.1,
        "a logit that moves by .1 changes an attention weight by a tenth; less could pass unnoticed",
        every=True,
    )


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        *(_level(e, f"before/{gain}", f"norm before RoPE, {_NAMES[gain]}") for gain in GAINS),
        *(_level(e, f"after/{gain}", f"norm after RoPE, {_NAMES[gain]}") for gain in ("none", "per-pair")),
        _moves(e, "after/per-channel", f"norm after RoPE, {_NAMES['per-channel']}"),
        _moves(e, "after/layer", f"norm after RoPE, {_NAMES['layer']}"),
    ]


def _summary(e: Evidence) -> str:
    before, after = (max(e.numbers(f"{role}/per-channel", "spread")) for role in ("before", "after"))
    layer = max(e.numbers("after/layer", "spread"))
    return (
        f"one logit at distance {DISTANCE}, γ per channel: varies over positions by {number(before, 1)} if normed "
        f"before RoPE, by {number(after, 2)} after (LayerNorm {number(layer, 2)})"
    )


def _figures(e: Evidence) -> list[Chart]:
    shown = {
        "before/per-channel": "before RoPE, γ per channel",
        "after/per-channel": "after RoPE, γ per channel",
        "after/layer": "after RoPE, LayerNorm",
        "after/none": "after RoPE, γ = 1",
    }
    series: list[Series] = []
    for path, words in shown.items():
        row = e.first(path, "logits")
        series.append(Series(words, list(range(len(row))), row))
    return [
        Chart(
            caption=f"The logit of one query and one key, {DISTANCE} positions apart, against the key's position "
            "(first seed, first head).",
            alt="Normed before RoPE, and after it with γ = 1, the logit is the same at all positions. Normed after "
            "RoPE with γ per channel, or with LayerNorm, it swings up and down with the position.",
            panels=[Panel("one logit at a fixed distance", "position of the key", "logit", series)],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="J2",
        title="QK-norm before RoPE",
        sentence="QK-norm is an RMSNorm over head_dim on q and k, after the projections and before RoPE.",
        sentences=(46,),
        source="Article, QK-Norm, “Implementation”.",
        measured=f"One query and one key, repeated at {TOKENS} positions, {HEADS} heads of {DIM}, in float64, through "
        f"normkit's QKNorm before RoPE and after it: how far their logit at distance {DISTANCE} varies over positions. "
        "γ = 1, γ in [.5, 2] per pair of channels and per channel; LayerNorm instead of RMSNorm.",
        study=STUDY,
        plays={"before": "before", "after": "after"},
        literal=Rule(
            text="Normed before RoPE, the logit does not depend on the position, whatever γ. Normed after, it does not "
            "for γ = 1 or γ per pair, and varies by more than .1 for γ per channel and for LayerNorm: the order "
            "matters as soon as γ is learnt.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The two orders change places: what is normed after RoPE must not pass for normed before.",
            plays={"before": "after", "after": "before"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A rotation keeps the root mean square, and commutes with a gain that is equal within each pair it "
            "turns; it neither keeps the mean nor commutes with unequal gains.",
            status="tested",
        ),
    ),
)
