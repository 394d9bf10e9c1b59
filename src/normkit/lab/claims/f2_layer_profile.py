"""F2: gradients of a fresh network layer by layer, the profile behind the article's sentence on Post-Norm.

Theory for one sublayer y = α·x + F(x), normalised or not: sent back through it, a gradient's mean square grows by
α² + |∂F|², while the signal's grew by α² + |F|². Where sublayers pass gradients as they pass signals the two are
equal. Under Post-Norm and DeepNorm the norm divides by the latter, so gradients stay level. Under Pre-Norm nothing
divides on the way, and the gradient at depth l is to that at the end as rms(x_L) to rms(x_l): it falls towards the
output as 1/√l, since the stream grows as √l (A3).

DeepNorm weighs sublayers so little that their difference between signal and gradient cannot add up; under Post-Norm it
does, and its sign depends on the sublayers. Two kinds are measured for that reason.
"""

from __future__ import annotations

import torch

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.fit import log_log_slope
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.initial import independent
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, ROWS = 16, 64, 8
NETWORKS = {"post": 8, "pre": 4, "deepnorm": 4}  # averaged in one measurement; Post-Norm's scatter most
KINDS = {"relu": "layer", "swiglu": "rms"}  # feed-forward → the norm it goes with
WIRINGS = ("post", "pre", "deepnorm")
LABELS = {"post": "Post-Norm", "pre": "Pre-Norm", "deepnorm": "DeepNorm"}
NAMES = {"relu": "ReLU, LayerNorm", "swiglu": "SwiGLU, RMSNorm"}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(f"{name}/{kind}", {"wiring": name, "kind": kind}) for name in WIRINGS for kind in KINDS]


def _squares(params: Params, bench: Bench, draws: Draws) -> list[float]:
    """Return the squared norm of the loss's gradient on every block's down-projection."""
    config = TransformerConfig(
        layers=LAYERS,
        width=WIDTH,
        heads=4,
        feed_forward=params["kind"],
        norm=KINDS[params["kind"]],
        wiring=params["wiring"],
    )
    model = build(config, draws).to(bench.settings.device)
    weights = model.weights()
    asked = [weights[f"{layer}/down"].weight for layer in range(LAYERS)]
    gradients = torch.autograd.grad(next_byte_loss(model, random_windows(bench, draws, ROWS)), asked)
    return [float(g.double().square().sum()) for g in gradients]


def _measure(params: Params, bench: Bench) -> Values:
    """Return the root mean square over independent networks, on independent text."""
    rows = [_squares(params, bench, draws) for draws in independent(bench.draws, NETWORKS[params["wiring"]])]
    return {"gradient": [(sum(column) / len(rows)) ** 0.5 for column in zip(*rows, strict=True)]}


STUDY = Study(
    id="layer_profile",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.1 * NETWORKS[params["wiring"]],
    seeds=5,
    corpus=True,
)


def _slopes(e: Evidence, role: str, kind: str) -> list[float]:
    return [log_log_slope(range(1, LAYERS + 1), row) for row in e.values(f"{role}/{kind}", "gradient")]


def _name(role: str, kind: str) -> str:
    return f"slope over ln l of ln ‖gradient of block l‖, {LABELS[role]}, {NAMES[kind]}"


def _literal(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=_name("post", kind),
            values=_slopes(e, "post", kind),
            kind="above",
            target=0.0,
            tolerance=0.25,
            reason=f"“abnormally amplified”: a slope of 1/4 doubles gradients from the first block to the {LAYERS}th",
        )
        for kind in KINDS
    ]


def _corrected(e: Evidence) -> list[Criterion]:
    post = [
        Criterion(
            name=_name("post", "relu"),
            values=_slopes(e, "post", "relu"),
            kind="below",
            target=0.5,
            tolerance=0.05,
            reason="√l is what Post-Norm gains on Pre-Norm (F1) and would gain on itself if its own gradients were "
            "amplified as much; 0.05 of an exponent is a factor of 1.15 over the stack",
        ),
        Criterion(
            name=_name("post", "swiglu"),
            values=_slopes(e, "post", "swiglu"),
            kind="below",
            target=0.0,
            tolerance=0.05,
            reason="a factor of 1.15 over the stack, as above: less would not be called falling",
        ),
    ]
    level = [
        Criterion(
            name=_name("deepnorm", kind),
            values=_slopes(e, "deepnorm", kind),
            kind="near",
            target=0.0,
            tolerance=0.15,
            reason="“level” within a factor of 1.5 over the stack; doubled, it is still far from 1/√l",
        )
        for kind in KINDS
    ]
    falling = [
        Criterion(
            name=_name("pre", kind),
            values=_slopes(e, "pre", kind),
            kind="below",
            target=0.0,
            tolerance=0.15,
            reason="told from level: a factor of 1.5 over the stack; 1/√l itself bends towards level in the first "
            "blocks, whose stream still is mostly embedding",
        )
        for kind in KINDS
    ]
    return [*post, *level, *falling]


