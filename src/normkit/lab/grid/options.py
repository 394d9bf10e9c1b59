"""What `normkit lab train` compares: contenders, each over warm-ups and learning rates, and the size they have."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from normkit.coverage import COVERAGE
from normkit.lab.corpus import STDLIB
from normkit.lab.model.norms import NORMS
from normkit.lab.model.precision import PRECISIONS
from normkit.lab.model.training import CURVE
from normkit.lab.settings import Settings
from normkit.placement import WIRINGS

TOLERANCE = 0.01  # nats per byte
HEAD = 32  # width of a head that is aimed at


@dataclass(frozen=True)
class Point:
    """Where in the grid a contender is trained."""

    warmup: int
    lr: float

    @property
    def name(self) -> str:
        """Return the end of an arm's name; ``repr`` of a float tells any two apart."""
        return f"warmup-{self.warmup}/lr-{self.lr!r}"


@dataclass(frozen=True)
class Grid:
    """The whole question; every combination of its parts is trained at every seed.

    Args:
        wirings, norms: the lab's own networks, each wiring with each norm; both empty for none.
        models: models of one's own, as ``module:callable``.
        lrs, warmups: learning rates, ascending, and steps of linear warm-up.
        steps, rows: updates, and windows of 64 bytes in each.
        depth, width, heads: of the lab's own networks; 0 heads for as many as are about `HEAD` wide.
        shards: equal parts of every batch whose gradients are computed apart and then averaged; under ``torchrun`` one
            for each process. See `normkit.lab.grid.shards`.
        precision: ``"bfloat16"`` for autocast to it, see `normkit.lab.model.precision.Autocast`.
        tolerance: the least difference of held-out losses, in nats per byte, that counts as one.

    Raises:
        ValueError: a name that is not known, a number out of range, something twice, or nothing to compare; the
            message says what was expected, what came and what to do.

    Example:
        >>> grid = Grid(wirings=("pre", "post"), norms=("rms",), lrs=(1e-3,), warmups=(0, 20))
        >>> grid.contenders
        ('pre/rms', 'post/rms')
        >>> Grid.from_text(grid.to_text()) == grid
        True
    """

    wirings: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    lrs: tuple[float, ...] = (1e-3, 3e-3)
    warmups: tuple[int, ...] = (0,)
    steps: int = 200
    rows: int = 16
    depth: int = 6
    width: int = 64
    heads: int = 0
    shards: int = 1
    precision: str = "float32"
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        _known("--wiring", self.wirings, sorted(WIRINGS))
        _known("--norm", self.norms, sorted(NORMS))
        _causal(self.norms)
        if not (self.wirings and self.norms) and not self.models:
            raise ValueError("nothing to train: give --wiring with --norm, or --model module:callable")
        for model in self.models:
            module, colon, function = model.partition(":")
            if not (module and colon and function) or "/" in model:
                raise ValueError(f"--model {model!r}: expected module:callable, as in my_package.models:build")
        if not self.lrs or not self.warmups:
            raise ValueError("the grid is empty: give at least one --lr and one --warmup")
        for name, values in (("--model", self.models), ("--lr", self.lrs), ("--warmup", self.warmups)):
            _once(name, values)
        for lr in self.lrs:
            if not (math.isfinite(lr) and lr > 0):
                raise ValueError(f"--lr {lr}: expected finite numbers above 0")
        for warmup in self.warmups:
            if not 0 <= warmup <= self.steps:
                raise ValueError(
                    f"--warmup {warmup}: expected 0 to {self.steps}, the number of --steps; a rate that is still "
                    "rising when training ends was never the one asked for"
                )
        if not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"--tolerance {self.tolerance}: expected a finite number of nats per byte above 0")
        if self.steps < CURVE:
            raise ValueError(f"--steps {self.steps}: expected at least {CURVE}, one point of the curve")
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision {self.precision!r}: expected one of {', '.join(PRECISIONS)}")
        for name in ("rows", "depth", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected 1 or more")
        self._check_shards()
        self._check_heads()

    def _check_shards(self) -> None:
        if self.shards < 1 or self.rows % self.shards:
            raise ValueError(
                f"--shards {self.shards}: expected a divisor of --rows, {self.rows}, so that every part holds as many "
                "windows (under torchrun there is a part for each process)"
            )
        if self.shards > 1 and "batch" in self.norms:
            raise ValueError(
                f"--norm batch with --shards {self.shards}: every part would have statistics of its own, and running "
                "ones of the last part; train it unsharded"
            )

    def _check_heads(self) -> None:
        if not self.wirings:
            return
        if self.heads < 0 or self.width % (2 * (self.heads or 1)):
            wanted = f"a multiple of 2 × heads ({2 * self.heads})" if self.heads else "an even number"
            raise ValueError(f"--width {self.width}: expected {wanted}, since rotary positions turn pairs of channels")

    @property
    def contenders(self) -> tuple[str, ...]:
        """Return what is compared: ``wiring/norm``, then ``model/module:callable``; the first is the reference."""
        return (
            *(f"{wiring}/{norm}" for wiring in self.wirings for norm in self.norms),
            *(f"model/{model}" for model in self.models),
        )

    @property
    def points(self) -> tuple[Point, ...]:
        """Return every warm-up with every learning rate."""
        return tuple(Point(warmup, lr) for warmup in self.warmups for lr in sorted(self.lrs))

    @property
    def heads_used(self) -> int:
        """Return the heads given, or the largest number that divides the width and leaves each `HEAD` wide or wider."""
        if self.heads:
            return self.heads
        return next(h for h in range(max(1, self.width // HEAD), 0, -1) if self.width % (2 * h) == 0)

    def to_text(self) -> str:
        """Return the grid as JSON; `from_text` is its inverse."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """Rebuild a grid written by `to_text`."""
        data: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**fields)


def command(grid: Grid, settings: Settings, seeds: str) -> str:
    """Return the command that asks for this grid under these settings, in a folder of its own."""
    words = ["normkit", "lab", "train"]
    if grid.wirings:
        words += ["--wiring", ",".join(grid.wirings), "--norm", ",".join(grid.norms)]
        words += ["--depth", str(grid.depth), "--width", str(grid.width), "--heads", str(grid.heads_used)]
    for model in grid.models:
        words += ["--model", model]
    if grid.precision != "float32":
        words += ["--precision", grid.precision]
    if grid.shards > 1:
        words += ["--shards", str(grid.shards)]
    words += ["--lr", ",".join(map(repr, grid.lrs)), "--warmup", ",".join(map(str, grid.warmups))]
    words += ["--steps", str(grid.steps), "--rows", str(grid.rows), "--tolerance", repr(grid.tolerance)]
    words += ["--seeds", seeds, "--device", settings.device]
    if settings.corpus != STDLIB:
        words += ["--corpus", settings.corpus]
    return shlex.join([*words, "--out", "runs/again"])


def _known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name!r}: expected names from {', '.join(known)}")
    _once(option, names)


def _once(option: str, values: Sequence[object]) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ValueError(f"{option}: {twice[0]!r} stands there twice; it would be compared with itself")


def _causal(norms: Sequence[str]) -> None:
    """Refuse norms whose statistics at judging time hold bytes that a position is still to predict."""
    for name in norms:
        row = COVERAGE.get(name)
        if row is not None and not row.causal and not row.running:
            raise ValueError(
                f"--norm {name}: its statistics cover the bytes to come, so a low loss on the next byte says nothing; "
                "leave it out"
            )
