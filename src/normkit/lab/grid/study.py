"""The study behind `normkit lab train`: its arms are the product of a grid, each one training run a seed.

Arms are named contender/warm-up/rate. All arms of a seed see the same batches, and start from the same weights where
shapes agree. One more arm trains nothing: the bytes' frequencies, which the judgements' controls are held against.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from normkit.lab.claim import Arm, Bench, Params, Study, Values
from normkit.lab.corpus import Corpus
from normkit.lab.draws import Draws
from normkit.lab.grid.curves import Curve
from normkit.lab.grid.options import Grid
from normkit.lab.grid.own_models import BytesToLogits, fresh
from normkit.lab.grid.reading import FREQUENCIES
from normkit.lab.grid.shards import backward_of
from normkit.lab.model.precision import Autocast
from normkit.lab.model.training import (
    CURVE,
    Schedule,
    frequencies_loss,
    plateau_of,
    train_model,
)
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.runs.code import digest
from normkit.lab.settings import Settings
from normkit.watching import watch

WATCHED = "watched"  # folder of what was seen inside models of one's own


def grid_of(settings: Settings) -> Grid:
    """Return the grid that the settings hold."""
    return Grid.from_text(settings.grid)


def arms(settings: Settings) -> list[Arm]:
    """Return every contender at every point of the grid, and the bytes' frequencies."""
    grid = grid_of(settings)
    trained = [
        Arm(f"{name}/{point.name}", {"warmup": point.warmup, "lr": point.lr} | contender(grid, name))
        for name in grid.contenders
        for point in grid.points
    ]
    return [*trained, Arm(FREQUENCIES, {"rows": grid.rows})]


def contender(grid: Grid, name: str) -> dict[str, Any]:
    """Return what a contender's runs depend on, warm-up and rate apart."""
    shared: dict[str, Any] = {"steps": grid.steps, "rows": grid.rows, "shards": grid.shards}
    if grid.precision != "float32":
        shared["precision"] = grid.precision
    first, _, rest = name.partition("/")
    if first == "model":
        return shared | {"model": rest, "code": digest([rest.partition(":")[0]])}
    size = {"depth": grid.depth, "width": grid.width, "heads": grid.heads_used}
    return shared | {"wiring": first, "norm": rest} | size


def made(params: Params, draws: Draws) -> nn.Module:
    """Return the untrained network of an arm, as it is trained."""
    model = _network(params, draws)
    return Autocast(model) if params.get("precision") == "bfloat16" else model


def _network(params: Params, draws: Draws) -> nn.Module:
    if "model" in params:
        return fresh(params["model"], draws.shared("model").initial_seed())
    config = TransformerConfig(
        layers=params["depth"],
        width=params["width"],
        heads=params["heads"],
        norm=params["norm"],
        wiring=params["wiring"],
    )
    return build(config, draws)


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    if "lr" not in params:
        return _frequencies(params["rows"], bench.corpus)
    model = made(params, bench.draws)
    schedule = Schedule(params["lr"], params["warmup"], params["steps"], params["rows"])
    curve = Curve(bench.folder, bench.draws.arm, bench.draws.seed, schedule.steps)

    def told(step: int, losses: list[float]) -> None:
        curve.point(step, losses, schedule.lr_at(step - 1))

    flags: list[str] = []
    own = next((m for m in model.modules() if isinstance(m, BytesToLogits)), None)
    during = None if own is None else _watched(own.inner, _log(bench), flags)
    device = bench.settings.device
    backward = backward_of(model.to(device), params["shards"])
    run = train_model(model, schedule, bench.corpus, bench.draws, device, told, during, backward)
    curve.close(run.outcome, run.heldout)
    return {
        "outcome": run.outcome,
        "trained": run.outcome == "trained",
        "heldout": run.heldout,
        "diverged at": run.diverged_at,
        # A run that diverged has gained nothing over the plateau.
        "gain": 0.0 if run.heldout is None else run.plateau.unigram - run.heldout,
        "curve": run.curve,
        "unigram": run.plateau.unigram,
        "margin": run.plateau.margin,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flags": flags,
    }


@contextmanager
def _watched(model: nn.Module, path: Path | None, flags: list[str]) -> Generator[None]:
    """Watch a model of one's own, one step in each point of the curve, and keep what was flagged."""
    with watch(model, every=CURVE, path=path) as seen:
        yield
    flags += [f"{f.severity}, {f.code}: {', '.join(f.where[:3]) or 'the model'}" for f in seen.flags]


def _frequencies(rows: int, corpus: Corpus) -> Values:
    plateau, loss = plateau_of(corpus, rows), frequencies_loss(corpus)
    return {
        "outcome": plateau.outcome(loss),
        "trained": False,
        "heldout": loss,
        "gain": plateau.unigram - loss,
        "unigram": plateau.unigram,
        "margin": plateau.margin,
    }


def _log(bench: Bench) -> Path | None:
    """Return where to write what is seen inside a model; what a run that was killed left there is void."""
    if bench.folder is None:
        return None
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", bench.draws.arm)
    path = bench.folder / WATCHED / f"{name}-seed-{bench.draws.seed}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


STUDY = Study(id="train", arms=arms, measure=_measure, seconds=lambda params: 1.0, seeds=sys.maxsize, corpus=True)
STUDIES = (STUDY,)