def _summary(e: Evidence) -> str:
    parts: list[str] = []
    for role in WIRINGS:
        powers = ", ".join(estimate(_slopes(e, role, kind)) for kind in KINDS)
        parts.append(f"{LABELS[role].removesuffix('-Norm')} {powers}")
    return f"block l ∝ l^p, p with ReLU, SwiGLU: {'; '.join(parts)}"


def _panel(e: Evidence, kind: str) -> Panel:
    blocks = list(range(1, LAYERS + 1))
    rows = e.values(f"pre/{kind}", "gradient")
    first = sum(row[0] for row in rows) / len(rows)
    return Panel(
        NAMES[kind],
        "block",
        "norm of the gradient (nats)",
        [
            *(band(LABELS[role], blocks, e.values(f"{role}/{kind}", "gradient")) for role in WIRINGS),
            Series("∝ 1/√l", blocks, [first * n**-0.5 for n in blocks], kind="reference"),
        ],
        x_scale="log",
        y_scale="log",
    )


def _figures(e: Evidence) -> list[Chart]:
    return [
        Chart(
            caption=f"Norm of the loss's gradient on each block's down-projection in fresh networks of {LAYERS} "
            "blocks. Bands: min–max over seeds, all wirings on the same draws and text.",
            alt="Pre-Norm falls along a dashed line of slope minus one half and DeepNorm is level, far below. "
            "Post-Norm rises a little with ReLU and falls with SwiGLU.",
            panels=[_panel(e, kind) for kind in KINDS],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="F2",
        title="Post-Norm's gradients by layer",
        sentence="Early in training Post-Norm's gradients near the output layer are abnormally amplified.",
        sentences=(38,),
        source="Article, “Post-Norm”; Xiong et al. 2020.",
        measured=f"Norm of the gradient on every block's down-projection in fresh networks of {LAYERS} blocks (width "
        f"{WIDTH}, RoPE, Xavier), on {ROWS} windows of {CONTEXT} bytes of real text, once with ReLU and LayerNorm and "
        "once with SwiGLU and RMSNorm; root mean square over a few networks. F1 asks how the last of them changes "
        "with depth, this how they compare within one network.",
        study=STUDY,
        plays={role: role for role in WIRINGS},
        literal=Rule(
            text="Under Post-Norm gradients grow towards the output, to double and more over 16 blocks: log-log slope "
            "over the block's number above 1/4, with either kind of sublayer.",
            origin="sentence",
            criteria=_literal,
        ),
        corrected=Rule(
            text="Post-Norm's slope stays 0.05 below the 1/2 of √l with ReLU and lies below −0.05 with SwiGLU; "
            "DeepNorm's is 0 ± 0.15 with both, and Pre-Norm's below −0.15 (1/√l would give −1/2).",
            origin="theory",
            criteria=_corrected,
        ),
        correction="Within a fresh Post-Norm network gradients are not amplified towards the output: with ReLU and "
        "LayerNorm they rise a little, far less than √l, and with SwiGLU and RMSNorm they fall. Under DeepNorm they "
        "are level. Pre-Norm's fall as 1/√l; Post-Norm's last gradient is large beside that one (F1), not beside its "
        "own first.",
        control=Control(
            text="Post-Norm and Pre-Norm swapped: a falling profile must not pass for a level one.",
            plays={"post": "pre", "pre": "post", "deepnorm": "deepnorm"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Sent back through a sum, a gradient grows as the signal did on its way forward; a norm after the sum "
            "divides both by the same σ, and without one the gradient keeps the ratio of the stream's sizes. "
            "Sublayers that pass gradients somewhat worse or better than signals (a product of two branches is not "
            "linear) tilt Post-Norm's profile; DeepNorm's small β leaves them no weight.",
            status="conjecture",
        ),
    ),
)
