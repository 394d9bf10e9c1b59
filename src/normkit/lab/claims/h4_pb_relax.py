"""H4: CogView's relaxed softmax is the softmax, with numbers that float16 holds.

softmax(s) = softmax(s − max s), so softmax((s/α − max(s/α))·α) is the same function for every α > 0. Divided by α
before the product of queries and keys, scores never exist at full size: what float16 has to hold is α times smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

HEAD, POSITIONS, ALPHA = 64, 32, 32.0
SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)  # rms of queries and keys
LARGEST = float(torch.finfo(torch.float16).max)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm("relaxed", {"order": "relaxed"}), Arm("plain", {"order": "plain"}), Arm("late", {"order": "late"})]


def relaxed(scores: Tensor, alpha: float) -> Tensor:
    """Return softmax((s − max s)·α) over the last axis of scores that were divided by α: the softmax of α·s."""
    return ((scores - scores.amax(-1, keepdim=True)) * alpha).softmax(-1)


def _scores(q: Tensor, k: Tensor, order: str) -> Tensor:
    """Form scores in q's dtype, q divided by √d before the product; α divides before it too, or after (``late``)."""
    q = q / HEAD**0.5
    if order == "relaxed":
        return (q / ALPHA) @ k.T
    return q @ k.T / ALPHA if order == "late" else q @ k.T


def _measure(params: Params, bench: Bench) -> Values:
    order = params["order"]
    factor = 1.0 if order == "plain" else ALPHA
    unit_q, unit_k = (bench.draws.randn(POSITIONS, HEAD, stream=name) for name in ("q", "k"))
    values: dict[str, list[float]] = {"off": [], "finite": [], "held": []}
    for scale in SCALES:
        q, k = (scale * unit_q).half(), (scale * unit_k).half()
        usual = _scores(q.float(), k.float(), "plain").softmax(-1)
        values["off"].append(float((relaxed(_scores(q.float(), k.float(), order), factor) - usual).abs().max()))
        narrow = relaxed(_scores(q, k, order).float(), factor)
        values["finite"].append(float(narrow.isfinite().double().mean()))
        held = float(_scores(q.double(), k.double(), "plain").abs().max())
        values["held"].append(held / ALPHA if order == "relaxed" else held)
    return dict(values)


STUDY = Study(id="pb_relax", arms=_arms, measure=_measure, seconds=lambda params: 0.05, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="largest difference from the usual softmax, both in float32",
            values=[max(row) for row in e.values("relaxed", "off")],
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason=f"α = {ALPHA:g} and √d = 8 are powers of two: dividing and multiplying by them rounds nothing, and "
            "softmax subtracts the maximum itself",
            every=True,
        ),
        Criterion(
            name="share of finite probabilities with float16 scores, all scales",
            values=[min(row) for row in e.values("relaxed", "finite")],
            kind="near",
            target=1.0,
            tolerance=0.0,
            reason="a count",
            every=True,
        ),
        Criterion(
            name=f"share of finite probabilities without the relaxation, scale {SCALES[-1]:g}",
            values=[row[-1] for row in e.values("plain", "finite")],
            kind="below",
            target=1.0,
            tolerance=0.1,
            reason="an overflow anywhere in a row takes the whole row with it; a tenth is three rows of 32",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    held = [max(row[-1] for row in e.values(role, "held")) for role in ("plain", "relaxed")]
    return (
        f"difference in float32 {number(max(max(r) for r in e.values('relaxed', 'off')))}; float16 must hold "
        f"{number(held[0] / LARGEST, 2)} × {LARGEST:g} as usual, {number(held[1] / LARGEST, 2)} × relaxed"
    )


def _figures(e: Evidence) -> list[Chart]:
    def mean(role: str, key: str) -> list[float]:
        rows = e.values(role, key)
        return [sum(column) / len(column) for column in zip(*rows, strict=True)]

    held = [Series(role, SCALES, mean(role, "held")) for role in ("plain", "relaxed")]
    limit = Series("float16's largest", SCALES, [LARGEST] * len(SCALES), kind="reference")
    return [
        Chart(
            caption="The largest number that forming scores asks float16 to hold, and the share of probabilities that "
            "come out finite, over the rms of queries and keys. Means over seeds.",
            alt="The plain product crosses the dashed limit at the largest scales, where its probabilities are lost; "
            "the relaxed one stays below and all of its probabilities are finite.",
            panels=[
                Panel(
                    "what float16 holds",
                    "rms of q and k",
                    "largest number",
                    [*held, limit],
                    x_scale="log",
                    y_scale="log",
                ),
                Panel(
                    "what comes out",
                    "rms of q and k",
                    "finite probabilities (%)",
                    [Series(role, SCALES, [100 * v for v in mean(role, "finite")]) for role in ("plain", "relaxed")],
                    x_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H4",
        title="The relaxed softmax is the softmax",
        sentence="CogView placed norms before and after sublayers to train in float16; beside them it divides scores "
        "by a constant before they are formed and multiplies it back inside the softmax.",
        sentences=(43,),
        source="Article, “Compromises”, of CogView's norms; Ding et al. 2021, arXiv 2105.13290, of the relaxation.",
        measured=f"softmax((s/α − max(s/α))·α), α = {ALPHA:g}, of scores of {POSITIONS} random queries and keys of "
        f"width {HEAD} and rms 1 … {SCALES[-1]:g}: in float32 against the usual order, and with scores formed in "
        "float16. Either order divides q by √d before the product.",
        study=STUDY,
        plays={"relaxed": "relaxed", "plain": "plain"},
        literal=Rule(
            text="In float32 the relaxed softmax is the softmax to the bit; with float16 scores all of its "
            "probabilities are finite at every scale, while the usual order loses more than a tenth at the largest.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Scores divided by α only after the product: the same function, yet the product has overflowed.",
            plays={"relaxed": "late", "plain": "plain"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The maximum is subtracted while scores are α times too small, and what is left is at most 0: "
            "multiplying it by α can only underflow to a probability of 0. It is the order that helps: the control "
            "computes the same function.",
            status="tested",
        ),
    ),
)
