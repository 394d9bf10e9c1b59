"""J1: normalised queries and keys bound every attention logit, however large the projections grow.

A normalised head vector has length √D, so by Cauchy and Schwarz |q·k|/√D ≤ √D·max|γ_q·γ_k|, reached when q and k point
the same way. Without the norm, q and k grown by c give logits grown by c², and the softmax ends on one key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import QKNorm

HEADS, TOKENS, DIM = 4, 48, 64
SCALES = (1.0, 1.5, 3.0, 7.0, 15.0, 32.0)


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{norm}/{gain}", {"norm": norm == "normed", "gain": gain})
        for norm in ("normed", "bare")
        for gain in ("one", "per-channel")
    ]


def logits(q: Tensor, k: Tensor) -> Tensor:
    """Return q·k/√D of (T, H, D) tensors: (H, T, T)."""
    return torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])


def entropy(scores: Tensor) -> Tensor:
    """Return the entropy of each row's softmax as a share of ln T."""
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1) / math.log(scores.shape[-1])


def _measure(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    q, k = (bench.draws.randn(TOKENS, HEADS, DIM, stream=s, dtype=torch.float64).to(device) for s in "qk")
    k[0] = q[0]  # one pair that points the same way
    norm = QKNorm(DIM, HEADS, eps=0.0, dtype=torch.float64, device=device)
    gains = [1 + 0.5 * torch.rand(DIM, generator=bench.draws.shared(s), dtype=torch.float64) for s in ("gq", "gk")]
    if params["gain"] == "one":
        gains = [torch.ones_like(g) for g in gains]
    bound = math.sqrt(DIM) * float((gains[0] * gains[1]).max())
    largest: list[float] = []
    spread: list[float] = []
    with torch.no_grad():
        norm.q_norm.weight, norm.k_norm.weight = (torch.nn.Parameter(g.to(device)) for g in gains)
        for c in SCALES:
            a, b = norm(c * q, c * k) if params["norm"] else (c * q, c * k)
            scores = logits(a, b)
            largest.append(float(scores.abs().max()) / bound)
            spread.append(float(entropy(scores).mean()))
    return {
        "of bound": largest,
        "entropy": spread,
        "entropy change": max(abs(s - spread[0]) for s in spread),
    }


STUDY = Study(id="qk_bound", arms=_arms, measure=_measure, seconds=lambda params: 0.03, seeds=3)

_GAINS = {"one": "γ = 1", "per-channel": "γ per channel"}
_ROUNDING = 1e-12
_REASON = "float64: a sum of 64 products and three roots, 70u = 8×10⁻¹⁵ of the bound; ample"


def _criteria(e: Evidence) -> list[Criterion]:
    bounded: list[Criterion] = []
    for gain, words in _GAINS.items():
        bounded += [
            Criterion(
                name=f"largest |logit| over √D·max|γ_q·γ_k| for q and k times 1 … 32, {words}",
                values=[max(row) for row in e.values(f"norm/{gain}", "of bound")],
                kind="at_most",
                target=1.0,
                tolerance=_ROUNDING,
                reason=_REASON,
                every=True,
            ),
            Criterion(
                name=f"change of the attention entropy (share of ln T), {words}",
                values=e.numbers(f"norm/{gain}", "entropy change"),
                kind="at_most",
                target=0.0,
                tolerance=_ROUNDING,
                reason="the same probabilities, as c cancels: rounding of the logits alone",
                every=True,
            ),
        ]
    return [
        *bounded,
        Criterion(
            name="largest |logit| over √D with one pair of equal direction, γ = 1",
            values=[max(row) for row in e.values("norm/one", "of bound")],
            kind="at_least",
            target=1.0,
            tolerance=_ROUNDING,
            reason="the bound is reached: " + _REASON,
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    top = max(max(row) for row in e.values("norm/one", "of bound"))
    h = e.first("norm/one", "entropy")
    bare, hb = e.first("bare/one", "of bound")[-1], e.first("bare/one", "entropy")
    return (
        f"q, k times 32: largest logit {number(top, 3)} √D and entropy {number(h[-1], 3)} ln T as before; without the "
        f"norm {number(bare, 3)} √D and {number(hb[0], 2)} → {number(hb[-1], 1)} ln T"
    )


def _figures(e: Evidence) -> list[Chart]:
    def lines(key: str) -> list[Series]:
        return [
            band(words, SCALES, e.values(f"{role}/one", key))
            for role, words in {"norm": "with QK-norm", "bare": "without"}.items()
        ]

    squares = [e.first("bare/one", "of bound")[0] * c * c for c in SCALES]
    return [
        Chart(
            caption="Queries and keys grown by c, γ = 1: the largest attention logit in units of √D, and the mean "
            "entropy of the attention weights (bands: min–max over seeds).",
            alt="With QK-norm both lines are level, the logit at one. Without, the logit follows c² over three "
            "decades and the entropy falls to nearly zero.",
            panels=[
                Panel(
                    "logit",
                    "c",
                    "largest |logit| / √D",
                    [*lines("of bound"), Series("c²", SCALES, squares, kind="reference")],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel("attention entropy", "c", "entropy / ln T", lines("entropy"), x_scale="log"),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="J1",
        title="QK-norm bounds the logits",
        sentence="To add QK-norm, put an RMSNorm over head_dim on queries and on keys, after their projections.",
        sentences=(46,),
        source="Article, QK-Norm, “Implementation”; what it is for: Dehghani et al. 2023, arXiv 2302.05442.",
        measured=f"Attention logits of {TOKENS} queries and keys, {HEADS} heads of {DIM}, in float64, with normkit's "
        "QKNorm and without, for q and k times c = 1 … 32; γ = 1 and γ random per channel in [1, 1.5]. One pair of q "
        "and k is equal.",
        study=STUDY,
        plays={"norm": "normed", "bare": "bare"},
        literal=Rule(
            text="No logit exceeds √D·max|γ_q·γ_k| at any c, the equal pair reaches √D for γ = 1, and the attention "
            "entropy does not change with c.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="No norm in its place: logits must pass the bound.",
            plays={"norm": "bare", "bare": "normed"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The norm fixes the length of q and k, and only their angle is left to a logit. How sharp attention "
            "can become is then in γ alone.",
            status="tested",
        ),
    ),
)
