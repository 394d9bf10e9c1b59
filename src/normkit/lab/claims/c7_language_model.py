"""C7: norms across a batch in a small language model: training's rule against inference's, and what padding does.

A batch norm in training mode lets a position see its own future and the other rows, so a loss read off a batch is not
the loss of predicting text. Every number judged here is scored prefix-only: to predict the byte after t + 1 bytes, the
network is given these bytes and nothing that follows them. What then takes the place of training's batch is a choice.
Here the prefix is one row of four, as in training, and the other three are windows of training text, drawn without
regard to it: they carry the noise of a small batch and nothing about the answer. Two more ways are shown and not
judged: the prefix alone, which is all that generation has, and the row with its future left in, which leaks.

The same prefixes in the same company are then scored by running statistics. Both modes compute the same shapes, so a
norm that has one rule gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.padded import KINDS, SHORTEST, PaddedLM, Rows, cut, draw_batches, train_padded
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

LAYERS, WIDTH, ROWS, LR = 2, 64, 4, 3e-3
PADDED = 2 * CONTEXT  # positions a batch is filled up to when padding is added
LABELS = {"layer": "LayerNorm", "batch": "BatchNorm, masked", "power": "quadratic mean", "blind": "BatchNorm, no mask"}
WAYS = {
    "running": "inference's rule",
    "company": "training's rule",
    "alone": "prefix alone",
    "future": "future left in",
    "padding": "more padding",
}


def _arms(settings: Settings) -> list[Arm]:
    steps, scored = (80, 48) if settings.mode == "quick" else (300, 128)
    return [Arm(kind, {"kind": kind, "steps": steps, "scored": scored}) for kind in KINDS]


class Scorer:
    """Loss of one byte given a prefix, in nats, under either mode; running statistics stay what they were."""

    def __init__(self, model: PaddedLM) -> None:
        self.model = model
        self._kept = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def __call__(self, rows: Rows, position: int, target: int, training: bool) -> float:
        """Score ``target`` as the byte after ``position`` of the first row."""
        self.model.train(training)
        logits = self.model(rows)[0, position]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self._kept[name])
        return -float(logits.log_softmax(-1)[target])


@torch.no_grad()
def score(model: PaddedLM, window: Tensor, length: Tensor, others: Tensor, lengths: Tensor) -> dict[str, float]:
    """Return the loss of the byte after the first ``length`` of ``window`` (1, `CONTEXT` + 1), in every way of `WAYS`.

    ``others`` (3, `CONTEXT` + 1), cut to ``lengths``, are its company.
    """
    last, scorer = int(length) - 1, Scorer(model)
    target = int(window[0, last + 1])
    tokens, ends = torch.cat([window, others])[:, :-1], torch.cat([length, lengths])
    uncut = torch.cat([torch.full_like(length, CONTEXT), lengths])
    ways: dict[str, tuple[Rows, bool]] = {
        "running": (cut(tokens, ends), False),
        "company": (cut(tokens, ends), True),
        "alone": (cut(tokens[:1], length), True),
        "future": (cut(tokens, uncut), True),
        "padding": (cut(tokens, ends, PADDED), True),
    }
    return {way: scorer(rows, last, target, training) for way, (rows, training) in ways.items()}


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    config = TransformerConfig(layers=LAYERS, width=WIDTH, context=PADDED)
    model = PaddedLM(params["kind"], config, bench.draws).to(bench.settings.device)
    curve = train_padded(model, bench.corpus, bench.draws, params["steps"], ROWS, LR)
    asked = draw_batches(bench.corpus.heldout, params["scored"], 1, bench.draws.shared("asked"))
    company = draw_batches(bench.corpus.train, params["scored"], ROWS - 1, bench.draws.shared("company"))
    parts = [p.to(bench.settings.device) for p in (asked.windows, asked.lengths, company.windows, company.lengths)]
    rows = [score(model, *each) for each in zip(*parts, strict=True)]
    losses = {way: [row[way] for row in rows] for way in WAYS}
    apart = [abs(a - b) for a, b in zip(losses["running"], losses["company"], strict=True)]
    moved = [abs(a - b) for a, b in zip(losses["padding"], losses["company"], strict=True)]
    return {
        **{f"loss/{way}": math.fsum(column) / len(column) for way, column in losses.items()},
        "gap": math.fsum(apart) / len(apart),
        "largest gap": max(apart),
        "moved": math.fsum(moved) / len(moved),
        "largest move": max(moved),
        "scored": len(rows),
        "trained": math.fsum(curve[-20:]) / 20,
    }


STUDY = Study(
    id="batch_norm_language_model",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.011 * params["steps"] + 0.022 * params["scored"],
    seeds=3,
    corpus=True,
    full_only=True,
)

_CHANGED = 0.05
_WHY_CHANGED = (
    "a prediction counts as changed once the probability given to the byte that came differs by a twentieth; by a "
    "tenth at double tolerance"
)


def _ratio(e: Evidence) -> list[float]:
    pairs = zip(e.numbers("power", "gap"), e.numbers("batch", "gap"), strict=True)
    return [a / b if b else math.nan for a, b in pairs]


def _gap_criteria(e: Evidence) -> list[Criterion]:
    scored = int(e.first("batch", "scored"))
    return [
        Criterion(
            name="batch norm: |loss by inference's rule − loss by training's|, mean over prefixes (nats)",
            values=e.numbers("batch", "gap"),
            kind="above",
            target=0.0,
            tolerance=_CHANGED,
            reason=_WHY_CHANGED,
        ),
        Criterion(
            name="quadratic mean: its gap over batch norm's",
            values=_ratio(e),
            kind="below",
            target=1.0,
            tolerance=(2 / scored) ** 0.5,
            reason=f"a mean over {scored} prefixes is off by 1/√{scored} of itself where differences scatter like an "
            "exponential distribution, and a ratio of two such by √2 times that",
        ),
        Criterion(
            name="layer norm: largest |loss in evaluation mode − loss in training mode| of any prefix (nats)",
            values=e.numbers("layer", "largest gap"),
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason="exact: both modes compute the same",
            every=True,
        ),
    ]


def _padding_criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"no mask: |change of a prefix's loss| when its batch is padded to {PADDED}, mean (nats)",
            values=e.numbers("blind", "moved"),
            kind="above",
            target=0.0,
            tolerance=_CHANGED,
            reason=_WHY_CHANGED,
        ),
        Criterion(
            name=f"masked: largest |change of a prefix's loss| when its batch is padded to {PADDED} (nats)",
            values=e.numbers("masked", "largest move"),
            kind="at_most",
            target=0.0,
            tolerance=1e-4,
            reason="float32: a statistic whose terms are grouped otherwise is off by some 6×10⁻⁸ of itself, in each "
            f"of {2 * LAYERS + 1} norms, under logits of size 20 or so: 6×10⁻⁶, which sublayers may pass on several "
            "times over",
            every=True,
        ),
    ]


def _gap_summary(e: Evidence) -> str:
    batch, power = (estimate(e.numbers(role, "gap")) for role in ("batch", "power"))
    signed = estimate([a - b for a, b in _pairs(e, "batch", "running", "company")])
    layer = number(max(e.numbers("layer", "largest gap")), 1)
    return f"|gap| per prediction: batch norm {batch}, quadratic mean {power}, layer norm {layer} nats; signed {signed}"


def _padding_summary(e: Evidence) -> str:
    moved = estimate(e.numbers("blind", "moved"))
    kept = number(max(e.numbers("masked", "largest move")), 1)
    return f"more padding moves a prediction's loss by {moved} nats without a mask, by {kept} at most with one"


def _pairs(e: Evidence, role: str, first: str, second: str) -> list[tuple[float, float]]:
    return list(zip(e.numbers(role, f"loss/{first}"), e.numbers(role, f"loss/{second}"), strict=True))


def _chart(labels: dict[str, str], ways: Sequence[str]) -> Callable[[Evidence], list[Chart]]:
    def figures(e: Evidence) -> list[Chart]:
        def row(role: str) -> Series:
            columns = [e.numbers(role, f"loss/{way}") for way in ways]
            return band(label_of(role), range(len(ways)), [list(r) for r in zip(*columns, strict=True)])

        def label_of(role: str) -> str:
            return labels[e.arm(role)] if e.arm(role) in labels else LABELS[e.arm(role)]

        def mean(role: str, way: str) -> float:
            return interval(e.numbers(role, f"loss/{way}")).mean

        told = "; ".join(
            f"{label_of(role)}: " + ", ".join(f"{WAYS[way]} {mean(role, way):.2f}" for way in ways) for role in labels
        )
        return [
            Chart(
                caption=f"Held-out loss of the same {e.first(next(iter(labels)), 'scored')} predictions a seed, scored "
                f"in {len(ways)} ways: {', '.join(WAYS[way] for way in ways)}. Bands: min–max over seeds, which differ "
                "in text as well; compare along a line.",
                alt=f"Mean losses in nats. {told}.",
                panels=[
                    Panel(
                        "one network, several rules",
                        "how the prediction is scored",
                        "held-out loss (nats/byte)",
                        [row(role) for role in labels],
                        x_names=[WAYS[way] for way in ways],
                    )
                ],
            )
        ]

    return figures


_MEASURED = (
    f"Pre-Norm networks of {LAYERS} blocks (width {WIDTH}), alike but for the norm, are trained on real text in "
    f"batches of {ROWS} rows of {SHORTEST} to {CONTEXT} bytes, padded to the longest: 300 steps of Adam at {LR:g}, "
    "running statistics with momentum 0.1. "
)
_SCORED = (
    "A prediction is the byte after a held-out prefix, from that prefix as one row of four; the other three are "
    "windows of training text, and nothing that follows the prefix is given. "
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C7",
        title="A language model with batch statistics follows two rules",
        sentence="Training and inference disagree under BatchNorm, which normalises by the batch in one and by running "
        "statistics in the other; a norm that depends on the single token alone knows no such difference.",
        sentences=(17, 20),
        source="Article, “The limits of BatchNorm”, third point and conclusion; Shen et al. 2020, arXiv 2003.07845, on "
        "the quadratic mean.",
        measured=_MEASURED
        + _SCORED
        + "It is scored twice by the same network: by batch statistics, as in training, and by running ones. The gap "
        "is the mean absolute difference of the two losses. Compared: normkit.BatchNorm with the mask of the padding, "
        "normkit.LayerNorm, and the quadratic mean that PowerNorm puts in place of mean and variance (with batch "
        "statistics in training and a plain gradient; PowerNorm's own approximations are left out).",
        study=STUDY,
        plays={"batch": "batch", "power": "power", "layer": "layer"},
        literal=Rule(
            text="Batch norm's gap exceeds 0.05 nats per prediction; that of the quadratic mean is smaller; layer "
            "norm's losses are the same to the bit.",
            origin="sentence",
            criteria=_gap_criteria,
        ),
        control=Control(
            text="Layer norm, which has one rule, in batch norm's place, and batch norm in its.",
            plays={"batch": "layer", "power": "power", "layer": "batch"},
        ),
        summary=_gap_summary,
        figures=_chart({r: LABELS[r] for r in ("batch", "power", "layer")}, ("running", "company", "alone", "future")),
        explanation=Explanation(
            text="A batch of some 140 real bytes, which hang together within their rows, has statistics that scatter "
            "around the running ones; every prediction inherits that scatter. At home it is noise to either side: the "
            "signed difference shows whether running statistics cost anything there. The quadratic mean estimates one "
            "statistic instead of two, of tokens already scaled to one size.",
            status="tested",
        ),
    ),
    Claim(
        id="C7b",
        title="Padding in a language model's batch norm",
        sentence="Sequences differ in length and are padded to align; padded positions enter BatchNorm's statistics, "
        "which drift with the share of padding.",
        sentences=(15,),
        source="Article, “The limits of BatchNorm”, first point.",
        measured=_MEASURED
        + _SCORED
        + f"It is scored by batch statistics twice: the batch padded to its longest row, and to {PADDED} positions. "
        "Compared: normkit.BatchNorm with the mask, in training as well, and without.",
        study=STUDY,
        plays={"blind": "blind", "masked": "batch"},
        literal=Rule(
            text="Without a mask, more padding changes a prediction's loss by more than 0.05 nats in the mean; with "
            "one, no prediction's by more than rounding, 10⁻⁴.",
            origin="sentence",
            criteria=_padding_criteria,
        ),
        control=Control(
            text="The two swapped: the masked norm must not pass for the one that sees padding.",
            plays={"blind": "batch", "masked": "blind"},
        ),
        summary=_padding_summary,
        figures=_chart(
            {"blind": LABELS["blind"], "masked": LABELS["batch"]}, ("running", "company", "padding", "alone")
        ),
        explanation=Explanation(
            text="Padded positions hold vectors that the network has made of zero bytes; the more of them, the more "
            "they are the batch. Without them, as when a prefix stands alone, a network that was trained with them "
            "meets statistics that it has never seen.",
            status="tested",
        ),
    ),
)
