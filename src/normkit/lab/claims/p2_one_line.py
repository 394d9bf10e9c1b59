"""P2: Post-Norm and Pre-Norm have the same parts and differ in the order in which forward uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.functional import rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.model.feedforward import ReLUFeedForward
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import RMSNorm
from normkit.placement import WIRINGS, Residual, placement

WIDTH, HIDDEN, TOKENS = 24, 56, 64
ORDERS = {"N(x + F(x))": "post", "x + F(N(x))": "pre"}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"wiring": name}) for name in ("post", "pre", "sandwich")]


def _block(wiring: str, normed: bool, draws: Draws) -> Residual:
    """Build one step around a feed-forward; weights and gains come from streams that all arms share."""
    sublayer = ReLUFeedForward(WIDTH, HIDDEN)
    norm = RMSNorm if normed else lambda width: nn.Identity()
    block = placement(wiring)(WIDTH, sublayer, norm=norm, depth=1)
    with torch.no_grad():
        for name, linear in (("up", sublayer.up), ("down", sublayer.down)):
            linear.weight.copy_(draws.randn(*linear.weight.shape, stream=name) * linear.in_features**-0.5)
        for module in block.children():
            if isinstance(module, RMSNorm):
                assert module.weight is not None
                module.weight.copy_(_gain(draws))
    return block


def _gain(draws: Draws) -> Tensor:
    return 1 + 0.3 * draws.randn(WIDTH, stream="gain")


@torch.no_grad()
def _measure(params: Params, bench: Bench) -> Values:
    draws = bench.draws
    x = 2 * draws.randn(TOKENS, WIDTH)
    gain = _gain(draws)
    block, bare = (_block(params["wiring"], normed, draws) for normed in (True, False))
    (sublayer,) = block.sublayers
    orders = {"N(x + F(x))": rms_norm(x + sublayer(x), gain), "x + F(N(x))": x + sublayer(rms_norm(x, gain))}
    got = block(x)
    return {
        "parameters": sum(p.numel() for p in block.parameters()),
        "norms": sum(isinstance(m, RMSNorm) for m in block.modules()),
        "from order": {name: float((got - y).abs().max()) for name, y in orders.items()},
        "bare": float((bare(x) - (x + sublayer(x))).abs().max()),
        "apart": float((orders["N(x + F(x))"] - orders["x + F(N(x))"]).square().mean().sqrt()),
    }


STUDY = Study(id="one_line", arms=_arms, measure=_measure, seconds=lambda params: 0.05, seeds=3)


def _from(e: Evidence, role: str, order: str) -> list[float]:
    return [float(row[order]) for row in e.values(role, "from order")]


_BITS = "the same operations in the same order: the same bits"


def _criteria(e: Evidence) -> list[Criterion]:
    count = Criterion(
        name="parameters of a Pre-Norm step less those of a Post-Norm step",
        values=e.paired("pre", "post", "parameters"),
        kind="near",
        target=0.0,
        tolerance=0.0,
        reason="a count",
        every=True,
    )
    forwards = [
        Criterion(f"{role}: largest difference from {order}", _from(e, role, order), "at_most", 0.0, 0.0, _BITS, True)
        for order, role in ORDERS.items()
    ]
    bare = [
        Criterion(
            name=f"{role} without its norm: largest difference from x + F(x)",
            values=e.numbers(role, "bare"),
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason=_BITS,
            every=True,
        )
        for role in ("post", "pre")
    ]
    matters = Criterion(
        name="rms difference between the two orders' outputs",
        values=e.numbers("post", "apart"),
        kind="above",
        target=0.0,
        tolerance=1e-3,
        reason="far above the rounding of float32 numbers of order 1, 10⁻⁷: the order changes what is computed",
        every=True,
    )
    return [count, *forwards, *bare, matters]


def _summary(e: Evidence) -> str:
    apart = number(min(e.numbers("post", "apart")), 2)
    counts = {int(n) for role in ("post", "pre") for n in e.numbers(role, "parameters")}
    return (
        f"{' and '.join(map(str, sorted(counts)))} parameters in both; equal to the bit without the norm; with it "
        f"outputs differ by an rms of at least {apart}"
    )


def _figures(e: Evidence) -> list[Chart]:
    roles = ("post", "pre")
    places = list(range(len(roles)))
    bars = [Series(f"from {o}", places, [_from(e, role, o)[0] for role in roles], kind="bars") for o in ORDERS]
    return [
        Chart(
            caption="Largest difference of a step's output from each of the two orders (first seed). A missing bar is "
            "an exact zero.",
            alt="Post-Norm differs from x + F(N(x)) alone and Pre-Norm from N(x + F(x)) alone.",
            panels=[
                Panel(
                    "which order a step computes",
                    "wiring",
                    "largest difference",
                    bars,
                    x_names=[WIRINGS[role].class_name for role in roles],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="P2",
        title="Post-Norm and Pre-Norm differ in one line",
        sentence="The two wirings differ only in the order within one line of forward: the norm after the residual "
        "sum, or before the sublayer.",
        sentences=(44,),
        source="Article, “Implementation”.",
        measured=f"One step of each wiring around the same feed-forward (width {WIDTH}), same weights and gains, in "
        "float32: its parameters, and its output against both orders written out with normkit.rms_norm, bit for bit; "
        "once more with the norm replaced by the identity.",
        study=STUDY,
        plays={"post": "post", "pre": "pre"},
        literal=Rule(
            text="Both steps have the same number of parameters; Post-Norm's output is N(x + F(x)) and Pre-Norm's "
            "x + F(N(x)), to the bit; without the norm both are x + F(x), to the bit; the two orders differ by far "
            "more than rounding.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="Sandwich norm in Pre-Norm's role: a wiring that differs by a part, not by an order.",
            plays={"post": "post", "pre": "sandwich"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="True of a block. Of a whole model it leaves out the final norm that Pre-Norm needs (A5), and that "
            "nothing else may be kept the same: the best learning rate and warm-up differ (F3).",
            status="tested",
        ),
    ),
)
