"""Launching the gated kernels: tensors in, tensors out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.gpu import gated as norms
from normkit.kernels.gpu import gated_backward as gradients
from normkit.kernels.gpu.launch import Launcher, aligned, launcher_of, processors
from normkit.kernels.gpu.row_backward import folded
from normkit.kernels.gpu.rows import Rows, contiguous_rows, conventions, lay_out
from normkit.kernels.gpu.settings import Setting, gated_backward_setting, gated_forward_setting
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec

_launchers: dict[Any, Any] = {}


def _lay_out(x: Tensor, axes: tuple[int, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Rows, int] | None:
    """Return how the rows of a call lie, and after how many the weights begin again; the weight is ``tensors[1]``.

    Contiguous rows with one row of weights for every group are plain, too.
    """
    groups, weight = x.shape[-2], tensors[1]
    rows = lay_out(axes, tensors, x.shape, (1,))
    if rows is not None and rows.plain:
        return rows, 1
    plain = all(t is None or t.is_contiguous() for t in tensors)
    if plain and weight is not None and weight.shape[-2:] == x.shape[-2:] and weight.numel() == groups * x.shape[-1]:
        return contiguous_rows(x, len(tensors)), groups
    return None if rows is None else (rows, groups)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _constants(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None, rows: Rows, period: int) -> dict[str, Any]:
    """Return the constants that forward and backward share."""
    return conventions(spec, x, x, weight) | {"PLAIN": rows.plain, "GROUPED": period > 1}


def forward(
    x: Tensor,
    gate: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return y and, if ``keep``, the row statistics the backward wants: (rstd, scale), gate first also the shrink."""
    y = torch.empty(x.shape, dtype=result_dtype(spec, x.dtype, _dtype(weight), None), device=x.device)
    tensors = (x, weight, gate, y)
    laid = _lay_out(x, axes, tensors)
    assert laid is not None, "refuses() let through what cannot be laid out"
    rows, period = laid
    key = ("forward", spec, x.dtype, _dtype(weight), gate.dtype, rows.width, rows.plain, period, keep)
    setting, run = gated_forward_setting(rows.width), _launchers.get(key)
    if run is None:
        constants = _constants(spec, x.dtype, _dtype(weight), rows, period) | {"KEEP": keep}
        kernel = norms.held_gated_forward if setting.block >= rows.width else norms.looped_gated_forward
        run = _launchers[key] = launcher_of(kernel, constants, setting)
    columns = 3 if spec.gate == "before" else 2
    kept = torch.empty(rows.count, columns, dtype=torch.float32, device=x.device) if keep else None
    low = eps * norms.SHRINK_EPS
    arguments: list[Any] = [x if t is None else t for t in (*tensors, kept)]
    arguments += [rows.count, period, rows.width, eps, math.sqrt(eps), low, math.sqrt(low), rows.d1, rows.d2]
    arguments += [s for step in rows.steps for s in step]
    grid = (-(-rows.count // setting.rows), 1, 1)
    run.launch(rows.plain and aligned(*tensors), grid, arguments, x.device)
    return y, kept


def backward(
    x: Tensor,
    gate: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    dy: Tensor,
    stats: Tensor,
    *,
    axes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dgate, dw), None where not wanted."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else None
    dgate = torch.empty(x.shape, dtype=gate.dtype, device=x.device) if wanted[1] else None
    laid = _lay_out(x, axes, (x, weight, dy, gate, dx, dgate))
    if laid is None:  # an upstream gradient whose outer axes do not fold with x's to three
        dy = dy.contiguous()
        laid = _lay_out(x, axes, (x, weight, dy, gate, dx, dgate))
    assert laid is not None, "refuses() let through what cannot be laid out"
    rows, period = laid
    key = ("backward", spec, x.dtype, _dtype(weight), gate.dtype, dy.dtype, rows.width, rows.plain, period, wanted)
    found = _launchers.get(key)
    if found is None:
        constants = _constants(spec, x.dtype, _dtype(weight), rows, period)
        constants |= dict(zip(("WANT_X", "WANT_G", "WANT_W"), wanted, strict=True))
        found = _launchers[key] = _backward_launchers(constants, gated_backward_setting(rows.width), rows.width)
    parts = _run_backward(found, rows, period, (x, weight, dy, gate, dx, dgate), stats, wanted)
    shape = (*[1] * (x.dim() - 2), period, rows.width)
    return dx, dgate, None if parts is None else folded(parts.view(parts.shape[0], -1), weight, shape)


def _backward_launchers(constants: dict[str, Any], setting: Setting, width: int) -> tuple[Launcher | None, Launcher]:
    """Return the kernel of row means, where rows are wider than a tile, and the one that writes gradients."""
    if setting.block >= width:
        return None, launcher_of(gradients.held_gated_backward, constants, setting)
    return (
        launcher_of(gradients.gated_row_means, constants, setting),
        launcher_of(gradients.wide_gated_backward, constants, setting),
    )


def _run_backward(
    launchers: tuple[Launcher | None, Launcher],
    rows: Rows,
    period: int,
    tensors: tuple[Tensor | None, ...],
    stats: Tensor,
    wanted: tuple[bool, bool, bool],
) -> Tensor | None:
    """Return the float32 partials for the weight, (programs of a group, groups, width)."""
    x = tensors[0]
    assert x is not None
    setting = gated_backward_setting(rows.width)
    tiles = -(-rows.count // period // setting.rows)
    walkers = tiles
    if wanted[2]:  # every program of a group leaves a partial
        walkers = min(tiles, max(1, processors(x.device) * setting.programs // period))
    parts = None
    if wanted[2]:
        parts = torch.empty(walkers, period, rows.width, dtype=torch.float32, device=x.device)
    given: list[Any] = [x if t is None else t for t in tensors]
    steps = [s for step in rows.steps for s in step]
    target = x if parts is None else parts
    fast = rows.plain and aligned(*tensors)
    means_of, gradient = launchers
    if means_of is None:
        arguments = [*given, stats, target, rows.count, tiles, period, rows.width, rows.d1, rows.d2, *steps]
        gradient.launch(fast, (walkers * period, 1, 1), arguments, x.device)
        return parts
    means = torch.empty(rows.count, dtype=torch.float32, device=x.device)
    arguments = [*given[:4], stats, means, rows.count, period, rows.width, rows.d1, rows.d2, *steps[:16]]
    means_of.launch(fast, (rows.count, 1, 1), arguments, x.device)
    blocks = -(-rows.width // setting.block)
    arguments = [*given, stats, means, target, rows.count, blocks, period, rows.width, rows.d1, rows.d2, *steps]
    gradient.launch(fast, (blocks * walkers * period, 1, 1), arguments, x.device)
    return parts
