"""A made-up run with claims of every verdict and charts of every kind: what the report's tests render."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normkit.lab.claim import (
    Arm,
    Claim,
    Control,
    Evidence,
    Explanation,
    Measurement,
    Rule,
    Study,
)
from normkit.lab.figures import Chart, Drawing, Figure, Panel, Series, band
from normkit.lab.runs.judged import Judged, Run, judge_claim
from normkit.lab.settings import Settings
from normkit.lab.untestable import Entry, Untestable
from normkit.lab.verdict import Criterion

DEPTHS = [2, 4, 8, 16, 32]
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&/корпус/$x^2$.txt"


def _not_run(params: Any, bench: Any) -> dict[str, Any]:
    raise AssertionError("the report never measures")


def study(name: str, *, seeds: int = 5, timing: bool = False, corpus: bool = False, full_only: bool = False) -> Study:
    return Study(
        name,
        arms=lambda settings: [Arm("real"), Arm("without")],
        measure=_not_run,
        seconds=lambda params: 1.0,
        seeds=seeds,
        timing=timing,
        corpus=corpus,
        full_only=full_only,
    )


def claim(
    name: str,
    title: str,
    *,
    target: float,
    tolerance: float,
    summary: str,
    figures: Callable[[Evidence], Sequence[Figure]],
    sentence: str,
    kind: Any = "near",
    corrected: float | None = None,
    every: bool = False,
    **more: Any,
) -> Claim:
    """A claim on the key ``value``, whose literal rule is one criterion and whose corrected rule may be another."""

    def rule(at: float, origin: Any) -> Rule:
        criterion = "slope of ln ‖∂L/∂W₂‖ against ln L"

        def criteria(e: Evidence) -> list[Criterion]:
            reason = "a fifth of the exponent that the sentence names; the seed-to-seed spread is a tenth of it"
            values = e.numbers("it", "value")
            return [
                Criterion(criterion, values, kind, at, tolerance, reason, every),
                Criterion("finite everywhere", [1.0 for _ in values], "at_least", 1.0, 0.0, "exact", True),
            ]

        return Rule(f"The slope lies within {tolerance:g} of {at:g}.", origin, criteria)

    return Claim(
        id=name,
        title=title,
        sentence=sentence,
        sentences=(len(title), len(title) + 3),
        source="Article, “Pre-Norm and Post-Norm”; Xiong et al. 2020, arXiv 2002.04745, theorem 1.",
        measured="The gradient of the loss with respect to the last feed-forward weight at initialisation, on one "
        "batch of real text, for 2 to 32 layers of the lab's Transformer at width 64.",
        study=more.pop("study", study(name.lower())),
        plays={"it": "real"},
        literal=rule(target, "sentence"),
        control=Control("The same network with every norm taken out: nothing holds the scale.", {"it": "without"}),
        summary=lambda e: summary,
        figures=figures,
        explanation=Explanation(
            "The stream's variance grows with every branch that is added, and the head sees its root.",
            more.pop("status", "tested"),
        ),
        corrected=None if corrected is None else rule(corrected, "theory"),
        correction="The standard deviation follows √(1 + 0.01·L): 1.281 after 64 layers." if corrected else "",
    )


def _loglog(e: Evidence) -> list[Figure]:
    rng = random.Random(1)

    def rows(power: float, start: float) -> list[list[float]]:
        return [[start * d**power * math.exp(rng.gauss(0, 0.07)) for d in DEPTHS] for _ in range(5)]

    panels = [
        Panel(
            f"Last layer, {init}",
            "layers L",
            "gradient norm of the last W₂",
            [
                band("Post-Norm", DEPTHS, rows(0.05 * on, 0.9)),
                band("Pre-Norm", DEPTHS, rows(-0.48 * on, 1.0)),
                Series("slope −½", DEPTHS, [1.1 * d**-0.5 for d in DEPTHS], kind="reference"),
            ],
            "log",
            "log",
        )
        for init, on in (("Xavier", 1.0), ("N(0, 0.02)", 0.05))
    ]
    return [
        Chart(
            "Gradient norm of the last feed-forward weight at initialisation. Bands: min–max over 5 seeds.",
            "Two panels. With Xavier, Post-Norm stays level and Pre-Norm falls along slope one half; with N(0, 0.02) "
            "both stay level.",
            panels,
        )
    ]


def _curve(e: Evidence) -> list[Figure]:
    layers = list(range(65))
    rng = random.Random(2)
    rows = [[math.sqrt(1 + 0.01 * n) + rng.gauss(0, 0.002) for n in layers] for _ in range(3)]
    theory = Series("√(1 + 0.01·L)", layers, [math.sqrt(1 + 0.01 * n) for n in layers], kind="reference")
    root = Series("0.1·√L", layers, [0.1 * math.sqrt(n) for n in layers], kind="reference")
    panel = Panel("64 layers", "layers added", "standard deviation", [band("measured", layers, rows), theory, root])
    return [Chart("Standard deviation of the toy stream.", "A gentle curve from 1 to 1.28.", [panel])]


def _bars(e: Evidence) -> list[Figure]:
    def bars(name: str, y: list[float]) -> Series:
        return Series(name, [0, 1, 2], y, [v - 0.05 for v in y], [v + 0.06 for v in y], "bars")

    loss = Panel(
        "Held-out loss after 200 steps",
        "peak learning rate",
        "held-out loss, nats per byte",
        [
            bars("post, no warm-up", [2.36, 2.50, 3.15]),
            bars("post, 100 steps", [2.43, 2.35, 2.61]),
            bars("pre, no warm-up", [2.35, 2.30, 2.38]),
            Series("unigram", [-0.5, 2.5], [3.14, 3.14], kind="reference"),
        ],
        x_names=["1e-3", "3e-3", "1e-2"],
    )
    steps = list(range(0, 200, 2))
    rng = random.Random(3)
    curves = Panel(
        "Training loss at 1e-2",
        "step",
        "training loss, nats per byte",
        [
            Series(n, steps, [end + (5.5 - end) * math.exp(-s / t) + rng.gauss(0, 0.03) for s in steps])
            for n, end, t in (
                ("post, no warm-up", 3.15, 6.0),
                ("post, 100 steps of warm-up", 2.6, 30.0),
                ("pre, no warm-up", 2.38, 14.0),
                ("pre, 100 steps of warm-up", 2.41, 30.0),
            )
        ],
    )
    return [Chart("Six layers; whiskers: min–max over 5 seeds.", "Bars and falling curves.", [loss, curves])]


def _points(e: Evidence) -> list[Figure]:
    names = ["batch", "layer", "instance", "group of channels"]
    panel = Panel(
        "Against brute force",
        "norm",
        "largest difference, float64",
        [
            Series("forward", [0, 1, 2, 3], [2e-16, 4e-16, 1e-15, float("nan")], kind="points"),
            Series("backward", [0, 1, 2, 3], [3e-15, 2e-15, 8e-15, 5e-15], kind="points"),
            Series("1e-12 allowed", [-0.5, 3.5], [1e-12, 1e-12], kind="reference"),
        ],
        y_scale="log",
        x_names=names,
    )
    square = Drawing(
        "Which future positions reach position 3.",
        "A row of eight cells, the first three filled.",
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 330 50">'
        + "".join(
            f'<rect x="{5 + 40 * i}" y="5" width="36" height="36" stroke="currentColor" '
            f'fill="var(--{"accent" if i < 3 else "raised"})"/>'
            for i in range(8)
        )
        + "</svg>",
    )
    return [Chart("Largest deviation from explicit loops.", "Dots far below the limit.", [panel]), square]


def catalogue() -> tuple[Entry, ...]:
    """Claims of every verdict, two of them waiting, one not testable."""
    post = (
        "Near the output, Post-Norm's gradients are unusually large at the start of training, so depth needs warm-up."
    )
    return (
        claim(
            "A1",
            "Gain a layer",
            target=0.2,
            tolerance=0.02,
            summary="slope of ln std 0.1998 ± 0.0011 a layer; ln 1.2 = 0.1823",
            figures=_curve,
            sentence="A layer that amplifies a little makes activations explode after dozens of layers; one that "
            "attenuates makes them vanish.",
        ),
        claim(
            "A2",
            "The toy residual stream",
            target=0.5,
            tolerance=0.1,
            corrected=0.2,
            summary="std after 64 layers 1.2810, √(1 + 0.01·64) = 1.2806; exponent 0.073 over 1 … 64 layers "
            "(the sentence: 0.5)",
            figures=_curve,
            sentence="Adding 64 layers of noise of size 0.1 to a unit stream, its standard deviation grows roughly "
            "as the square root of the number of layers.",
            study=study("toy", seeds=3),
        ),
        claim(
            "A4",
            "Dilution of deep layers",
            target=0.2,
            tolerance=0.1,
            summary="‖F_l‖/‖x_l‖ falls with slope −0.46 ± 0.02",
            figures=_loglog,
            sentence="Under Pre-Norm the outputs of deep sublayers shrink relative to the stream.",
        ),
        claim(
            "C1",
            "Padding pollutes BatchNorm",
            target=0.2,
            tolerance=0.05,
            every=True,
            summary="variance p·σ² + p(1 − p)·μ² to 4e-16; masked: no error",
            figures=_points,
            sentence="Positions of padding enter the statistics and shift them.",
        ),
        claim(
            "C9",
            "Statistics over positions read the future",
            target=0.2,
            tolerance=0.05,
            summary="∂y_t/∂x_t′ for t′ > t: batch 1.2, instance 5.8, layer 0",
            figures=_points,
            sentence="BatchNorm does not suit autoregressive decoding.",
            study=study("future", seeds=1),
        ),
        claim(
            "D3",
            "Recovering the identity",
            target=0.7,
            tolerance=0.1,
            summary="LayerNorm's best affine leaves a residual of 0.043; BatchNorm's 2e-15",
            figures=_points,
            sentence="With γ = σ and β = μ the network can recover the identity.",
        ),
        claim(
            "F1",
            "Post-Norm's last gradient",
            target=0.2,
            tolerance=0.1,
            summary="slopes over depth: post +0.05, pre −0.48; ratio 0.92·√L with Xavier, 1.0 with N(0, 0.02)",
            figures=_loglog,
            sentence=post,
        ),
        claim(
            "F3",
            "Warm-up",
            target=0.5,
            tolerance=0.12,
            corrected=0.2,
            summary="at lr 1e-2 post without warm-up stays at 3.15 (unigram 3.14), with 100 steps 2.61; at 1e-3 "
            "warm-up costs 0.07",
            figures=_bars,
            sentence=post,
            status="conjecture",
            study=study("warmup", corpus=True),
        ),
        Untestable(
            id="H9",
            title="What people <agree> on",
            sentence="There is no agreement about why it works.",
            sentences=(90,),
            source="Article, “Beginnings”.",
            reason="Agreement cannot be measured & never will be.",
            record=("One reads it so: Smith 2018.", "Another otherwise: Jones <2020>."),
        ),
        claim(
            "L3",
            "The order of casts",
            target=0.27,
            tolerance=0.1,
            summary="error ratio 1.405 ± 0.04",
            figures=_points,
            sentence="Statistics are taken in float32, the product in the input's own type.",
        ),
        claim(
            "S1",
            "LayerNorm against RMSNorm, timed",
            target=0.9,
            tolerance=0.05,
            summary="RMSNorm 2.1 × slower than LayerNorm in eager PyTorch at 2048 × 768",
            figures=_bars,
            sentence="RMSNorm saves a few per cent up to some tens.",
            study=study("speed", timing=True),
        ),
        claim(
            "Z8",
            "Still running",
            target=0.2,
            tolerance=0.1,
            summary="",
            figures=_points,
            sentence="A sentence whose measurements are half made.",
            study=study("half"),
        ),
        claim(
            "Z9",
            "Not begun",
            target=0.2,
            tolerance=0.1,
            summary="",
            figures=_points,
            sentence="A sentence that nobody has measured.",
        ),
    )


def measurements() -> list[Measurement]:
    """Real arms near 0.2, control arms near 0.9; one study half measured, one not at all."""
    rng = random.Random(0)
    found: list[Measurement] = []
    for c in catalogue():
        if c.id == "Z9" or c.study is None:
            continue
        for arm, centre in (("real", 0.2), ("without", 0.9)):
            seeds = range(2 if c.id == "Z8" else c.study.seeds)
            values = [{"value": centre + rng.gauss(0, 0.004)} for _ in seeds]
            found += [Measurement(c.study.id, arm, s, v, 0.8) for s, v in zip(seeds, values, strict=True)]
    return found


def run(folder: Path = Path("runs/quick"), **settings: Any) -> Run:
    """The made-up run in memory."""
    environment = {
        "python": "3.11.9",
        "torch": {"version": "2.13.0", "threads": 2, "git": "d2b0b5c"},
        "cpu": "Xeon @ 2.1 GHz, 2 cores",
        "avx512": True,
    }
    notices = ("measurements.jsonl: the last line was cut short (71 bytes) and is dropped",)
    defaults = {"corpus": HOSTILE, "corpus_sha256": "9f" * 32, "corpus_bytes": 3274551}
    return Run(folder, Settings(**(defaults | settings)), environment, tuple(measurements()), notices)


def judged(of: Run | None = None) -> list[Judged]:
    """The made-up claims, judged."""
    of = of or run()
    return [judge_claim(c, of) for c in catalogue()]


def write(folder: Path) -> None:
    """Write the made-up run as a run folder."""
    made = run()
    (folder / "settings.json").write_text(json.dumps(made.settings.to_json()))
    (folder / "environment.json").write_text(json.dumps(made.environment))
    lines = [json.dumps(asdict(m) | {"key": "k"}) + "\n" for m in made.measurements]
    (folder / "measurements.jsonl").write_text("".join(lines))
