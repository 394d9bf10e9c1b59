"""What a norm is fed: tensors with their ε, rows that break careless code, and how to write them down again."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from dataclasses import replace as replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One call: x (rows, width), parameters, the residual stream, ε, and the upstream gradient."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    eps: float = 1e-6
    dy: Tensor | None = None

    def __str__(self) -> str:
        tensors = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "eps"]
        lines = [f"{name} = {written(t)}" for name, t in tensors if isinstance(t, Tensor)]
        return "\n".join([*lines, f"eps = {self.eps!r}"])

    def copy(self) -> Inputs:
        """Return the same values, strides and neighbours in memory of their own."""
        return replace(self, **{name: twin(t) for name, t in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}


def twin(t: Tensor) -> Tensor:
    """Return ``t`` on a copy of its whole storage: same strides, same neighbours, nothing shared."""
    copy = torch.empty(0, dtype=t.dtype, device=t.device)
    return copy.set_(t.detach().untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal draws that depend on the seed alone and leave the global generator alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def adversarial(n: int, seed: int = 0) -> dict[str, Tensor]:
    """Return float64 rows, each (1, n), on which one-pass variance, early squares, lost ε or overflow show.

    Convert them to the dtype under test, and leave out those it cannot hold.
    """
    z = randn(1, n, seed=seed, dtype=torch.float64)
    spike, step = z.clone(), torch.full((1, n), 256.0, dtype=torch.float64)
    spike[0, n // 3] = 1e3
    step[0, -1] = 255.0
    return {
        "1e4 ± .005": 1e4 + 0.005 * z,
        "mean 2000, deviation 1": 2000 + z,
        "256, the last one 255": step,
        "one outlier of 1e3": spike,
        "constant 14": torch.full((1, n), 14.0, dtype=torch.float64),
        "zero": torch.zeros(1, n, dtype=torch.float64),
        "1e-20": z * 1e-20,
        "1e18": z * 1e18,
        "subnormal results": z * 1e-42,
    }


def fitting(rows: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the rows that ``dtype`` can hold, converted."""
    return {name: row.to(dtype) for name, row in rows.items() if bool(row.to(dtype).isfinite().all())}


def written(t: Tensor) -> str:
    """Return Python that makes ``t`` again: exactly, in few characters, and whole however long it is."""
    t = t.detach().cpu()
    flat = t.reshape(-1)
    dtype = f"dtype={t.dtype}"
    if t.numel() == 0:
        return f"torch.empty({tuple(t.shape)}, {dtype})"
    values = [short(v, t.dtype) for v in flat.tolist()]
    if len(values) > 1 and len(set(values)) == 1:
        return f"torch.full({tuple(t.shape)}, {values[0]}, {dtype})"
    shaped = "" if t.dim() == 1 else f".reshape({tuple(t.shape)})"
    pair = values[:2]
    if t.numel() > 4 and t.numel() % 2 == 0 and values == pair * (t.numel() // 2):
        return f"torch.tensor([{', '.join(pair)}] * {t.numel() // 2}, {dtype}){shaped}"
    runs = _runs(values)
    if t.numel() > 12 and len(runs) <= t.numel() // 3:
        body = " + ".join(f"[{v}] * {count}" if count > 1 else f"[{v}]" for v, count in runs)
        return f"torch.tensor({body}, {dtype}){shaped}"
    return f"torch.tensor({_nested(values, list(t.shape))}, {dtype})"


def short(value: float, dtype: torch.dtype) -> str:
    """Return the shortest decimal that ``dtype`` reads as ``value``."""
    if not math.isfinite(value):
        return f'float("{value}")'
    for digits in range(1, 18):
        text = f"{value:.{digits}g}"
        if float(torch.tensor(float(text), dtype=dtype)) == value:
            return text if "." in text or "e" in text else text + ".0"
    return repr(value)


def _runs(values: list[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for v in values:
        if runs and runs[-1][0] == v:
            runs[-1] = (v, runs[-1][1] + 1)
        else:
            runs.append((v, 1))
    return runs


def _nested(values: list[str], shape: list[int]) -> str:
    if len(shape) <= 1:
        return "[" + ", ".join(values) + "]" if shape else values[0]
    size = len(values) // shape[0]
    return "[" + ", ".join(_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])) + "]"
