"""G6: initial weights that do a norm's work: ReZero, FixUp and T-Fixup, before training and in the first step.

ReZero multiplies every branch by a learnt λ that starts at 0; FixUp draws the last map of every branch as 0. Either
way the fresh network is the identity from its first stream to its last. What one step of gradient descent then does
follows from the branches' gradients. FixUp's others are scaled by n^(−1/(2m−2)), n branches of m maps: each of the n
last maps moves the output by its input's mean square, ∝ 1/n, and the sum does not depend on n. T-Fixup scales maps and
embedding so that the same sum is bounded. ReZero moves the output by Σ ⟨g, F_l⟩ F_l over all n branches. Nothing
divides by n: the terms share the direction of −g (their sum ∝ n) beside a random part (∝ √n) that is the larger one
while n is below the stream's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.model.zoo import ScaledBranch
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

WIDTH, HEADS, ROWS, LENGTH = 16, 2, 2, 32
NETWORKS = {"rezero": 8, "fixup": 4, "t-fixup": 16, "plain": 2}  # averaged in mean square: more where draws differ more
DEPTHS = (2, 4, 8, 16, 32)
RATE = 1e-6  # over the gradient's norm where that is above 1: so small that the step is linear at every depth
JACOBIAN_BLOCKS, JACOBIAN_WIDTH, JACOBIAN_LENGTH = 6, 24, 3
LABELS = {"rezero": "ReZero", "fixup": "FixUp", "t-fixup": "T-Fixup", "plain": "no norm, plain weights"}
VALUE_PATH = {"value": "first", "output": "last", "up": "first", "down": "last"}  # two maps a branch


def gains(name: str, blocks: int) -> dict[str, float]:
    """Return what multiplies the first and the last map of every branch, and the embedding, of ``blocks`` blocks.

    FixUp: n^(−1/(2m−2)) with n = 2·blocks branches of m = 2 maps, and 0. T-Fixup: 0.67·N^(−1/4) as in an encoder (a
    stack without cross-attention), and (9N)^(−1/4) for the embedding.
    """
    if name == "fixup":
        return {"first": (2 * blocks) ** -0.5, "last": 0.0, "embedding": 1.0}
    if name == "t-fixup":
        return {"first": 0.67 * blocks**-0.25, "last": 0.67 * blocks**-0.25, "embedding": (9 * blocks) ** -0.25}
    return {"first": 1.0, "last": 1.0, "embedding": 1.0}


@torch.no_grad()
def network(name: str, blocks: int, width: int, draws: Draws) -> Transformer:
    """Return a network without any norm whose weights are `build`'s draw, times the initialization's gains."""
    config = TransformerConfig(layers=blocks, width=width, heads=HEADS, feed_forward="relu", final_norm=False)
    model = build(config, draws)
    sublayers = [f for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]
    model.steps = nn.ModuleList(ScaledBranch(f, None, torch.zeros(()) if name == "rezero" else None) for f in sublayers)
    factors = gains(name, blocks)
    for path, linear in model.weights().items():
        role = path.rpartition("/")[2]
        if role in VALUE_PATH:
            linear.weight.mul_(factors[VALUE_PATH[role]])
    model.embedding.weight.mul_(factors["embedding"])
    return model


def _through(model: Transformer, x: Tensor) -> Tensor:
    """Return the stream behind the last step; ``x`` is the stream before the first."""
    for step in model.steps:
        x = step(x)
    return x


def off_identity(model: Transformer, x: Tensor) -> tuple[float, float]:
    """Return the largest |f(x) − x| and the largest element of |∂f/∂x − I|, f being all residual steps."""
    x = x.requires_grad_()
    y = _through(model, x)
    identity = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    rows = [torch.autograd.grad(y, x, e.view_as(x), retain_graph=True)[0].flatten() for e in identity]
    return float((y - x).detach().abs().max()), float((torch.stack(rows) - identity).abs().max())


def change(model: Transformer, windows: Tensor, rate: float = RATE) -> Tensor:
    """Return the change of what the head reads by one step of gradient descent, over the step's learning rate.

    All that belongs to the residual steps moves, λ among it; embedding and head stand still. The model is changed.
    """
    parameters = list(model.steps.parameters())
    gradients = torch.autograd.grad(next_byte_loss(model, windows), parameters)
    with torch.no_grad():
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        rate = rate / max(1.0, norm)
        before = _through(model, model.embedding(windows[:, :-1]))
        for p, gradient in zip(parameters, gradients, strict=True):
            p.sub_(gradient, alpha=rate)
        return (_through(model, model.embedding(windows[:, :-1])) - before) / rate


def moved(name: str, blocks: int, bench: Bench) -> float:
    """Return the rms change of the features over the learning rate, averaged over fresh networks."""
    squares: list[float] = []
    for draws in independent(bench.draws, NETWORKS[name]):
        model = network(name, blocks, WIDTH, draws).to(bench.settings.device).double()
        windows = random_windows(bench, draws, ROWS, LENGTH)
        squares.append(float(change(model, windows).square().mean()))
    return (sum(squares) / len(squares)) ** 0.5


def _measure(params: Params, bench: Bench) -> Values:
    name = params["init"]
    model = network(name, JACOBIAN_BLOCKS, JACOBIAN_WIDTH, bench.draws).to(bench.settings.device)
    x = bench.draws.randn(1, JACOBIAN_LENGTH, JACOBIAN_WIDTH, stream="stream").to(bench.settings.device)
    output, jacobian = off_identity(model, x)
    return {
        "output off": output,
        "jacobian off": jacobian,
        "moved": [moved(name, blocks, bench) for blocks in DEPTHS],
    }


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"init": name}) for name in LABELS]


STUDY = Study(
    id="without_norms",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.2 + 0.17 * NETWORKS[params["init"]],
    seeds=5,
    corpus=True,
)


def _identity_criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"{what}, {role}",
            values=e.numbers(role, key),
            kind="near",
            target=0.0,
            tolerance=0.0,
            reason="exact: a branch of 0 adds 0 to the stream and 0 to its gradient, which rounds nothing",
            every=True,
        )
        for role in ("rezero", "fixup")
        for what, key in (("largest |J − I|", "jacobian off"), ("largest |f(x) − x|", "output off"))
    ]


def _slopes(e: Evidence, role: str) -> list[float]:
    return [log_log_slope(DEPTHS, row) for row in e.values(role, "moved")]


_WHY = (
    "0, 1/2 and 1 are the exponents in question: doubled, 0.4 still tells 0 from 1/2; half of it leaves room for what "
    "networks of this width differ by"
)


def _exponent(e: Evidence, role: str, kind: str, target: float) -> Criterion:
    assert kind in ("near", "at_least")
    return Criterion(f"slope over ln L of ln (change / rate), {role}", _slopes(e, role), kind, target, 0.2, _WHY)


def _step_literal(e: Evidence) -> list[Criterion]:
    return [
        *(_exponent(e, role, "near", 0.0) for role in ("fixup", "t-fixup", "rezero")),
        _exponent(e, "plain", "at_least", 1.0),
    ]


def _step_corrected(e: Evidence) -> list[Criterion]:
    return [
        *(_exponent(e, role, "near", 0.0) for role in ("fixup", "t-fixup")),
        _exponent(e, "rezero", "at_least", 0.5),
        _exponent(e, "plain", "at_least", 1.0),
    ]


def _identity_summary(e: Evidence) -> str:
    worst = {role: max(e.numbers(role, "jacobian off")) for role in ("rezero", "fixup", "others")}
    told = ", ".join(f"{LABELS[e.arm(role)]} {number(v, 2)}" for role, v in worst.items())
    return f"largest element of |J − I| through {2 * JACOBIAN_BLOCKS} branches: {told}"


def _step_summary(e: Evidence) -> str:
    parts = ", ".join(f"{LABELS[e.arm(r)]} {estimate(_slopes(e, r))}" for r in ("fixup", "t-fixup", "rezero", "plain"))
    return f"one SGD step moves the output by L^p, p = {parts}"


def _identity_figures(e: Evidence) -> list[Chart]:
    roles = ("rezero", "fixup", "others", "plain")
    names = [LABELS[e.arm(role)] for role in roles]
    off = [max(e.numbers(role, "jacobian off")) for role in roles]
    floor = 2.0**-24  # half a unit in the last place of 1
    told = "; ".join(f"{name} {number(v, 2)}" for name, v in zip(names, off, strict=True))
    return [
        Chart(
            caption=f"Largest element of |∂f/∂x − I| through {JACOBIAN_BLOCKS} fresh blocks, over seeds, float32. An "
            "exact zero is drawn at half a unit in the last place of 1 (dashed).",
            alt=f"{told}.",
            panels=[
                Panel(
                    "how far from the identity",
                    "initialization",
                    "largest |J − I|",
                    [
                        Series("largest |J − I|", [0, 1, 2, 3], [max(v, floor) for v in off], kind="points"),
                        Series("half a unit in the last place", [0, 3], [floor, floor], kind="reference"),
                    ],
                    y_scale="log",
                    x_names=names,
                )
            ],
        )
    ]


def _step_figures(e: Evidence) -> list[Chart]:
    def panel(title: str, roles: tuple[str, ...], laws: dict[str, tuple[str, float]]) -> Panel:
        lines = {role: band(LABELS[e.arm(role)], DEPTHS, e.values(role, "moved")) for role in roles}
        drawn = [
            Series(label, DEPTHS, [lines[role].y[0] * (d / DEPTHS[0]) ** power for d in DEPTHS], kind="reference")
            for label, (role, power) in laws.items()
        ]
        return Panel(
            title,
            "blocks L",
            "change / learning rate",
            [*lines.values(), *drawn],
            x_scale="log",
            y_scale="log",
        )

    return [
        Chart(
            caption="Root-mean-square change of the features that the head reads after one small step of gradient "
            "descent on all blocks, divided by the learning rate. Bands: min–max over seeds.",
            alt="FixUp and T-Fixup are level over depth; ReZero rises, between dashed lines ∝ √L and ∝ L; on its own "
            "axes the network with plain weights rises by many powers of ten.",
            panels=[
                panel(
                    "drawn to replace norms",
                    ("fixup", "t-fixup", "rezero"),
                    {"∝ √L": ("rezero", 0.5), "∝ L": ("rezero", 1.0)},
                ),
                panel("no norm, no such care", ("plain",), {}),
            ],
        )
    ]


_NETWORK = "A Transformer without any norm (ReLU, Xavier times the initialization's own gains)"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="G6",
        title="Without norms, starting as the identity",
        sentence="A residual network can start as the exact identity instead of being normalized: ReZero multiplies "
        "each branch by a learnt scalar that starts at 0, FixUp draws each branch's last map as 0, and the "
        "Jacobian from input to output is I.",
        sentences=(),
        source="Bachlechner et al. 2020, arXiv 2003.04887 (ReZero); Zhang et al. 2019, arXiv 1901.09321 (Fixup). What "
        "the article's norms are there for, reached without one.",
        measured=f"{_NETWORK}, {JACOBIAN_BLOCKS} blocks of width {JACOBIAN_WIDTH}, float32: output and all "
        f"{JACOBIAN_LENGTH * JACOBIAN_WIDTH}² elements of the Jacobian of the residual steps at a random stream.",
        study=STUDY,
        plays={"rezero": "rezero", "fixup": "fixup", "others": "t-fixup", "plain": "plain"},
        literal=Rule(
            text="Under ReZero and under FixUp f(x) = x and J = I, bit for bit, at every seed.",
            origin="theory",
            criteria=_identity_criteria,
        ),
        control=Control(
            text="The same draw with every branch left in: no factor 0, no map drawn as 0.",
            plays={"rezero": "plain", "fixup": "plain", "others": "t-fixup", "plain": "rezero"},
        ),
        summary=_identity_summary,
        figures=_identity_figures,
        explanation=Explanation(
            text="A branch of 0 adds nothing going forward; going back its gradient is multiplied by the same 0. With "
            "branches left in, every step adds one of the stream's own size and the Jacobian grows with depth. T-Fixup "
            "keeps small branches: near the identity, not on it.",
            status="tested",
        ),
    ),
    Claim(
        id="G6b",
        title="Without norms, a first step that depth does not change",
        sentence="With the right initial weights no norm is needed: under FixUp, T-Fixup and ReZero one step of "
        "gradient descent with learning rate η moves the network's output by Θ(η), however deep it is.",
        sentences=(),
        source="Zhang et al. 2019, arXiv 1901.09321 (Fixup); Huang et al. 2020, PMLR 119 (T-Fixup); Bachlechner et al. "
        "2020, arXiv 2003.04887 (ReZero).",
        measured=f"{_NETWORK}, {DEPTHS[0]} … {DEPTHS[-1]} blocks of width {WIDTH}, float64: one step of gradient "
        "descent on the blocks (η → 0) for windows of real text, and the rms change of what the head reads, over η; "
        "mean square of 2 to 16 networks. The head keeps its draw: with FixUp's zero head no branch would move in "
        "the first step. FixUp's scalar biases and multipliers are left out.",
        study=STUDY,
        plays={"fixup": "fixup", "t-fixup": "t-fixup", "rezero": "rezero", "plain": "plain"},
        literal=Rule(
            text="Exponent of the change over depth 0 ± 0.2 for FixUp, T-Fixup and ReZero; with plain weights at least "
            "1, less 0.2.",
            origin="sentence",
            criteria=_step_literal,
        ),
        corrected=Rule(
            text="Exponent 0 ± 0.2 for FixUp and T-Fixup; for ReZero at least 1/2, less 0.2; with plain weights at "
            "least 1, less 0.2.",
            origin="theory",
            criteria=_step_corrected,
        ),
        correction="True of FixUp and T-Fixup. ReZero's first step grows with depth, between √L and L: all its scalars "
        "move at once, and nothing divides by their number. Depth must be paid for by a smaller learning rate.",
        control=Control(
            text="Plain weights, without a norm, in the three initializations' roles.",
            plays={"fixup": "plain", "t-fixup": "plain", "rezero": "plain", "plain": "fixup"},
        ),
        summary=_step_summary,
        figures=_step_figures,
        explanation=Explanation(
            text="FixUp: each of the n branches moves the output by its hidden mean square, ∝ 1/n. T-Fixup: the same "
            "sum with both maps ∝ N^(−1/4) and a stream ∝ N^(−1/4). ReZero: Σ ⟨g, F_l⟩F_l, n terms of equal size, part "
            "of which points along −g. Plain weights: every step adds a branch as large as the stream, so stream and "
            "gradient grow exponentially.",
            status="tested",
        ),
    ),
)
