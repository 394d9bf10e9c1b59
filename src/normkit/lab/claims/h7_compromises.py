"""H7: what the compromises come to at twelve blocks, where Post-Norm does not train: the table of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.h5_twelve_blocks import CONTENDERS, LAYERS, RATES, ROWS, STEPS, STUDY, WIDTH
from normkit.lab.corpus import CONTEXT, HELDOUT_TELLS
from normkit.lab.figures import Chart, Figure, Panel, Series
from normkit.lab.grid.figures import curves_chart, outcome_map
from normkit.lab.grid.reading import Side, trained_range
from normkit.lab.numbers import estimate, number
from normkit.lab.verdict import Criterion

ENDS = tuple(f"warmup-0/lr-{lr:g}" for lr in RATES)
COMPROMISES = ("deepnorm", "sandwich", "reordered", "reordered-qk", "mix-ln", "lns", "keel", "dyt", "derf")

MEASURED = (
    f"Networks of {LAYERS} blocks (width {WIDTH}, SwiGLU, RMSNorm, RoPE, Xavier and what each wiring's source scales), "
    f"the same draws and batches, {STEPS} steps of {ROWS} × {CONTEXT} bytes of real text at "
    f"{' and '.join(f'{lr:g}' for lr in RATES)}, Adam(.9, .98), no warm-up; each judged at the rate at which its "
    "held-out loss is lower. A run has trained when that loss is below the entropy of the text's byte frequencies by a "
    "tenth of what one byte of context is worth; else it is stuck, or diverged. "
)


def side(role: str) -> Side:
    """Return a contender over its two rates."""
    return Side(role, ENDS)


def best_losses(e: Evidence, role: str) -> list[float]:
    """Return held-out losses at the better rate, the plateau for runs that diverged, one a seed."""
    found = side(role)
    return [found.unigram(e) - gain for gain in e.numbers(found.best(e), "gain")]


def compared(name: str, values: Sequence[float], kind: Literal["above", "at_most", "below"]) -> Criterion:
    """Return a criterion on a difference of held-out losses."""
    return Criterion(
        name=f"{name}, paired (nats/byte)",
        values=values,
        kind=kind,
        target=0.0,
        tolerance=0.01,
        reason=HELDOUT_TELLS,
    )


def gains(e: Evidence, role: str, trains: bool) -> Criterion:
    """Return a criterion on whether a contender trains at its better rate."""
    path = side(role).best(e)
    return Criterion(
        name=f"{role}: held-out gain over the unigram plateau at its better rate (nats/byte)",
        values=e.numbers(path, "gain"),
        kind="above" if trains else "at_most",
        target=0.0,
        tolerance=float(e.first(path, "margin")),
        reason="a tenth of what the previous byte tells about a byte in this text: a run that has gained less has "
        "learnt little beyond the bytes' frequencies",
    )


def _every_rate_stuck(e: Evidence, role: str) -> list[Criterion]:
    margin = float(e.first(f"{role}/{ENDS[0]}", "margin"))
    return [
        Criterion(
            name=f"{role}, {end.partition('/')[2]}: held-out gain over the unigram plateau (nats/byte)",
            values=e.numbers(f"{role}/{end}", "gain"),
            kind="at_most",
            target=0.0,
            tolerance=margin,
            reason="a tenth of what the previous byte tells about a byte in this text",
        )
        for end in ENDS
    ]


def _behind(e: Evidence) -> list[float]:
    pairs = zip(best_losses(e, "without"), best_losses(e, "with"), strict=True)
    return [a - b for a, b in pairs]


def _told(e: Evidence, role: str) -> str:
    return f"{estimate(best_losses(e, role))} ({trained_range(e, side(role))})"


def _deepnorm_summary(e: Evidence) -> str:
    return f"held-out loss: DeepNorm {_told(e, 'deepnorm')}, Post {_told(e, 'post')}; plateau {_plateau(e, 'post')}"


def _plateau(e: Evidence, role: str) -> str:
    return number(side(role).unigram(e), 3)


def _all_summary(e: Evidence) -> str:
    means = {role: sum(best_losses(e, role)) / len(best_losses(e, role)) for role in COMPROMISES}
    best, worst = (f(means, key=lambda role: means[role]) for f in (min, max))
    return (
        f"held-out loss from {number(means[best], 3)} ({best}) to {number(means[worst], 3)} ({worst}); Pre "
        f"{estimate(best_losses(e, 'pre'))}, plateau {_plateau(e, 'pre')} nats/byte"
    )


def _qk_summary(e: Evidence) -> str:
    return f"held-out loss without QK-norm {_told(e, 'without')}, with it {_told(e, 'with')}"


def _table(e: Evidence) -> list[Figure]:
    names = [*COMPROMISES, "pre", "post"]
    places = list(range(len(names)))
    losses = [best_losses(e, name) for name in names]
    means = [sum(row) / len(row) for row in losses]
    plateau = side("pre").unigram(e)
    points = Series("at the better rate", places, means, [min(r) for r in losses], [max(r) for r in losses], "points")
    limit = Series("unigram plateau", places, [plateau] * len(places), kind="reference")
    chart = Chart(
        caption=f"Held-out loss after {STEPS} steps, each at the better of its two rates. Bands: min–max over seeds.",
        alt=", ".join(f"{CONTENDERS[n].label}: {number(m, 3)}" for n, m in zip(names, means, strict=True)),
        panels=[Panel("what training comes to", "", "held-out loss (nats/byte)", [points, limit], x_names=names)],
    )
    return [outcome_map(e, {CONTENDERS[name].label: side(name) for name in names}), chart]


def _pair(e: Evidence, roles: dict[str, str]) -> list[Figure]:
    sides = {label: side(role) for role, label in roles.items()}
    return [outcome_map(e, sides), curves_chart(e, sides)]


_PLAYS = {name: name for name in ("pre", "post", *COMPROMISES)}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="H7a",
        title="DeepNorm trains where Post-Norm does not",
        sentence="DeepNorm multiplies the residual path of Post-Norm by a constant and draws smaller weights, so that "
        "Post-Norm's structure too can be stacked deep and stable.",
        sentences=(42,),
        source="Article, “Compromises”; Wang et al. 2022 (DeepNet), arXiv 2203.00555.",
        measured=MEASURED + f"{LAYERS} blocks, not a thousand: G3 is about those.",
        study=STUDY,
        plays={"deepnorm": "deepnorm", "post": "post"},
        literal=Rule(
            text="At its better rate DeepNorm's held-out loss is below the unigram plateau by the margin, and "
            "Post-Norm's is not.",
            origin="sentence",
            criteria=lambda e: [gains(e, "deepnorm", trains=True), gains(e, "post", trains=False)],
        ),
        control=Control(
            text="α and the smaller weights taken away: Post-Norm and DeepNorm swapped.",
            plays={"deepnorm": "post", "post": "deepnorm"},
        ),
        summary=_deepnorm_summary,
        figures=lambda e: _pair(e, {"deepnorm": "DeepNorm", "post": "Post-Norm"}),
        explanation=Explanation(
            text="What one step of training does to the network's output grows with depth under Post-Norm and not "
            "under DeepNorm (G2).",
            status="conjecture",
        ),
    ),
    Claim(
        id="H7b",
        title="Compromises at twelve blocks, the first steps",
        sentence="Post-Norm and Pre-Norm both have their price, and so compromises appeared: DeepNorm, Sandwich, norms "
        "on the branch alone, and others since.",
        sentences=(42, 43),
        source="Article, “Compromises”; sources of the wirings in docs/wirings.md. That each trains where Post-Norm "
        "does not is our reading.",
        measured=MEASURED
        + f"DyT and Derf start from α = 0.5. One that is stuck after {STEPS} steps may be a late starter.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text=f"After {STEPS} steps at its better rate each of the nine has a held-out loss below the unigram "
            f"plateau by the margin: {', '.join(COMPROMISES)}.",
            origin="theory",
            criteria=lambda e: [gains(e, role, trains=True) for role in COMPROMISES],
        ),
        control=Control(
            text="Post-Norm in the place of every compromise.",
            plays={name: "pre" if name == "pre" else "post" for name in _PLAYS},
        ),
        planted=Control(
            text="Pre-Norm in the place of every compromise: a wiring that trains must pass.",
            plays={name: "post" if name == "post" else "pre" for name in _PLAYS},
        ),
        summary=_all_summary,
        figures=_table,
        explanation=Explanation(
            text="Those that train leave the stream a way past the norms, or weigh it so that a norm takes little of "
            "it. Mix-LN keeps Post-Norm's first blocks; DyT and Derf hand a sublayer half of what a norm would, and "
            f"have {STEPS} steps to learn a larger α. Little is said of who is ahead in the end.",
            status="conjecture",
        ),
    ),
    Claim(
        id="H7c",
        title="Norm on the branch alone, trained",
        sentence="Queries and keys get a norm of their own; OLMo 2, which norms what a sublayer adds and not what it "
        "reads, cannot do without.",
        sentences=(46,),
        source="Article, “QK-Norm”; OLMo 2, arXiv 2501.00656. That the one needs the other is our reading.",
        measured=MEASURED,
        study=STUDY,
        plays={"without": "reordered", "with": "reordered-qk"},
        literal=Rule(
            text="Without QK-norm the network stays at the unigram plateau at both rates; with it, it trains.",
            origin="sentence",
            criteria=lambda e: [*_every_rate_stuck(e, "without"), gains(e, "with", trains=True)],
        ),
        corrected=Rule(
            text="Without QK-norm the network trains, to a held-out loss above that with it by more than 0.01 nats.",
            origin="theory",
            criteria=lambda e: [
                gains(e, "without", trains=True),
                compared("loss without QK-norm minus that with it, each at its better rate", _behind(e), "above"),
            ],
        ),
        correction="With a norm on the branch alone a network of 12 blocks trains without QK-norm as well, but it "
        "comes less far in the same number of steps.",
        control=Control(
            text="The arms with and without QK-norm swapped.",
            plays={"without": "reordered-qk", "with": "reordered"},
        ),
        summary=_qk_summary,
        figures=lambda e: _pair(e, {"without": "no QK-norm", "with": "QK-norm"}),
        explanation=Explanation(
            text="The stream that attention reads grows with depth, and its scores with the square; a saturated "
            "softmax passes hardly a gradient to queries and keys. QK-norm takes the stream's size out of the scores.",
            status="conjecture",
        ),
    ),
)
