"""F4: warm-up, learning rate and wiring at 6 blocks and at 24, where the article's "dozens of layers" begin.

Each arm stands at its own best learning rate, chosen on the held-out loss it is judged by, which favours all alike. Two
seeds say nothing of the spread between seeds: at 24 blocks every run must say the same, or the rule fails.
"""

from __future__ import annotations

from normkit.lab.claim import Claim, Control, Evidence, Explanation, Rule
from normkit.lab.claims.f3_map import DECADE, TENS
from normkit.lab.claims.f4_depth_map import DEEP, MAPS, ROWS, SEEDS, SHALLOW, STEPS, WARMUPS, WIDTH
from normkit.lab.figures import Figure
from normkit.lab.grid.figures import curves_chart, loss_chart, outcome_map
from normkit.lab.grid.reading import Side, outcomes, trained_range
from normkit.lab.numbers import estimate
from normkit.lab.verdict import Criterion

RATES = tuple(f"lr-{lr:g}" for lr in DECADE)
POINTS = tuple(f"warmup-{warmup}/{rate}" for warmup in WARMUPS for rate in RATES)
LOW, HIGH = RATES[0], RATES[-1]
_WARMED = tuple(f"warmup-{warmup}/{rate}" for warmup in WARMUPS[1:] for rate in RATES)
LONG = WARMUPS[-1]

# The range of ten normal numbers stays below 5.97 standard deviations in 999 of 1000 cases; `TENS` steps are ten
# points of the curve.
RANGE_OF_TEN = 5.97

_WHY_MARGIN = (
    "a tenth of what the previous byte tells about a byte in this text: a run that has gained less has learnt little "
    "beyond the bytes' frequencies"
)


def over(role: str, ends: tuple[str, ...] = RATES) -> Side:
    """Return a role as a side: a wiring at one warm-up over the rates, or over ``ends``."""
    return Side(role, ends)


def whole(role: str) -> Side:
    """Return a wiring over all warm-ups and rates."""
    return Side(role, POINTS)


def _margin(e: Evidence, path: str) -> float:
    return float(e.first(path, "margin"))


def _every_run(e: Evidence, path: str, called: str, trains: bool) -> Criterion:
    return Criterion(
        name=f"{called}: held-out gain over the unigram plateau (nats/byte), every run",
        values=e.numbers(path, "gain"),
        kind="above" if trains else "at_most",
        target=0.0,
        tolerance=_margin(e, path),
        reason=_WHY_MARGIN,
        every=True,
    )


def _told(e: Evidence, side: Side) -> str:
    return f"{estimate(e.numbers(side.best(e), 'gain'))} at {side.told(e)}, {trained_range(e, side)}"


def _map(e: Evidence, sides: dict[str, Side]) -> list[Figure]:
    return [outcome_map(e, sides), loss_chart(e, sides), curves_chart(e, sides)]


# --- F4a: what warm-up costs and buys at 6 blocks ---


def _bought(e: Evidence, rate: str) -> list[float]:
    """Return by how much warm-up lowers held-out loss at a rate, paired; a run that diverged has gained nothing."""
    return e.paired(f"with/{rate}", f"without/{rate}", "gain")


def _buys(e: Evidence, rate: str, more: bool) -> Criterion:
    return Criterion(
        name=f"held-out loss without minus with warm-up at {rate.replace('-', ' ', 1)}, paired (nats/byte)",
        values=_bought(e, rate),
        kind="above" if more else "below",
        target=0.0,
        tolerance=_margin(e, f"with/{rate}"),
        reason=_WHY_MARGIN,
    )


def _helps_everywhere(e: Evidence) -> list[Criterion]:
    return [_buys(e, rate, more=True) for rate in RATES]


def _hurts_where_not_needed(e: Evidence) -> list[Criterion]:
    return [_buys(e, LOW, more=False), _every_run(e, f"without/{LOW}", f"no warm-up, {LOW}", trains=True)]


def _helps_where_needed(e: Evidence) -> list[Criterion]:
    return [_buys(e, HIGH, more=True)]


def _a_summary(e: Evidence) -> str:
    parts = ", ".join(f"{estimate(_bought(e, rate))} at {rate.removeprefix('lr-')}" for rate in RATES)
    return f"what {LONG} steps of warm-up take off held-out loss: {parts} nats/byte"


# --- F4b: the closing experiment at 24 blocks ---


