"""The smallest input on which a norm still fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normkit.testing.inputs import Inputs, replace
from normkit.testing.judges import Judge, Problem
from normkit.testing.subject import Subject

TRIES = 400  # runs of the norm that one failure may cost


def judged(judge: Judge, subject: Subject, given: Inputs) -> Problem | None:
    """Run a judge; an exception that the norm raises is a problem like any other."""
    try:
        return judge(subject, given)
    except Exception as error:
        text = str(error).strip().splitlines()
        return Problem("raised", f"{type(error).__name__}: {text[0] if text else ''}"[:200], "a result")


def smallest(judge: Judge, subject: Subject, given: Inputs, problem: Problem) -> tuple[Inputs, Problem]:
    """Shrink greedily: fewer rows, fewer columns, simpler parameters, rounder numbers.

    A candidate counts only when it fails in the same way, so that what is shown is the failure that was found.
    """
    if given.x.dim() != 2:
        return given, problem
    tries, moved = 0.0, True
    while moved and tries < TRIES:
        moved = False
        # From the top again after each success: a smaller input may allow a bolder step.
        for candidate in candidates(given, fixed_width=subject.width is not None):
            fitted = subject.fit(candidate)
            if fitted is None or tries >= TRIES:
                continue
            tries += (
                1 + candidate.x.numel() / 2**14
            )  # large ones count for more: a failure should cost a second at most
            found = judged(judge, subject, fitted)
            if found is not None and found.kind == problem.kind:
                given, problem, moved = fitted, found, True
                break
    return given, problem


def candidates(given: Inputs, *, fixed_width: bool) -> Iterator[Inputs]:
    """Yield simpler inputs, the boldest first."""
    rows, width = given.x.shape
    for size in _sizes(rows):
        for start in range(0, rows, size):
            yield _cut_rows(given, [i for i in range(rows) if not start <= i < start + size])
    for name in ("bias", "weight", "residual", "dy"):
        t = getattr(given, name)
        # The last is least simple: once there, a parameter does not go back.
        for value in (0.0, 1.0) if name != "residual" else (0.0,):
            if t is not None and bool((t == value).all()):
                break
            if t is not None:
                yield replace(given, **{name: torch.full_like(t, value)})
    for x in _alike(given.x):
        if torch.equal(x, given.x):
            break
        yield replace(given, x=x)
    if not fixed_width:
        for few in (1, 2, 3, 4, 6, 8, 16):  # a leap that halving, which needs every step to fail, may not find
            if few < width:
                yield _cut_columns(given, [*range(few - 1), width - 1])
        for size in _sizes(width):
            for start in range(0, width, size):
                yield _cut_columns(given, [i for i in range(width) if not start <= i < start + size])
    for name in ("x", "weight", "bias", "dy", "residual"):
        t = getattr(given, name)
        for digits in (1, 2, 3):
            if t is None or torch.equal(_rounder(t, digits), t):
                break
            yield replace(given, **{name: _rounder(t, digits)})


def _sizes(count: int) -> Iterator[int]:
    """Yield how many to leave out at once: all but a half, a quarter, … and singles while they are few."""
    size = count // 2
    while size >= 1:
        if count // size <= 32:
            yield size
        size //= 2


def _cut_rows(given: Inputs, keep: list[int]) -> Inputs:
    return replace(given, **{n: t[keep] for n, t in given.tensors().items() if n in ("x", "residual", "dy")})


def _cut_columns(given: Inputs, keep: list[int]) -> Inputs:
    return replace(given, **{n: t[..., keep] for n, t in given.tensors().items()})


def _alike(x: Tensor) -> Iterator[Tensor]:
    """Yield x as one number throughout, as that number with alternating sign, and as one number up to the last."""
    if x.numel():
        same = torch.full_like(x, float(x.reshape(-1)[x.abs().argmax()]))
        yield same
        signs = torch.ones_like(x)
        signs[..., 1::2] = -1
        yield same * signs
        almost = torch.full_like(x, float(x[0, 0]))
        almost[..., -1] = x[..., -1]
        yield almost


def _rounder(t: Tensor, digits: int) -> Tensor:
    flat = [float(f"{v:.{digits}g}") for v in t.reshape(-1).tolist()]
    return torch.tensor(flat, dtype=t.dtype, device=t.device).reshape(t.shape)
