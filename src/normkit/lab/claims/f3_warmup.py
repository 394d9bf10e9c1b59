"""F3: what the map of wirings, warm-up and learning rates says of three sentences, one of them in two parts.

Where arms are compared, each stands at its own best learning rate, or is judged by the largest it can bear; none is
judged at a rate picked for another.

What the map covers: six blocks, twice as many sublayers. What it does not: the "dozens of layers" of which the
article speaks. The verdicts are about networks of this depth.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.f3_map import (
    DECADE,
    LAYERS,
    ROWS,
    STEPS,
    STUDY,
    TENS,
    WARMUP,
    WIDTH,
    at,
    best_rate,
    boundary,
    curves_chart,
    largest_usable,
    map_chart,
    rates,
    share_chart,
)
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

# The range of ten normal numbers stays below 5.97 standard deviations in 999 of 1000 cases; `TENS` steps are ten
# points of the curve.
RANGE_OF_TEN = 5.97

_WHY_MARGIN = (
    "a tenth of what the previous byte tells about a byte in this text: a run that has gained less has learnt little "
    "beyond the bytes' frequencies"
)


def _margin(e: Evidence, role: str) -> float:
    return float(e.first(at(role, DECADE[0]), "margin"))


def _gain(e: Evidence, role: str, lr: float, trains: bool) -> Criterion:
    return Criterion(
        name=f"{role}, lr {lr:g}: held-out gain over the unigram plateau (nats/byte)",
        values=e.numbers(at(role, lr), "gain"),
        kind="above" if trains else "at_most",
        target=0.0,
        tolerance=_margin(e, role),
        reason=_WHY_MARGIN,
    )


def _bearable(e: Evidence, role: str = "pre") -> float:
    """Return the largest learning rate that Pre-Norm bears without warm-up: what Post-Norm is held against."""
    return largest_usable(e, role) or rates(e.settings)[0]


def _oscillates(e: Evidence) -> list[Criterion]:
    lr = _bearable(e)
    return [
        Criterion(
            name=f"{role}, lr {lr:g}: largest rise of the training loss within {TENS} steps (nats/byte)",
            values=e.numbers(at(role, lr), "rise"),
            kind="above" if role == "post" else "at_most",
            target=0.0,
            tolerance=RANGE_OF_TEN * float(e.first(at(role, lr), "noise")),
            reason="of level curves of ten points, 999 in 1000 stay within 5.97 standard deviations of a point's "
            "batch noise",
        )
        for role in ("post", "pre")
    ]


def _stalls(e: Evidence) -> list[Criterion]:
    lr = _bearable(e)
    return [_gain(e, "post", lr, trains=False), _gain(e, "pre", lr, trains=True)]


def _a_summary(e: Evidence) -> str:
    lr = _bearable(e)
    post, pre = (estimate(e.numbers(at(role, lr), "gain")) for role in ("post", "pre"))
    return f"no warm-up, lr {lr:g}: gain over the unigram plateau, Post {post}, Pre {pre} nats/byte"


_B_POST, _B_PRE = "post-without", "pre-without"


def _converges_only_with(e: Evidence) -> list[Criterion]:
    return [_gain(e, _B_POST, best_rate(e, _B_POST), trains=False)]


def _stuck_where_pre_trains(e: Evidence) -> list[Criterion]:
    lr = _bearable(e, _B_PRE)
    return [
        _gain(e, _B_POST, best_rate(e, _B_POST), trains=True),
        _gain(e, _B_POST, lr, trains=False),
        _gain(e, _B_PRE, lr, trains=True),
    ]


def _b_summary(e: Evidence) -> str:
    best, lr = best_rate(e, _B_POST), _bearable(e, _B_PRE)
    gains = [estimate(e.numbers(at(_B_POST, rate), "gain")) for rate in (best, lr)]
    return f"no warm-up: gains {gains[0]} nats/byte at its best lr {best:g}, {gains[1]} at Pre-Norm's largest, {lr:g}"


def _bears_more(e: Evidence) -> list[Criterion]:
    (low, high), (low_without, high_without) = (boundary(e, role) for role in ("with", "without"))
    grid = rates(e.settings)
    if e.arm("with") == e.arm("without"):
        known = (0.0, 0.0)  # one arm has one limit, wherever it lies
    elif min(low, low_without) == 0 or max(high, high_without) == math.inf:
        known = (-math.inf, math.inf)
    else:
        known = (math.log(low / high_without), math.log(high / low_without))
    return [
        Criterion(
            name=f"ln of the largest lr that Post-Norm bears, with ({_told(low, high)}) over without warm-up "
            f"({_told(low_without, high_without)})",
            values=[math.log(max(low, grid[0]) / max(low_without, grid[0]))],
            kind="above",
            target=0.0,
            tolerance=math.log(3) / 4,
            reason="neighbours on the grid lie a factor of 3 or more apart; a quarter of that step, and its double, "
            "tell one grid point from the next",
            known=known,
        )
    ]


def _told(low: float, high: float) -> str:
    if low == 0:
        return f"below {high:g}, on the grid's edge"
    if high == math.inf:
        return f"{low:g} or more, on the grid's edge"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _d_summary(e: Evidence) -> str:
    with_, without = (_told(*boundary(e, role)) for role in ("with", "without"))
    return f"largest lr at which 4 of 5 seeds train: {without} without warm-up, {with_} with {WARMUP} steps of it"


def _difference(e: Evidence) -> list[float]:
    """Return held-out loss without minus with warm-up, each at its best learning rate, seed by seed."""
    gains = [e.numbers(at(role, best_rate(e, role)), "gain") for role in ("with", "without")]
    return [a - b for a, b in zip(*gains, strict=True)]


def _insensitive(e: Evidence) -> list[Criterion]:
    stable = [_gain(e, "without", lr, trains=True) for lr in DECADE]
    same = Criterion(
        name="held-out loss without minus with warm-up, each at its best lr, paired (nats/byte)",
        values=_difference(e),
        kind="near",
        target=0.0,
        tolerance=_margin(e, "without"),
        reason=_WHY_MARGIN,
    )
    return [*stable, same]


def _c_summary(e: Evidence) -> str:
    runs = [trained for lr in DECADE for trained in e.numbers(at("without", lr), "trained")]
    return (
        f"no warm-up: {sum(runs):.0f} of {len(runs)} runs train, lr {DECADE[0]:g} to {DECADE[-1]:g}; best loss without "
        f"− with it: {estimate(_difference(e))} nats/byte"
    )


_MEASURED = (
    f"The lab's Transformer ({LAYERS} blocks, width {WIDTH}, SwiGLU, RMSNorm, RoPE, Xavier; Pre-Norm with its final "
    f"norm) is trained on bytes of real text, {STEPS} steps of {ROWS} × 64 bytes, Adam(.9, .98), constant learning "
    f"rate, with no warm-up or {WARMUP} linear steps; all arms of a seed share batches and initial weights. A run has "
    "trained when its loss on text it never saw is below the entropy of that text's byte frequencies by a tenth of "
    "what one byte of context is worth; else it is stuck, or diverged if a loss was not finite. "
)
_DEPTH = (
    f" {LAYERS} blocks ({2 * LAYERS} sublayers) are judged; dozens of layers, of which the article speaks, are not."
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="F3a",
        title="Post-Norm without warm-up",
        sentence="Stack dozens of layers, fix the learning rate, drop the warm-up: Post-Norm's loss usually starts to "
        "oscillate or diverges within tens of steps, while Pre-Norm's descends smoothly.",
        sentences=(45,),
        source="Article, closing experiment of “Post-Norm and Pre-Norm”.",
        measured=_MEASURED + "Judged at the largest learning rate that Pre-Norm bears without warm-up." + _DEPTH,
        study=STUDY,
        plays={"post": "post/warmup-0", "pre": "pre/warmup-0"},
        literal=Rule(
            text=f"Within {TENS} steps Post-Norm's training loss diverges, or rises above an earlier point of its "
            "curve by more than batch noise explains (5.97 standard deviations of a point); Pre-Norm's does not.",
            origin="sentence",
            criteria=_oscillates,
        ),
        corrected=Rule(
            text="After training, Post-Norm's held-out loss is not below the unigram plateau by the margin; Pre-Norm's "
            "is.",
            origin="sentence",
            criteria=_stalls,
        ),
        correction="At this depth, at a learning rate that Pre-Norm bears, Post-Norm without warm-up does not "
        "oscillate or diverge: it stalls at the unigram plateau, having learnt how often bytes occur and nothing of "
        "their order, while Pre-Norm trains.",
        control=Control(
            text="The wirings swapped: Pre-Norm, at the largest rate that Post-Norm bears, must not stall.",
            plays={"post": "pre/warmup-0", "pre": "post/warmup-0"},
        ),
        summary=_a_summary,
        figures=lambda e: [
            curves_chart(e, {"post": "Post-Norm", "pre": "Pre-Norm"}),
            map_chart(e, {"post": "Post-Norm", "pre": "Pre-Norm"}),
        ],
        explanation=Explanation(
            text="Post-Norm's large gradients at the last layers (F1) may let the first steps saturate the end of the "
            "network before its beginning has learnt anything; Adam bounds the size of steps and so keeps that from "
            "showing as a divergence.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F3b",
        title="Post-Norm needs warm-up",
        sentence="Deep Post-Norm stacks must be trained with warm-up to converge stably.",
        sentences=(38,),
        source="Article, “Post-Norm”; Xiong et al. 2020, section 3.",
        measured=_MEASURED
        + "Judged without warm-up at two rates: at Post-Norm's best (chosen on the loss it is judged by, which favours "
        "it) and at the largest at which 4 of 5 seeds of Pre-Norm train." + _DEPTH,
        study=STUDY,
        plays={_B_POST: "post/warmup-0", _B_PRE: "pre/warmup-0"},
        literal=Rule(
            text="Without warm-up Post-Norm stays at the unigram plateau even at its best learning rate.",
            origin="sentence",
            criteria=_converges_only_with,
        ),
        corrected=Rule(
            text="Without warm-up Post-Norm trains at its best learning rate, but stays at the unigram plateau at the "
            "largest rate that Pre-Norm bears without warm-up.",
            origin="sentence",
            criteria=_stuck_where_pre_trains,
        ),
        correction="At this depth Post-Norm trains without warm-up if the learning rate is small enough; at rates that "
        "Pre-Norm bears without warm-up it stays at the unigram plateau.",
        control=Control(
            text="The wirings swapped: Pre-Norm, at the largest rate that Post-Norm bears, must not stay at the "
            "plateau.",
            plays={_B_POST: "pre/warmup-0", _B_PRE: "post/warmup-0"},
        ),
        summary=_b_summary,
        figures=lambda e: [map_chart(e, {_B_POST: "Post, no warm-up", _B_PRE: "Pre, no warm-up"})],
        explanation=Explanation(
            text="If the first updates are what must stay small, a small constant rate serves as well as a rising one.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F3c",
        title="Pre-Norm and warm-up",
        sentence="Under Pre-Norm the stream is an uninterrupted highway and gradients reach every layer directly: "
        "training is very stable and not sensitive to warm-up.",
        sentences=(39,),
        source="Article, “Pre-Norm”; Xiong et al. 2020, section 4.",
        measured=_MEASURED + "Stability is judged over a tenfold range of learning rates, sensitivity with each arm at "
        "its best (chosen on the loss it is judged by, for both arms alike)." + _DEPTH,
        study=STUDY,
        plays={"with": f"pre/warmup-{WARMUP}", "without": "pre/warmup-0"},
        literal=Rule(
            text=f"Without warm-up Pre-Norm trains at every learning rate from {DECADE[0]:g} to {DECADE[-1]:g}; and "
            "with each arm at its best rate, warm-up changes held-out loss by no more than the margin.",
            origin="sentence",
            criteria=_insensitive,
        ),
        control=Control(
            text="The wirings swapped: without warm-up Post-Norm must not train over that whole range.",
            plays={"with": f"post/warmup-{WARMUP}", "without": "post/warmup-0"},
        ),
        summary=_c_summary,
        figures=lambda e: [map_chart(e, {"without": "Pre, no warm-up", "with": f"Pre, warm-up {WARMUP}"})],
        explanation=Explanation(
            text="Pre-Norm's gradients near the output are smaller the deeper the network (F1), so the first updates "
            "may need no warm-up to stay harmless.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F3d",
        title="Warm-up buys learning rate",
        sentence="Warm-up lets deep Post-Norm stacks converge where they otherwise would not: it raises the largest "
        "learning rate that Post-Norm bears.",
        sentences=(38,),
        source="Article, “Post-Norm”, read as a statement on learning rates; Xiong et al. 2020, section 3.",
        measured=_MEASURED
        + "Compared is the largest learning rate of the grid at which 4 of 5 seeds train; where more than 1 of 5 still "
        "trains at the next rate, it is only known to lie between the two. This rule was part of F3b in its first run, "
        "where it came out “fails” without that uncertainty." + _DEPTH,
        study=STUDY,
        plays={"with": f"post/warmup-{WARMUP}", "without": "post/warmup-0"},
        literal=Rule(
            text="The largest learning rate at which 4 of 5 seeds train is higher with warm-up than without. If either "
            "lies on the edge of the grid, or both between the same two rates, this is not decided.",
            origin="sentence",
            criteria=_bears_more,
        ),
        control=Control(
            text="The warm-up taken away: the runs without it play both parts, and bear no more than themselves.",
            plays={"with": "post/warmup-0", "without": "post/warmup-0"},
        ),
        planted=Control(
            text="At the middle rate of the decade the runs without warm-up are replaced by their own runs at its "
            "upper end, which Post-Norm does not bear: the same judgement must now find that warm-up raises the rate.",
            plays={
                "with": f"post/warmup-{WARMUP}",
                "without": "post/warmup-0",
                f"without/lr-{DECADE[1]:g}": f"post/warmup-0/lr-{DECADE[2]:g}",
            },
        ),
        summary=_d_summary,
        figures=lambda e: [
            share_chart(e, {"without": "Post, no warm-up", "with": f"Post, warm-up {WARMUP}"}),
            map_chart(e, {"without": "Post, no warm-up", "with": f"Post, warm-up {WARMUP}"}),
        ],
        explanation=Explanation(
            text="While the rate rises, the first updates are as small as those of a smaller constant rate.",
            status="conjecture",
        ),
    ),
)