def _bearable(e: Evidence) -> str:
    """Return the largest rate at which every run of "pre" trains; the smallest where there is none."""
    trained = [rate for rate in RATES if all(e.values(f"pre/{rate}", "trained"))]
    return trained[-1] if trained else RATES[0]


def _oscillates(e: Evidence) -> list[Criterion]:
    rate = _bearable(e)
    return [
        Criterion(
            name=f"{role}, {rate}: largest rise of the training loss within {TENS} steps (nats/byte), every run",
            values=e.numbers(f"{role}/{rate}", "rise"),
            kind="above" if role == "post" else "at_most",
            target=0.0,
            tolerance=RANGE_OF_TEN * float(e.first(f"{role}/{rate}", "noise")),
            reason="of level curves of ten points, 999 in 1000 stay within 5.97 standard deviations of a point's "
            "batch noise",
            every=True,
        )
        for role in ("post", "pre")
    ]


def _stalls(e: Evidence) -> list[Criterion]:
    rate = _bearable(e)
    return [
        _every_run(e, f"post/{rate}", f"post, {rate}", trains=False),
        _every_run(e, f"pre/{rate}", f"pre, {rate}", trains=True),
    ]


def _b_summary(e: Evidence) -> str:
    rate = _bearable(e)
    gains, rises = (
        [estimate(e.numbers(f"{role}/{rate}", key)) for role in ("post", "pre")] for key in ("gain", "rise")
    )
    return (
        f"{rate.replace('-', ' ', 1)}: gain over the plateau, Post {gains[0]}, Pre {gains[1]}; largest rise "
        f"{rises[0]} and {rises[1]} nats/byte"
    )


# --- F4c: warm-up and Post-Norm at 24 blocks ---


def _converges(e: Evidence) -> list[Criterion]:
    side = whole("deep")
    return [_every_run(e, side.best(e), "deep, at its best warm-up and rate", trains=True)]


def _c_summary(e: Evidence) -> str:
    side = whole("deep")
    counts = [outcomes(e, path) for path in side.paths(e) if "warmup-0/" not in path]
    total = {key: sum(count[key] for count in counts) for key in ("trained", "stuck", "diverged")}
    return (
        f"with warm-up: {total['trained']} trained, {total['stuck']} stuck, {total['diverged']} diverged; best gain "
        f"over the plateau, without warm-up or with, {_told(e, side)}"
    )


# --- F4d: Pre-Norm at 24 blocks ---


def _insensitive(e: Evidence) -> list[Criterion]:
    stable = [_every_run(e, f"without/{rate}", f"no warm-up, {rate}", trains=True) for rate in RATES]
    with_, without = over("with", _WARMED), over("without")
    gains = zip(e.numbers(with_.best(e), "gain"), e.numbers(without.best(e), "gain"), strict=True)
    same = Criterion(
        name="held-out loss without minus with warm-up, each at its best, paired (nats/byte), every run",
        values=[a - b for a, b in gains],
        kind="at_most",
        target=0.0,
        tolerance=_margin(e, without.best(e)),
        reason=_WHY_MARGIN,
        every=True,
    )
    return [*stable, same]


def _d_summary(e: Evidence) -> str:
    runs = [trained for rate in RATES for trained in e.numbers(f"without/{rate}", "trained")]
    with_, without = over("with", _WARMED), over("without")
    return (
        f"no warm-up: {sum(runs):.0f} of {len(runs)} runs train, {trained_range(e, without)}; best gain "
        f"{estimate(e.numbers(without.best(e), 'gain'))}, with warm-up {estimate(e.numbers(with_.best(e), 'gain'))}"
    )


def _measured(layers: int) -> str:
    return (
        f"The lab's Transformer ({layers} blocks, width {WIDTH}, SwiGLU, RMSNorm, RoPE, Xavier; Pre-Norm with its "
        f"final norm) trained on bytes of real text, {STEPS} steps of {ROWS} × 64 bytes, Adam(.9, .98), warm-up of "
        f"{', '.join(map(str, WARMUPS))} linear steps and then a constant learning rate of "
        f"{', '.join(f'{lr:g}' for lr in DECADE)}; {SEEDS[layers]} seeds, all runs of a seed on the same batches and "
        "initial weights. A run has trained when its loss on text it never saw is below the entropy of that text's "
        "byte frequencies by a tenth of what one byte of context is worth; else it is stuck, or diverged if a loss "
        "was not finite. "
    )


