"""I2: nGPT's stream stays on a sphere, at any depth, with any weights, before training and after some.

Its update, h ← N(h + α·(N(F(h)) − h)), walks from h towards the normalised branch b along the great circle through
both: with θ the angle between h and b, the step's angle φ has tan φ = α·sin θ/(1 − α + α·cos θ), and what is left to b
is θ − φ. Nothing is added to the stream's size, so nothing is diluted by depth.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from normkit.functional import l2_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.ngpt import build_ngpt, ending_on_sphere, on_sphere, to_sphere
from normkit.lab.model.training import Schedule, train_model
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.model.zoo import Interpolated
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

WIDTH, ROWS = 64, 2
LAYERS = {"fresh": 16, "large": 16, "trained": 4}
LARGE = 100.0  # factor on every weight of the sublayers
TRAINING = Schedule(lr=3e-3, steps=20, rows=4)
ALPHA = 0.05  # where α starts; one number, so that the law of the angle holds as written


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{wiring}/{state}", {"wiring": wiring, "state": state}) for wiring in ("ngpt", "pre") for state in LAYERS
    ]


def _network(params: Params, bench: Bench) -> Transformer:
    """Return the network in the state asked for, in float64."""
    config = TransformerConfig(layers=LAYERS[params["state"]], width=WIDTH)
    sphere = params["wiring"] == "ngpt"
    model = (build_ngpt if sphere else build)(config, bench.draws).to(bench.settings.device)
    if params["state"] == "trained":
        assert bench.corpus is not None
        train_model(
            model,
            TRAINING,
            bench.corpus,
            bench.draws,
            bench.settings.device,
            during=ending_on_sphere(model) if sphere else None,
            backward=on_sphere if sphere else None,
        )
    model = model.double()
    with torch.no_grad():
        if sphere and params["state"] != "trained":
            to_sphere(model)  # to the last digit of float64
            for step in model.steps:
                step.get_parameter("alpha").fill_(ALPHA)
        if params["state"] == "large":
            for name, linear in model.weights().items():
                linear.weight *= 1.0 if name == "head" else LARGE
    return model


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle between the rows of two tensors, exact for small angles as well."""
    a, b = l2_norm(a, eps=0.0), l2_norm(b, eps=0.0)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def _branch(step: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return what a step from x to y adds, or walks towards."""
    return step.sublayer(x) if isinstance(step, Interpolated) else y - x


def _measure(params: Params, bench: Bench) -> Values:
    model = _network(params, bench)
    with torch.no_grad():
        return _walk(model, bench)


def _walk(model: Transformer, bench: Bench) -> Values:
    """Return lengths along the stream, and the angles of its steps beside their law."""
    stream = list(model.stream(random_windows(bench, bench.draws, ROWS)[:, :-1]))
    sizes = [x.norm(dim=-1) / WIDTH**0.5 for x in stream]
    turned: list[float] = []
    off: list[float] = []
    beside: list[float] = []
    for step, (x, y) in zip(model.steps, pairwise(stream), strict=True):
        branch = _branch(step, x, y)
        theta, phi = angle(x, branch), angle(x, y)
        law = torch.atan2(ALPHA * theta.sin(), 1 - ALPHA + ALPHA * theta.cos())
        turned.append(float(phi.mean()))
        off.append(float((phi - law).abs().max()))
        beside.append(float((angle(y, branch) - (theta - phi)).abs().max()))
    return {
        "off sphere": max(float((s - 1).abs().max()) for s in sizes),
        "size": [float(s.mean()) for s in sizes],
        "angle": turned,
        "off law": max(off),
        "beside": max(beside),
        "last over first": turned[-1] / turned[0],
    }


STUDY = Study(
    id="sphere",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.7 if params["state"] == "trained" else 0.3,
    seeds=3,
    corpus=True,
)


def _criteria(e: Evidence) -> list[Criterion]:
    sphere = [
        Criterion(
            name=f"{state}, {layers} blocks: largest | ‖h‖ − 1 | of any token after any step, ‖h‖ over √d",
            values=e.numbers(f"sphere/{state}", "off sphere"),
            kind="at_most",
            target=0.0,
            tolerance=1e-6,
            reason="embeddings were brought to the sphere in float32, whose rounding is 6×10⁻⁸; the rest is float64 "
            "with ε = 10⁻¹²; a factor of ten is left",
            every=True,
        )
        for state, layers in LAYERS.items()
    ]
    angles = [
        Criterion(
            name=f"{state}: largest deviation of {what}, radians",
            values=e.numbers(f"sphere/{state}", key),
            kind="at_most",
            target=0.0,
            tolerance=1e-8,
            reason="a branch of mean square v is normalised to 1 − ε/2v, which turns the step by α·ε/2v, 3×10⁻¹¹ at "
            "v = 10⁻³; float64 otherwise",
            every=True,
        )
        for state in ("fresh", "large")
        for key, what in (
            ("off law", "a step's angle from its law"),
            ("beside", "what is left to the branch from θ − φ"),
        )
    ]
    return [*sphere, *angles]


def _summary(e: Evidence) -> str:
    off = number(max(v for state in LAYERS for v in e.numbers(f"sphere/{state}", "off sphere")), 1)
    law = number(max(v for state in ("fresh", "large") for v in e.numbers(f"sphere/{state}", "off law")), 1)
    grown = number(max(row[-1] / row[0] for row in e.values("other/fresh", "size")), 2)
    return f"‖h‖ off 1 by at most {off}, angles off their law by {law}; other wiring's stream grows {grown}-fold"


_NAMES = {"ngpt": "nGPT", "pre": "Pre-Norm"}


def _figures(e: Evidence) -> list[Chart]:
    steps = list(range(2 * LAYERS["fresh"] + 1))

    def line(role: str, state: str, key: str) -> Series:
        rows = e.values(f"{role}/{state}", key)
        return band(f"{_NAMES[e.arm(role)]}, {state}", steps[len(steps) - len(rows[0]) :], rows)

    shown = [(role, state) for role in ("sphere", "other") for state in ("fresh", "large")]
    return [
        Chart(
            caption=f"Size of the stream and the angle by which each sublayer turns it, {LAYERS['fresh']} blocks, as "
            f"drawn and with weights {LARGE:g} times as large; means over tokens. Bands: min–max over seeds.",
            alt="Left: nGPT's stream stays at 1 with either weights, Pre-Norm's grows with depth. Right: nGPT's steps "
            "turn the stream by nearly the same small angle at every depth, Pre-Norm's by less and less.",
            panels=[
                Panel(
                    "size",
                    "sublayers passed",
                    "‖h‖ / √d",
                    [line(role, state, "size") for role, state in shown],
                    y_scale="log",
                ),
                Panel(
                    "direction",
                    "sublayer",
                    "angle of the step (radians)",
                    [line(role, state, "angle") for role, state in shown],
                    y_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="I2",
        title="nGPT's stream stays on a sphere",
        sentence="Post-Norm forces every layer's output back to a fixed scale, while Pre-Norm's stream grows with "
        "depth and dilutes what deep layers add. nGPT is said to do without either: all lengths are 1, and a step is a "
        "turn.",
        sentences=(36, 40),
        source="Article, “Post-Norm” and “Pre-Norm”; Loshchilov et al. 2024, arXiv 2410.01131.",
        measured=f"nGPT (width {WIDTH}, SwiGLU, RoPE) on {ROWS} windows of {CONTEXT} bytes of real text, in float64: "
        f"{LAYERS['fresh']} blocks as drawn and with every sublayer's weights {LARGE:g} times as large, and "
        f"{LAYERS['trained']} blocks after {TRAINING.steps} steps of training with weights brought back to the "
        "sphere after each. The length of every token after every step, and the angles of every step with α = 0.05. "
        "That nGPT trains in a fraction of the steps is not measured: it is a report of models far larger.",
        study=STUDY,
        plays={"sphere": "ngpt", "other": "pre"},
        literal=Rule(
            text="After every step every token has length 1 ± 10⁻⁶, at any depth and with any weights; every step "
            "turns by the angle φ of tan φ = α·sin θ/(1 − α + α·cos θ), towards the branch.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Pre-Norm with the same draws in its place: its stream grows, and its steps obey no such law.",
            plays={"sphere": "pre", "other": "ngpt"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A norm ends every step, so length is fixed; a norm on the branch takes its weights' size out, so a "
            "factor of 100 on them changes the angles only through the activation inside. Since α is a share of the "
            "way and not a sum, the hundredth step may turn the stream as far as the first.",
            status="tested",
        ),
    ),
)
