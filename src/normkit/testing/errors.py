"""The error table: every operator of normkit against float64, in ULP. `normkit errors` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.kernels.registry import use
from normkit.testing.inputs import adversarial, fitting, randn
from normkit.testing.operators import OPERATORS, Draw, Operator, Right, right, scattered
from normkit.testing.ulp import Error, ulp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTITIES = ("y", "dx", "dw", "db", "dresidual", "dgate")
BACKENDS = ("reference", "cpu")


@dataclass(frozen=True)
class Cell:
    """One quantity of one operator: its error on random and on adversarial rows, and the worst of its bounds' shares.

    Args:
        operator, dtype, backend, quantity: which.
        random, hard: errors in ULP.
        worst: the adversarial row with the largest error.
        share: largest error as a share of its bound; 1 is the bound.
    """

    operator: str
    dtype: str
    backend: str
    quantity: str
    random: Error
    hard: Error
    worst: str
    share: float


def table(
    *,
    quick: bool = False,
    operators: Sequence[Operator] = OPERATORS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    backends: Sequence[str] = BACKENDS,
) -> list[Cell]:
    """Measure operators. Seeded and free of global state: the same figures each time."""
    cells: list[Cell] = []
    for op in operators:
        for dtype in dtypes:
            for backend in backends:
                cells += list(_cells(op, dtype, backend, quick))
    return cells


def _cells(op: Operator, dtype: torch.dtype, backend: str, quick: bool) -> Iterator[Cell]:
    draws = [("random", d) for d in random_draws(op, dtype, quick)] + list(hard_draws(op, dtype, quick))
    measured: dict[str, list[tuple[str, Error, float, int]]] = {}
    for label, d in draws:
        got = outcome(op, d, backend)
        if got is None:
            return
        for name, want in right(op, d, got["y"].dtype).items():
            t = got[name]
            measured.setdefault(name, []).append((label, Error.of(t, want.exact, want.size), share(t, want), t.numel()))
    for name, found in measured.items():
        plain = [row for row in found if row[0] == "random"]
        hard = [row for row in found if row[0] != "random"]
        worst = max(hard, key=lambda row: row[1].largest)
        yield Cell(
            op.name,
            str(dtype).removeprefix("torch."),
            backend,
            name,
            _joined(plain),
            _joined(hard),
            worst[0],
            max(row[2] for row in found),
        )


def _joined(found: list[tuple[str, Error, float, int]]) -> Error:
    count = sum(row[3] for row in found)
    return Error(max(row[1].largest for row in found), sum(row[1].mean * row[3] for row in found) / max(count, 1))


def share(got: Tensor, want: Right) -> float:
    """Return the largest error as a share of its bound; a NaN is infinitely wrong, inf is right beyond the range."""
    top = torch.finfo(got.dtype).max
    beyond = (want.exact.abs() + want.bound > top) & got.isinf() & (got.double() * want.exact > 0)
    gap = torch.where(beyond, 0.0, (got.double() - want.exact).abs())
    floor = ulp(torch.zeros_like(want.bound), got.dtype)  # a bound of 0 still allows the smallest number
    return float((gap / torch.maximum(want.bound, floor)).nan_to_num(nan=torch.inf).max())


def random_draws(op: Operator, dtype: torch.dtype, quick: bool) -> Iterator[Draw]:
    """Yield random rows of widths that are and are not powers of two."""
    for n in (1, 3, 768) if quick else (1, 3, 127, 768, 1000, 4096):
        rows = 8 if n > 1000 else 16
        yield _draw(op, randn(*op.shape(rows, n), seed=n), n, dtype)


def hard_draws(op: Operator, dtype: torch.dtype, quick: bool) -> Iterator[tuple[str, Draw]]:
    """Yield adversarial rows: every statistic of a draw runs over one. Those a half type cannot hold are left out."""
    for n in (768,) if quick else (1000, 4096):
        shape = op.shape(3, n)
        for name, sample in adversarial(n).items():
            if not fitting({name: sample}, dtype):
                continue
            count, width = op.arrange(torch.empty(shape)).shape
            rows = [adversarial(width, seed)[name] for seed in range(count)]
            yield f"{name}, {n}", _draw(op, scattered(op, torch.cat(rows), shape), n, dtype)


def _draw(op: Operator, x: Tensor, n: int, dtype: torch.dtype) -> Draw:
    c = op.channels(n)
    weight, bias = randn(c, seed=1, dtype=dtype), randn(c, seed=2, dtype=dtype)
    residual = randn(*x.shape, seed=3) * float(x.abs().max().clamp(max=1e30)) * 2.0**-9
    gate, dy = (randn(*x.shape, seed=seed) for seed in (4, 5))
    return Draw(x.to(dtype), weight, bias, residual.to(dtype), gate.to(dtype), dy.to(dtype))


def outcome(op: Operator, d: Draw, backend: str) -> dict[str, Tensor] | None:
    """Run ``op`` forward and backward on ``backend``; None where that backend refuses it."""
    leaves = {name: getattr(d, name).detach().requires_grad_() for name in op.takes}
    held = Draw(**{**vars(d), **leaves})
    try:
        with use(backend):
            y = op.call(held)
    except ValueError as error:
        if backend in str(error):
            return None
        raise
    found = torch.autograd.grad(y, list(leaves.values()), d.dy.to(y.dtype))
    names = {"x": "dx", "weight": "dw", "bias": "db", "residual": "dresidual", "gate": "dgate"}
    return {"y": y.detach(), **{names[n]: g for n, g in zip(leaves, found, strict=True)}}