_EVERY = "Two seeds give no interval, so every run must say the same. "
_BOTH = {"Post-Norm": whole("post"), "Pre-Norm": whole("pre")}
_NO_WARMUP = {f"deep/{point}": f"post/warmup-0/{point.partition('/')[2]}" for point in POINTS}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="F4a",
        title="What warm-up costs and buys",
        sentence="Deep Post-Norm stacks must be trained with warm-up to converge stably, whatever the learning rate.",
        sentences=(38,),
        source="Article, “Post-Norm”; Xiong et al. 2020, section 3.",
        measured=_measured(SHALLOW) + f"Judged is a warm-up of {LONG} steps against none, rate by rate; the map shows "
        "all three.",
        study=MAPS[SHALLOW],
        plays={"with": f"post/warmup-{LONG}", "without": "post/warmup-0", "post": "post", "pre": "pre"},
        literal=Rule(
            text="At every learning rate of the decade warm-up lowers Post-Norm's held-out loss by more than the "
            "margin.",
            origin="sentence",
            criteria=_helps_everywhere,
        ),
        corrected=Rule(
            text=f"At {DECADE[0]:g} every run of Post-Norm trains without warm-up, and warm-up raises its held-out "
            "loss by more than the margin.",
            origin="theory",
            criteria=_hurts_where_not_needed,
        ),
        correction="At a learning rate that Post-Norm bears from the start, warm-up hurts: w steps of it give away "
        "w/2. With 6 blocks and a rate of 0.001 Post-Norm trains without warm-up, and further than with it. Whether it "
        "helps at a rate that is too large is F4e's question.",
        control=Control(
            text="The warm-up taken away: the runs without it play both parts, and neither gain nor lose by it.",
            plays={"with": "post/warmup-0", "without": "post/warmup-0", "post": "post", "pre": "pre"},
        ),
        summary=_a_summary,
        figures=lambda e: [
            outcome_map(e, _BOTH),
            loss_chart(e, _BOTH),
            curves_chart(e, _BOTH),
        ],
        explanation=Explanation(
            text="A linear warm-up of w steps makes w/2 steps' worth of way. Where the full rate is bearable from the "
            "start that is all it does.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F4e",
        title="Warm-up at a large learning rate",
        sentence="Deep Post-Norm stacks must be trained with warm-up: it lets them train at a learning rate at which "
        "they otherwise would not.",
        sentences=(38,),
        source="Article, “Post-Norm”, read as a statement on large learning rates; Xiong et al. 2020, section 3.",
        measured=_measured(SHALLOW)
        + f"Judged at {DECADE[-1]:g} is a warm-up of {LONG} steps against none. Rule and threshold were the other half "
        "of F4a's correction until two seeds in they were seen to disagree here; neither was changed.",
        study=MAPS[SHALLOW],
        plays={"with": f"post/warmup-{LONG}", "without": "post/warmup-0"},
        literal=Rule(
            text=f"At {DECADE[-1]:g} warm-up lowers Post-Norm's held-out loss by more than the margin.",
            origin="sentence",
            criteria=_helps_where_needed,
        ),
        control=Control(
            text="The arms with and without warm-up swapped.",
            plays={"with": "post/warmup-0", "without": f"post/warmup-{LONG}"},
        ),
        planted=Control(
            text="Pre-Norm, which trains at this rate, in the place of Post-Norm with warm-up: a help that is there.",
            plays={"with": "pre/warmup-0", "without": "post/warmup-0"},
        ),
        summary=_a_summary,
        figures=lambda e: [
            loss_chart(e, {"Post, none": over("without"), f"Post, warm-up {LONG}": over("with")}),
            curves_chart(e, {f"Post, warm-up {LONG}": Side("with", (HIGH,)), "Post, none": Side("without", (HIGH,))}),
        ],
        explanation=Explanation(
            text="While the rate rises the first steps are small. Whether that carries a run over the plateau before "
            "the full rate is reached differs from seed to seed.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F4b",
        title="The closing experiment at 24 blocks",
        sentence="Stack dozens of layers, fix the learning rate, drop the warm-up: Post-Norm's loss usually starts to "
        "oscillate or diverges within tens of steps, while Pre-Norm's descends smoothly.",
        sentences=(45,),
        source="Article, closing experiment of “Post-Norm and Pre-Norm”.",
        measured=_measured(DEEP)
        + "Judged without warm-up at the largest learning rate at which Pre-Norm trains. "
        + _EVERY,
        study=MAPS[DEEP],
        plays={"post": "post/warmup-0", "pre": "pre/warmup-0"},
        literal=Rule(
            text=f"In every run, within {TENS} steps Post-Norm's training loss diverges, or rises above an earlier "
            "point of its curve by more than batch noise explains (5.97 standard deviations of a point); Pre-Norm's "
            "does not.",
            origin="sentence",
            criteria=_oscillates,
        ),
        corrected=Rule(
            text="In every run Post-Norm's held-out loss is not below the unigram plateau by the margin, and "
            "Pre-Norm's is.",
            origin="sentence",
            criteria=_stalls,
        ),
        correction="With 24 blocks, at a learning rate that Pre-Norm bears, Post-Norm without warm-up neither "
        "oscillates nor diverges: it stalls at the unigram plateau, while Pre-Norm trains.",
        control=Control(
            text="The wirings swapped: Pre-Norm must not stall.",
            plays={"post": "pre/warmup-0", "pre": "post/warmup-0"},
        ),
        summary=_b_summary,
        figures=lambda e: _map(e, {"Post-Norm": over("post"), "Pre-Norm": over("pre")}),
        explanation=Explanation(
            text="Adam bounds the size of steps, so that what the first of them spoil shows as a plateau and not as a "
            "divergence.",
            status="conjecture",
        ),
    ),
    Claim(
        id="F4c",
        title="Warm-up at 24 blocks",
        sentence="Deep Post-Norm stacks must be trained with warm-up; with it, they converge stably.",
        sentences=(38,),
        source="Article, “Post-Norm”, read as saying that warm-up suffices.",
        measured=_measured(DEEP)
        + "Post-Norm is judged at the best of its warm-ups and learning rates. "
        + _EVERY
        + f"Warm-up is {LONG} of {STEPS} steps at most; thousands of steps, as are usual, are not tried.",
        study=MAPS[DEEP],
        plays={"deep": "post", **{f"deep/{point}": f"post/{point}" for point in POINTS}},
        literal=Rule(
            text="With the warm-up and learning rate that suit it best, Post-Norm's held-out loss is below the "
            "unigram plateau by the margin in every run.",
            origin="sentence",
            criteria=_converges,
        ),
        control=Control(
            text="Post-Norm without warm-up, at its best rate: it must not converge.",
            plays={"deep": "post", **_NO_WARMUP},
        ),
        planted=Control(
            text="Pre-Norm in its place: 24 blocks that train must pass.",
            plays={"deep": "pre", **{f"deep/{point}": f"pre/{point}" for point in POINTS}},
        ),
        summary=_c_summary,
        figures=lambda e: _map(e, {"Post-Norm": whole("deep")}),
        explanation=Explanation(
            text="Warm-up makes the first steps small, not the network shallow: what a step does to a Post-Norm "
            "network's output grows with depth (G2).",
            status="conjecture",
        ),
    ),
    Claim(
        id="F4d",
        title="Pre-Norm and warm-up at 24 blocks",
        sentence="Under Pre-Norm gradients reach every layer directly: training is very stable and not sensitive to "
        "warm-up.",
        sentences=(39,),
        source="Article, “Pre-Norm”; Xiong et al. 2020, section 4.",
        measured=_measured(DEEP)
        + "Sensitivity is judged with each arm at its best, warm-up of either length. "
        + _EVERY,
        study=MAPS[DEEP],
        plays={"without": "pre/warmup-0", "with": "pre"},
        literal=Rule(
            text=f"Without warm-up every run trains at every learning rate from {DECADE[0]:g} to {DECADE[-1]:g}; and "
            "with each arm at its best, warm-up lowers held-out loss by no more than the margin.",
            origin="sentence",
            criteria=_insensitive,
        ),
        control=Control(
            text="Post-Norm in Pre-Norm's place: it must not train over that whole range.",
            plays={"without": "post/warmup-0", "with": "post"},
        ),
        summary=_d_summary,
        figures=lambda e: _map(e, {"Pre-Norm": whole("with")}),
        explanation=Explanation(
            text="Pre-Norm's gradients near the output are smaller the deeper the network (F1), so that its first "
            "steps do no harm.",
            status="conjecture",
        ),
    ),
)
