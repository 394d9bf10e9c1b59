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
ROWS = 12  # windows of 64 bytes a step: sixty runs must fit into five minutes of two cores
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
    schedule = Schedule(params["lr"], params["warmup"], STEPS, ROWS)
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


STUDY = Study(id="warmup_map", arms=_arms, measure=_measure, seconds=lambda params: 9.0, seeds=5, corpus=True)


def at(role: str, lr: float) -> str:
    """Return the evidence path of a role at a learning rate."""
    return f"{role}/lr-{lr:g}"


def best_rate(e: Evidence, role: str) -> float:
    """Return the learning rate at which this arm gains most on held-out text, in the mean over seeds."""
    return max(rates(e.settings), key=lambda lr: math.fsum(e.numbers(at(role, lr), "gain")))


def largest_usable(e: Evidence, role: str) -> float | None:
    """Return the largest learning rate of the grid at which 4 of 5 seeds leave the unigram plateau, or None."""
    return max((lr for lr in rates(e.settings) if share_trained(e, role, lr) >= SHARE), default=None)


def boundary(e: Evidence, role: str) -> tuple[float, float]:
    """Return between which learning rates the largest usable one lies; both are the same where the grid settles it.

    The grid does not settle it where more than 1 of 5 seeds still trains at the next rate: too many for a limit that
    was passed, too few for one that was not. On an edge of the grid the limit may lie beyond, at 0 or ∞ at most.
    """
    grid, largest = rates(e.settings), largest_usable(e, role)
    if largest is None:
        return 0.0, grid[0]
    if largest == grid[-1]:
        return largest, math.inf
    following = grid[grid.index(largest) + 1]
    blurred = share_trained(e, role, following) > 1 - SHARE + 1e-9  # 1 of 5 is not more than 1 of 5
    return largest, following if blurred else largest


def share_trained(e: Evidence, role: str, lr: float) -> float:
    """Return the share of seeds that leave the unigram plateau."""
    runs = e.numbers(at(role, lr), "trained")
    return sum(runs) / len(runs)


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


def share_chart(e: Evidence, roles: dict[str, str]) -> Chart:
    """Draw the share of seeds that train over the learning rate, bars for each role with its label."""
    grid = rates(e.settings)
    places = list(range(len(grid)))
    bars = [
        Series(label, places, [100 * share_trained(e, role, lr) for lr in grid], kind="bars")
        for role, label in roles.items()
    ]
    limits = [Series(name, places, [y] * len(places), kind="reference") for name, y in _LIMITS.items()]
    return Chart(
        caption=f"Share of seeds that leave the unigram plateau within {STEPS} steps. A rate is borne where 4 of 5 do "
        "(upper line); where more than 1 of 5 do (lower line), it is not known not to be.",
        alt=". ".join(
            f"{label}: " + ", ".join(f"{100 * share_trained(e, role, lr):.0f} % at {lr:g}" for lr in grid)
            for role, label in roles.items()
        ),
        panels=[
            Panel(
                "who trains at which rate",
                "learning rate",
                "seeds that train (%)",
                [*bars, *limits],
                x_names=[f"{lr:g}" for lr in grid],
            )
        ],
    )


_LIMITS = {"4 of 5": 100 * SHARE, "1 of 5": 100 * (1 - SHARE)}


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
