"""The map behind F3: Post-Norm and Pre-Norm, with and without warm-up, over learning rates, on real text.

Arms are named wiring/warm-up/rate; a role of the claims is a wiring with a warm-up, read over all rates.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Arm, Bench, Evidence, Params, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.training import CURVE, Run, Schedule, train
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.settings import Settings

LAYERS, WIDTH, STEPS, WARMUP = 6, 64, 200, 100
DECADE = (1e-3, 3e-3, 1e-2)
WIDER = (3e-4, *DECADE, 3e-2)
TENS = 100  # steps: what "within tens of steps" is taken to mean
SHARE = 0.8  # of the seeds, 4 of 5, that must leave the unigram plateau for a learning rate to count as usable


def rates(settings: Settings) -> tuple[float, ...]:
    """Return the learning rates of the map: a decade, and one more to either side in full mode."""
    return DECADE if settings.mode == "quick" else WIDER


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{wiring}/warmup-{warmup}/lr-{lr:g}", {"wiring": wiring, "warmup": warmup, "lr": lr})
        for lr in rates(settings)
        for warmup in (0, WARMUP)
        for wiring in ("post", "pre")
    ]


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    config = TransformerConfig(layers=LAYERS, width=WIDTH, wiring=params["wiring"])
    schedule = Schedule(params["lr"], params["warmup"], STEPS)
    return values_of(train(config, schedule, bench.corpus, bench.draws, bench.settings.device))


def values_of(run: Run) -> Values:
    """Return a run as measurements. A run that diverged has gained nothing over the unigram plateau."""
    return {
        "outcome": run.outcome,
        "trained": run.outcome == "trained",
        "heldout": run.heldout,
        "diverged at": run.diverged_at,
        "gain": 0.0 if run.heldout is None else run.plateau.unigram - run.heldout,
        "rise": largest_rise(run),
        "curve": run.curve,
        "unigram": run.plateau.unigram,
        "margin": run.plateau.margin,
        "noise": run.plateau.noise,
    }


def largest_rise(run: Run) -> float:
    """Return by how much the curve rises above an earlier point of it within `TENS` steps, in nats per byte.

    Measured on the excess over the bytes' frequencies, which frees it of how hard each batch was. A divergence
    within those steps counts as a rise by at least ln 256, the loss of knowing nothing.
    """
    rise, lowest = 0.0, math.inf
    for point in run.excess[: TENS // CURVE]:
        rise, lowest = max(rise, point - lowest), min(lowest, point)
    diverged = run.diverged_at is not None and run.diverged_at < TENS
    return max(rise, math.log(256)) if diverged else rise


STUDY = Study(id="warmup_map", arms=_arms, measure=_measure, seconds=lambda params: 10.5, seeds=5, corpus=True)


def at(role: str, lr: float) -> str:
    """Return the evidence path of a role at a learning rate."""
    return f"{role}/lr-{lr:g}"


def best_rate(e: Evidence, role: str) -> float:
    """Return the learning rate at which this arm gains most on held-out text, in the mean over seeds."""
    return max(rates(e.settings), key=lambda lr: math.fsum(e.numbers(at(role, lr), "gain")))


def largest_usable(e: Evidence, role: str) -> float | None:
    """Return the largest learning rate of the grid at which 4 of 5 seeds leave the unigram plateau, or None."""
    trained = {lr: e.numbers(at(role, lr), "trained") for lr in rates(e.settings)}
    return max((lr for lr, runs in trained.items() if sum(runs) >= SHARE * len(runs)), default=None)


def map_chart(e: Evidence, roles: dict[str, str]) -> Chart:
    """Draw held-out loss over the learning rate, a line for each role with its label."""
    grid = rates(e.settings)
    unigram = float(e.first(at(next(iter(roles)), grid[0]), "unigram"))

    def line(role: str, label: str) -> Series:
        columns = [[unigram - gain for gain in e.numbers(at(role, lr), "gain")] for lr in grid]
        return band(label, grid, [list(row) for row in zip(*columns, strict=True)])

    plateau = Series("unigram plateau", grid, [unigram] * len(grid), kind="reference")
    return Chart(
        caption=f"Held-out loss after {STEPS} steps over the learning rate ({LAYERS} blocks, width {WIDTH}). A run "
        "that diverged is drawn on the plateau. Bands: min–max over seeds.",
        alt="A line for each arm over the learning rate; those that reach the dashed plateau have learnt nothing "
        "beyond the frequencies of bytes.",
        panels=[
            Panel(
                "what training comes to",
                "learning rate",
                "held-out loss (nats/byte)",
                [*(line(role, label) for role, label in roles.items()), plateau],
                x_scale="log",
            )
        ],
    )


def curves_chart(e: Evidence, roles: dict[str, str]) -> Chart:
    """Draw training curves, a panel for each learning rate of the decade, a line for each role."""
    panels = [
        Panel(
            f"lr {lr:g}",
            "step",
            "training loss (nats/byte)",
            [_curve(label, e.values(at(role, lr), "curve")) for role, label in roles.items()],
        )
        for lr in DECADE
    ]
    return Chart(
        caption="Training loss, the mean of every ten steps. Bands: min–max over seeds.",
        alt="Three panels for three learning rates, a curve for each arm: falling where it trains, level where it "
        "is stuck.",
        panels=panels,
    )


def _curve(label: str, rows: list[list[float]]) -> Series:
    """Draw curves as far as all of them go; a run that diverged ends early."""
    points = min(map(len, rows))
    return band(label, [CURVE * (i + 0.5) for i in range(points)], [row[:points] for row in rows])
