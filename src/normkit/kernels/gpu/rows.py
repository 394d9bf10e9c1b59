"""Row norms on a GPU: tensors in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import layout
from normkit.kernels.gpu.forward import held_forward
from normkit.kernels.gpu.launch import TYPES, Launcher, aligned, clusters_on, launcher_of
from normkit.kernels.gpu.settings import Setting, forward_setting
from normkit.kernels.gpu.wide_forward import PART, apply_chunks, chunk_moments
from normkit.kernels.rounding import product_dtype, result_dtype, rounds_first
from normkit.spec import NormSpec

ONES = (1, 1, 1, 1)  # strides of a plain launch, which reads none; Triton makes constants of ones
_launchers: dict[Any, Forward] = {}


@dataclass(frozen=True)
class Rows:
    """How the rows of a call lie: their number and width, the inner two of three outer sizes, strides in elements."""

    count: int
    width: int
    d1: int
    d2: int
    steps: tuple[tuple[int, ...], ...]
    plain: bool


def contiguous_rows(x: Tensor, tensors: int) -> Rows:
    """As `lay_out` of so many tensors, where rows are x's last axis and no tensor has gaps."""
    width = x.shape[-1]
    return Rows(x.numel() // width, width, 1, 1, (ONES,) * tensors, True)


def lay_out(
    axes: Sequence[int], tensors: Sequence[Tensor | None], shape: Sequence[int], parameters: Sequence[int]
) -> Rows | None:
    """Fold the outer axes of tensors that share (or broadcast to) ``shape``; None where three do not suffice.

    ``parameters`` are the places among ``tensors`` of weight and bias, which a plain launch expects as one row.
    """
    width = math.prod([shape[a] for a in axes])
    if all(_is_plain(t, axes, shape, width, i in parameters) for i, t in enumerate(tensors)):
        return Rows(math.prod(shape) // width, width, 1, 1, tuple(ONES for _ in tensors), True)
    found = layout.lay(axes, tensors, shape)
    if found is None:
        return None
    sizes, steps = found
    return Rows(math.prod(sizes), width, sizes[1], sizes[2], tuple(map(tuple, steps)), False)


def _is_plain(t: Tensor | None, axes: Sequence[int], shape: Sequence[int], width: int, parameter: bool) -> bool:
    if t is None:
        return True
    if tuple(axes) != tuple(range(len(shape) - len(axes), len(shape))) or not t.is_contiguous():
        return False
    if parameter:
        return t.numel() == width and tuple(t.shape[t.dim() - len(axes) :]) == tuple(shape[a] for a in axes)
    return tuple(t.shape) == tuple(shape)


def conventions(spec: NormSpec, target: torch.dtype, stream: torch.dtype, weight: torch.dtype | None) -> dict[str, Any]:
    """Return what a spec and dtypes tell every kernel; ``stream`` is normalised, ``target`` what may be rounded to."""
    first = rounds_first(spec, target, weight)
    return {
        "R": TYPES[first or stream],
        "P": TYPES[product_dtype(spec, first or stream, weight)],
        "CENTERED": spec.centered,
        "SUM": spec.statistic == "sum",
        "HAS_W": weight is not None,
        "FIRST": first is not None,
        "PLUS": spec.weight == "one_plus",
        "PLUS_ROUNDED": spec.weight == "one_plus_rounded",
        "BEFORE": spec.gate == "before",
        "SILU": spec.activation == "silu",
    }


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


@dataclass(frozen=True)
class Forward:
    """The kernels of a forward: one where tiles hold rows, else the moments of a row's chunks before it."""

    chunks: int
    setting: Setting
    run: Launcher
    moments: Launcher | None


def forward_of(
    spec: NormSpec,
    branch: torch.dtype,
    residual: torch.dtype | None,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    rows: Rows,
    keep: bool,
    device: torch.device,
) -> Forward:
    """Return the kernels for these dtypes and rows of this width and layout."""
    stream = branch if residual is None else torch.promote_types(branch, residual)
    key = (spec, branch, residual, weight, bias, rows.width, rows.plain, keep, device)
    found = _launchers.get(key)
    if found is None:
        setting = forward_setting(rows.width, clusters_on(device))
        chunks = -(-rows.width // setting.block)
        constants = conventions(spec, branch, stream, weight) | {
            "K": 1 << (chunks - 1).bit_length(),
            "PLAIN": rows.plain,
            "KEEP": keep,
            "ADDED": residual is not None,
            "HAS_B": bias is not None,
        }
        run = launcher_of(held_forward if chunks == 1 else apply_chunks, constants, setting)
        moments = None if chunks == 1 else launcher_of(chunk_moments, constants, setting)
        found = _launchers[key] = Forward(chunks, setting, run, moments)
    return found


def forward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
    out: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return y and, if ``keep``, the row statistics the backward wants."""
    y = out
    if y is None:
        y = torch.empty(x.shape, dtype=result_dtype(spec, x.dtype, _dtype(weight), _dtype(bias)), device=x.device)
    rows = lay_out(axes, (x, weight, bias, y), x.shape, (1, 2))
    if rows is None:  # an out= whose outer axes do not fold with x's to three
        assert out is not None, "refuses() let through what cannot be laid out"
        fresh, kept = forward(x, spec, weight, bias, axes=axes, eps=eps, keep=keep)
        return out.copy_(fresh), kept
    kept = new_statistics(spec, rows.count, x.device) if keep else None
    kernels = forward_of(spec, x.dtype, None, _dtype(weight), _dtype(bias), rows, keep, x.device)
    steps = (*rows.steps, ONES, ONES)
    launch(kernels, rows, (x, weight, bias, y, None, None), kept, steps, eps, 1.0, 1.0)
    return y, kept


def add_forward(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
    keep: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the sum s = α·residual + β·x and, if ``keep``, the row statistics of s."""
    stream = torch.promote_types(x.dtype, residual.dtype)
    y_dtype = result_dtype(spec, x.dtype, _dtype(weight), _dtype(bias))
    y, s = out or (torch.empty(x.shape, dtype=d, device=x.device) for d in (y_dtype, stream))
    rows = lay_out(axes, (s, weight, bias, y, x, residual), x.shape, (1, 2))
    if rows is None:  # an out= whose outer axes do not fold with x's to three
        assert out is not None, "refuses() let through what cannot be laid out"
        fresh = add_forward(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps, keep=keep)
        return y.copy_(fresh[0]), s.copy_(fresh[1]), fresh[2]
    kept = new_statistics(spec, rows.count, x.device) if keep else None
    kernels = forward_of(spec, x.dtype, residual.dtype, _dtype(weight), _dtype(bias), rows, keep, x.device)
    launch(kernels, rows, (s, weight, bias, y, x, residual), kept, rows.steps, eps, alpha, beta)
    return y, s, kept


def launch(
    kernels: Forward,
    rows: Rows,
    tensors: tuple[Tensor | None, ...],
    kept: Tensor | None,
    steps: tuple[tuple[int, ...], ...],
    eps: float,
    alpha: float,
    beta: float,
) -> None:
    """Run a forward over its rows; a tensor that is missing is never read, and x stands in its place."""
    x = tensors[0]
    assert x is not None
    given: list[Any] = [x if t is None else t for t in tensors]
    saved = x if kept is None else kept
    fast = rows.plain and aligned(*tensors)
    outer = (rows.d1, rows.d2)
    if kernels.moments is None:
        arguments = [*given, saved, rows.count, rows.width, eps, math.sqrt(eps), alpha, beta, *outer]
        arguments += [s for step in steps for s in step]
        grid = (-(-rows.count // kernels.setting.rows), 1, 1)
        kernels.run.launch(fast, grid, arguments, x.device)
        return
    parts = torch.empty(rows.count, kernels.chunks, PART.value, dtype=torch.float32, device=x.device)
    grid = (rows.count, kernels.chunks, 1)
    arguments = [x, *given[4:], parts, rows.count, rows.width, alpha, beta, *outer, *steps[0], *steps[4], *steps[5]]
    kernels.moments.launch(fast, grid, arguments, x.device)
    y = given[3]
    if y.data_ptr() == x.data_ptr():  # an extreme row is read as a whole by every program that writes a chunk of it
        given[3] = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
    arguments = [*given[:4], parts, saved, rows.count, rows.width, eps, math.sqrt(eps), *outer]
    arguments += [s for step in steps[:4] for s in step]
    kernels.run.launch(fast, grid, arguments, x.device)
    if given[3] is not y:
        y.copy_(given[3])


def new_statistics(spec: NormSpec, count: int, device: torch.device) -> Tensor:
    """Return room for (rstd, scale) of each row, centred (mean, remainder, rstd, scale)."""
    return torch.empty(count, 4 if spec.centered else 2, dtype=torch.float32, device=device)
