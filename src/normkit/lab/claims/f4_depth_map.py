"""The map behind F4: two wirings, three warm-ups and a decade of learning rates, at 6 blocks and at 24.

All runs are of one size but for their depth, so that depth is all that tells the two maps apart. It is a small size:
what matters here is whether a run trains, gets stuck at the unigram plateau or diverges, and that shows early. Arms are
named wiring/warm-up/rate; roles of the claims are wirings, or wirings with a warm-up.
"""

from __future__ import annotations

from functools import partial

from normkit.lab.claim import Arm, Bench, Params, Study, Values
from normkit.lab.claims.f3_map import DECADE, values_of
from normkit.lab.model.training import Schedule, train
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.settings import Settings

WIDTH, STEPS, ROWS = 32, 150, 4
WARMUPS = (0, 20, 100)
WIRINGS = ("post", "pre")
SHALLOW, DEEP = 6, 24
SEEDS = {SHALLOW: 5, DEEP: 2}  # a deep run costs four of the others
SECONDS = {SHALLOW: 2.7, DEEP: 10.0}


def _arms(layers: int, settings: Settings) -> list[Arm]:
    return [
        Arm(
            f"{wiring}/warmup-{warmup}/lr-{lr:g}",
            {"layers": layers, "wiring": wiring, "warmup": warmup, "lr": lr, "steps": STEPS},
        )
        for wiring in WIRINGS
        for warmup in WARMUPS
        for lr in DECADE
    ]


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    config = TransformerConfig(layers=params["layers"], width=WIDTH, wiring=params["wiring"])
    schedule = Schedule(params["lr"], params["warmup"], params["steps"], ROWS)
    return values_of(train(config, schedule, bench.corpus, bench.draws, bench.settings.device))


def _study(layers: int) -> Study:
    return Study(
        id=f"depth_map_{layers}",
        arms=partial(_arms, layers),
        measure=_measure,
        seconds=lambda params: SECONDS[layers],
        seeds=SEEDS[layers],
        corpus=True,
        full_only=True,
    )


MAPS = {layers: _study(layers) for layers in SEEDS}
