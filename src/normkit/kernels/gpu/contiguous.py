"""The common case with everything decided: contiguous rows of known dtypes on one device.

A launch takes a few microseconds of Python at best, so what can be decided once per dtypes, width and device is: a call
is left with its outputs, their addresses' alignment, and the compiled kernel's launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.gpu.rows import ONES, Forward, contiguous_rows, forward_of, launch, new_statistics
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec

Run = Callable[..., Any]
_SIX = (ONES,) * 6


def forward_for(
    spec: NormSpec, x: torch.dtype, w: torch.dtype | None, b: torch.dtype | None, device: torch.device
) -> Run:
    """Return (x, weight, bias, eps, out, keep) → (y, statistics) for contiguous tensors of these dtypes."""
    y_dtype = result_dtype(spec, x, w, b)
    known: dict[tuple[int, bool], Forward] = {}

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        y = torch.empty_like(x, dtype=y_dtype) if out is None else out
        if not x.numel():
            return y, None
        rows = contiguous_rows(x, 4)
        kernels = known.get((rows.width, keep))
        if kernels is None:
            kernels = known[rows.width, keep] = forward_of(spec, x.dtype, None, w, b, rows, keep, device)
        kept = new_statistics(spec, rows.count, device) if keep else None
        launch(kernels, rows, (x, weight, bias, y, None, None), kept, _SIX, eps, 1.0, 1.0)
        return y, kept

    return run


def add_forward_for(
    spec: NormSpec,
    x: torch.dtype,
    residual: torch.dtype,
    w: torch.dtype | None,
    b: torch.dtype | None,
    device: torch.device,
) -> Run:
    """Return (x, residual, weight, bias, eps, α, β, keep, out=) → (y, sum, statistics) for contiguous tensors."""
    stream = torch.promote_types(x, residual)
    y_dtype = result_dtype(spec, x, w, b)
    known: dict[tuple[int, bool], Forward] = {}

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        alpha: float,
        beta: float,
        keep: bool,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, s = out or (torch.empty_like(x, dtype=y_dtype), torch.empty_like(x, dtype=stream))
        if not x.numel():
            return y, s, None
        rows = contiguous_rows(x, 6)
        kernels = known.get((rows.width, keep))
        if kernels is None:
            kernels = known[rows.width, keep] = forward_of(spec, x.dtype, residual.dtype, w, b, rows, keep, device)
        kept = new_statistics(spec, rows.count, device) if keep else None
        launch(kernels, rows, (s, weight, bias, y, x, residual), kept, _SIX, eps, alpha, beta)
        return y, s, kept

    return run
