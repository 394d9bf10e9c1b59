"""ε, read off the output of rows so small that nothing else is left under the root."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import TORCH_DEFAULT, Eps

# Rows of 2^-50 have squares of 1e-30: below any ε in use, and still normal numbers.
SMALL = -50
_USUAL = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3)


def readings(x: Tensor, y: Tensor) -> list[float]:
    """Return what ε would be for a small row x and its output y (γ = 1, β = 0): inside the root or outside of it.

    x / y is √(σ² + ε), σ + ε or max(‖x‖, ε), with σ² the mean or the sum of the squares; small as it is, σ counts
    beside a small ε that is not under the root.
    """
    at = int(x.abs().argmax())
    big, out = float(x.reshape(-1)[at].double()), float(y.reshape(-1)[at].double())
    if out == 0 or not math.isfinite(out):
        return []
    ratio = big / out
    squares = x.double().square()
    sizes = [0.0, float(squares.mean()) ** 0.5, float(squares.sum()) ** 0.5]
    return [ratio * ratio, *(abs(ratio) - size for size in sizes)]


def hints(module: nn.Module) -> dict[str, object]:
    """Return attributes that are called ε, or look like one, by name."""
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        small = isinstance(value, float) and 0 <= value < 0.1
        if "eps" in name.lower() and (value is None or isinstance(value, (int, float))):
            found[name] = value
        elif small and not isinstance(value, bool):
            found.setdefault(name, value)
    return found


def proposals(module: nn.Module, read: Iterable[float]) -> list[tuple[Eps, str]]:
    """Return values of ε worth trying bit for bit, those the module names first, each with where it comes from.

    A reading is right to a few float32 roundings; what the module really adds is a number near it that somebody wrote
    down: an attribute, a usual literal, or the shortest decimal within 1e-5 of the reading.
    """
    found: dict[Any, str] = {}
    for value in read:
        for name, hint in hints(module).items():
            if hint is None and _near(value, torch.finfo(torch.float32).eps):
                found.setdefault(TORCH_DEFAULT, f"{name}=None, which PyTorch resolves")
            elif isinstance(hint, (int, float)) and _near(value, float(hint)):
                found.setdefault(float(hint), f"attribute {name}, seen in the output")
        for literal in (*_USUAL, torch.finfo(torch.float32).eps):
            if _near(value, literal):
                found.setdefault(literal, "the output; no attribute says it")
        if value < 1e-25 and not unseen(module):
            found.setdefault(0.0, "the output: no trace of one")
        elif 0 < value < 1:
            for digits in range(7):
                decimal = float(f"{value:.{digits}e}")
                if _near(value, decimal):
                    found.setdefault(decimal, "the output; no attribute says it")
                    break
    return list(found.items())


def unseen(module: nn.Module) -> list[str]:
    """Return attributes called ε that are not 0: where the output shows no trace of one, its place stays unknown."""
    named = {n: v for n, v in hints(module).items() if "eps" in n.lower()}
    return [f"{n}={v}" for n, v in named.items() if v is None or v != 0]


def _near(value: float, wanted: float) -> bool:
    if wanted < 1e-25:
        return value < 1e-25
    return abs(value - wanted) <= 1e-5 * wanted


def disagreement(module: nn.Module, eps: Eps) -> str | None:
    """Return a note where an attribute called ε says another number than the output."""
    if eps is TORCH_DEFAULT:
        return None
    named: dict[str, float] = {
        n: float(v) for n, v in hints(module).items() if "eps" in n.lower() and isinstance(v, (int, float))
    }
    if not named or any(v == eps for v in named.values()):
        return None
    return "attribute " + ", ".join(f"{n}={v}" for n, v in named.items()) + f" is not what is added: {eps}"
