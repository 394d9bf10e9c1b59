"""M1: a norm fixes the scale of a token, not its distribution: one massive coordinate takes nearly all of it.

Let a token be r + M·e_j, r random, and ρ = M/‖r‖. RMSNorm divides by √((M² + ‖r‖²)/d) (a unit of √d to the length of
the whole), so the ordinary coordinates keep 1/√(1 + ρ²) of their size, and two tokens with unrelated r have the cosine
(ρ² + cos)/(1 + ρ²) where ‖r‖ is alike, cos being that of the two r. From ρ = 10 on every such token is nearly the same
vector to the layer that reads it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

TOKENS, WIDTH = 64, 512
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # ρ


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm("massive", {"massive": True, "norm": True}),
        Arm("spread", {"massive": False, "norm": True}),
        Arm("unnormed", {"massive": True, "norm": False}),
    ]


def _normed(x: Tensor) -> Tensor:
    return rms_norm(x, eps=0.0)


def _unchanged(x: Tensor) -> Tensor:
    return x


def kept(ratio: float) -> float:
    """Return what ordinary coordinates keep of their size beside one of ``ratio`` times their length: 1/√(1 + ρ²)."""
    return 1 / math.sqrt(1 + ratio * ratio)


def _measure(params: Params, bench: Bench) -> Values:
    norm = _normed if params["norm"] else _unchanged
    r = bench.draws.randn(TOKENS, WIDTH, dtype=torch.float64).to(bench.settings.device)
    r[:, 0] = 0
    r = r / r.norm(dim=-1, keepdim=True)
    alike = r @ r.T
    pairs = ~torch.eye(TOKENS, dtype=torch.bool, device=r.device)
    size: list[float] = []
    sizes_off, cosines_off, rms_off = 0.0, 0.0, 0.0
    cosines: list[float] = []
    alone = norm(r)[:, 1:].square().mean(-1).sqrt()
    for ratio in RATIOS:
        x = r.clone()
        if params["massive"]:
            x[:, 0] = ratio
        else:  # the same length added, spread over all coordinates at random
            other = bench.draws.randn(TOKENS, WIDTH, stream="spread", dtype=torch.float64).to(r.device)
            x = x + ratio * other / other.norm(dim=-1, keepdim=True)
        y = norm(x)
        share = y[:, 1:].square().mean(-1).sqrt() / alone
        cosine = (y @ y.T / WIDTH)[pairs]
        law = ((ratio**2 + alike) / (1 + ratio**2))[pairs]
        size.append(float(share.mean()))
        cosines.append(float(cosine.mean()))
        sizes_off = max(sizes_off, float((share / kept(ratio) - 1).abs().max()))
        cosines_off = max(cosines_off, float((cosine - law).abs().max()))
        rms_off = max(rms_off, float((y.square().mean(-1).sqrt() - 1).abs().max()))
    return {
        "size": size,
        "cosine": cosines,
        "size off law": sizes_off,
        "cosine off law": cosines_off,
        "rms off": rms_off,
        "least cosine at 10": float(cosine_at(r, 10.0)),
    }


def cosine_at(r: Tensor, ratio: float) -> Tensor:
    """Return the least cosine of two normalised tokens with the same massive first coordinate."""
    x = r.clone()
    x[:, 0] = ratio * r.norm(dim=-1)
    y = rms_norm(x, eps=0.0)
    return (y @ y.T).min() / r.shape[-1]


STUDY = Study(id="sink_geometry", arms=_arms, measure=_measure, seconds=lambda params: 0.02, seeds=3)

_EXACT_REASON = "float64: roots of sums of 512 squares, 512·u = 6×10⁻¹⁴, beside a coordinate 100 times as large; ample"


def _fixed_scale(e: Evidence) -> Criterion:
    return Criterion(
        name="largest distance of the output's rms from 1",
        values=e.numbers("token", "rms off"),
        kind="at_most",
        target=0.0,
        tolerance=1e-10,
        reason=_EXACT_REASON,
        every=True,
    )


def _literal(e: Evidence) -> list[Criterion]:
    return [
        _fixed_scale(e),
        Criterion(
            name="least size that ordinary coordinates keep, of what they have without a massive one",
            values=[min(row) for row in e.values("token", "size")],
            kind="near",
            target=1.0,
            tolerance=0.1,
            reason="“the same distribution”: scales within a tenth",
            every=True,
        ),
    ]


def _corrected(e: Evidence) -> list[Criterion]:
    return [
        _fixed_scale(e),
        Criterion(
            name="largest relative distance of that size from 1/√(1 + ρ²), ρ = 0.1 … 100",
            values=e.numbers("token", "size off law"),
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason=_EXACT_REASON,
            every=True,
        ),
        Criterion(
            name="largest distance of the cosine of two tokens from (ρ² + cos)/(1 + ρ²)",
            values=e.numbers("token", "cosine off law"),
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason=_EXACT_REASON,
            every=True,
        ),
        Criterion(
            name="least cosine of two tokens at ρ = 10",
            values=e.numbers("token", "least cosine at 10"),
            kind="at_least",
            target=100 / 101,
            tolerance=0.01,
            reason="cos of two unrelated vectors of 511 numbers is within ±.25 (5.6 deviations of 1/√511), which "
            "enters divided by 1 + ρ² = 101: .0025. Four times that",
            every=True,
        ),
        Criterion(
            name="least size that coordinates keep when the same length is spread over all of them",
            values=[min(row) for row in e.values("other", "size")],
            kind="near",
            target=1.0,
            tolerance=0.1,
            reason="the literal rule's tenth: what shrinks them is that one coordinate has it all, not the length",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    at = RATIOS.index(10.0)
    size, cosine = e.first("token", "size")[at], e.first("token", "cosine")[at]
    return (
        f"one coordinate ten times the rest: rms 1 as ever, but the rest keep {number(size, 2)} of their size and two "
        f"unrelated tokens have cosine {number(cosine, 3)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    fine = [10 ** (-1 + 3 * i / 60) for i in range(61)]
    roles = {"token": "one massive coordinate", "other": "the same length, spread"}
    return [
        Chart(
            caption="Tokens of random numbers plus one coordinate of ρ times their length, after RMSNorm (bands: "
            "min–max over seeds; dashed: the laws).",
            alt="With one massive coordinate the size of the others falls as one over ρ and the cosine of two tokens "
            "rises from zero to one; the same length spread over all coordinates leaves size one and cosine zero.",
            panels=[
                Panel(
                    "what ordinary coordinates keep",
                    "ρ, massive coordinate over length of the rest",
                    "rms beside that without",
                    [
                        *(band(words, RATIOS, e.values(role, "size")) for role, words in roles.items()),
                        Series("1/√(1 + ρ²)", fine, [kept(v) for v in fine], kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel(
                    "how alike two tokens become",
                    "ρ, massive coordinate over length of the rest",
                    "cosine of two tokens",
                    [
                        *(band(words, RATIOS, e.values(role, "cosine")) for role, words in roles.items()),
                        Series("ρ²/(1 + ρ²)", fine, [v * v / (1 + v * v) for v in fine], kind="reference"),
                    ],
                    x_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="M1",
        title="A fixed scale is a fixed distribution",
        sentence="Before each sublayer reads the stream, its input is brought back to a fixed scale, so that the "
        "distribution that layers see stays the same.",
        sentences=(9,),
        source="Article, “Normalization and the residual stream”. Massive activations: Sun et al. 2024, arXiv "
        "2402.17762; attention sinks: Xiao et al. 2023, arXiv 2309.17453.",
        measured=f"normkit's rms_norm (ε = 0, float64) of {TOKENS} random tokens of width {WIDTH} whose first "
        "coordinate is ρ times the length of the rest, ρ = 0.1 … 100: rms of the output, rms of the ordinary "
        "coordinates against what it is without the massive one, and cosines between tokens.",
        study=STUDY,
        plays={"token": "massive", "other": "spread"},
        literal=Rule(
            text="The output has rms 1 and its ordinary coordinates keep their size to a tenth.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="The output has rms 1; its ordinary coordinates shrink by 1/√(1 + ρ²), and the cosine of two "
            "tokens is (ρ² + cos)/(1 + ρ²), near 0.99 at ρ = 10 for unrelated ones. Spread over "
            "all coordinates, the same length changes nothing.",
            origin="theory",
            criteria=_corrected,
        ),
        correction="The scale is fixed, the distribution is not. One coordinate far larger than the others uses the "
        "whole scale up: the rest shrink, and all tokens that share it look alike to the next layer. That is how a "
        "sink token becomes a constant.",
        control=Control(
            text="No norm at all: neither is the scale fixed, nor does anything shrink.",
            plays={"token": "unnormed", "other": "spread"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A root mean square is ruled by its largest term. That trained models grow such coordinates is known "
            "from large ones and is not shown here; what the norm does to them is.",
            status="tested",
        ),
    ),
)
