"""Row norms on a GPU: tensors in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import layout
from normkit.kernels.gpu import backward as gradients
from normkit.kernels.gpu import forward as norms
from normkit.kernels.gpu.launch import TYPES, Launcher, aligned, processors
from normkit.kernels.gpu.settings import FOLD_BLOCK, FOLD_ROWS, backward_setting, forward_setting
from normkit.kernels.rounding import HALVES, result_dtype
from normkit.spec import NormSpec

_ONES = (1, 1, 1, 1)  # strides of a plain launch, which reads none; Triton makes constants of ones
_launchers: dict[Any, Any] = {}


@dataclass(frozen=True)
class Rows:
    """How the rows of a call lie: their number and width, the inner two of three outer sizes, strides in elements."""

    count: int
    width: int
    d1: int
    d2: int
    steps: tuple[tuple[int, ...], ...]
    plain: bool


def lay_out(axes: Sequence[int], tensors: Sequence[Tensor | None], shape: Sequence[int], parameters: Sequence[int]) -> Rows | None:  # fmt: skip
    """Fold the outer axes of tensors that share (or broadcast to) ``shape``; None where three do not suffice.

    ``parameters`` are the places among ``tensors`` of weight and bias, which a plain launch expects as one row.
    """
    width = math.prod([shape[a] for a in axes])
    if all(_is_plain(t, axes, shape, width, i in parameters) for i, t in enumerate(tensors)):
        return Rows(math.prod(shape) // width, width, 1, 1, tuple(_ONES for _ in tensors), True)
    outer = [a for a in range(len(shape)) if a not in axes]
    views = [t if t is None or tuple(t.shape) == tuple(shape) else t.expand(shape) for t in tensors]
    within = [1 if t is None else layout.row_stride(t, axes) for t in views]
    folded = layout.fold(
        [shape[a] for a in outer], [[0] * len(outer) if t is None else [t.stride(a) for a in outer] for t in views]
    )
    if folded is None:
        return None
    sizes, steps = folded
    every: list[tuple[int, ...]] = []
    for step, stride in zip(steps, within, strict=True):
        if stride is None:
            return None
        every.append((*step, stride))
    return Rows(math.prod(sizes), width, sizes[1], sizes[2], tuple(every), False)


def _is_plain(t: Tensor | None, axes: Sequence[int], shape: Sequence[int], width: int, parameter: bool) -> bool:
    if t is None:
        return True
    if tuple(axes) != tuple(range(len(shape) - len(axes), len(shape))) or not t.is_contiguous():
        return False
    if parameter:
        return t.numel() == width and tuple(t.shape[t.dim() - len(axes) :]) == tuple(shape[a] for a in axes)
    return tuple(t.shape) == tuple(shape)


def rounds_first(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of the rounding before the weight, or None where there is none."""
    if spec.cast == "first":
        return x
    return weight if spec.cast == "t5" and weight in HALVES else None


def _conventions(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None) -> dict[str, Any]:
    """Return the constants that a forward and its backward share, in the order of their signatures."""
    return {
        "CENTERED": spec.centered,
        "SUM": spec.statistic == "sum",
        "HAS_W": weight is not None,
        "FIRST": rounds_first(spec, x, weight) is not None,
        "PLUS": spec.weight == "one_plus",
        "PLUS_ROUNDED": spec.weight == "one_plus_rounded",
    }


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _forward_launcher(
    spec: NormSpec,
    branch: torch.dtype,
    stream: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    rows: Rows,
    keep: bool,
    added: bool,
) -> tuple[Launcher, int]:
    """Return what to launch, and the rows of its tiles."""
    key = (spec, branch, stream, weight, bias, rows.width, rows.plain, keep, added)
    found = _launchers.get(key)
    if found is None:
        setting = forward_setting(rows.width)
        first = rounds_first(spec, branch, weight)
        between = torch.float32  # of the product, before the bias: a gain formed in float32 keeps it there
        if weight is not None and spec.weight != "one_plus":
            between = torch.promote_types(first or stream, weight)
        shared = _conventions(spec, branch, weight)
        constants: dict[str, Any] = {"R": TYPES[first or stream], "P": TYPES[between], "ROWS": setting.rows}
        constants |= {"C": setting.block, "PLAIN": rows.plain, "KEEP": keep, "ADDED": added}
        constants |= {k: shared[k] for k in ("CENTERED", "SUM", "HAS_W")} | {"HAS_B": bias is not None}
        constants |= {k: shared[k] for k in ("FIRST", "PLUS", "PLUS_ROUNDED")}
        kernel = norms.held_forward if setting.block >= rows.width else norms.looped_forward
        found = _launchers[key] = Launcher(kernel, constants, setting.warps), setting.rows
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
    run, tile = _forward_launcher(spec, x.dtype, x.dtype, _dtype(weight), _dtype(bias), rows, keep, False)
    steps = (*rows.steps, _ONES, _ONES)
    _launch(run, tile, rows, (x, weight, bias, y, None, None, kept), steps, (eps, math.sqrt(eps), 1.0, 1.0))
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
    run, tile = _forward_launcher(spec, x.dtype, stream, _dtype(weight), _dtype(bias), rows, keep, True)
    _launch(run, tile, rows, (s, weight, bias, y, x, residual, kept), rows.steps, (eps, math.sqrt(eps), alpha, beta))
    return y, s, kept


def _launch(
    run: Launcher,
    tile: int,
    rows: Rows,
    tensors: tuple[Tensor | None, ...],
    steps: tuple[tuple[int, ...], ...],
    numbers: tuple[float, ...],
) -> None:
    """Run a forward over its rows; a tensor that is missing is never read, and x stands in its place."""
    x = tensors[0]
    assert x is not None
    arguments: list[Any] = [x if t is None else t for t in tensors]
    arguments += [rows.count, rows.width, *numbers, rows.d1, rows.d2]
    for step in steps:
        arguments += step
    grid = (-(-rows.count // tile), 1, 1)
    (run.again if rows.plain and aligned(*tensors) else run)(grid, arguments, x.device)


def new_statistics(spec: NormSpec, count: int, device: torch.device) -> Tensor:
    """Return room for (rstd, scale) of each row, centred (mean, remainder, rstd, scale)."""
    return torch.empty(count, 4 if spec.centered else 2, dtype=torch.float32, device=device)


def backward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    stats: Tensor,
    *,
    axes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
    extra: Tensor | None = None,
    target: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dw, db), None where not wanted; ``extra`` is added to dx before it is rounded.

    ``target`` is the dtype that the forward rounded to, where that is not x's.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else None
    rows = lay_out(axes, (x, weight, dy, dx, extra), x.shape, (1,))
    if rows is None:  # upstream gradients whose outer axes do not fold with x's to three
        dy, extra = dy.contiguous(), None if extra is None else extra.contiguous()
        rows = lay_out(axes, (x, weight, dy, dx, extra), x.shape, (1,))
    assert rows is not None, "refuses() let through what cannot be laid out"
    key = (spec, x.dtype, target, _dtype(weight), rows.width, rows.plain, extra is None, wanted)
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = _backward_launchers(spec, target or x.dtype, _dtype(weight), rows, extra, wanted)
    dw, db = _run_backward(found, rows, (x, weight, dy, dx, extra), stats, wanted)
    shape = [x.shape[a] if a in axes else 1 for a in range(x.dim())]
    return dx, folded(dw, weight, shape), folded(db, bias, shape)


def _backward_launchers(
    spec: NormSpec,
    target: torch.dtype,
    weight: torch.dtype | None,
    rows: Rows,
    extra: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Launcher | None, Launcher]:
    """Return the kernel of row sums, where rows are wider than a tile, and the one that writes gradients."""
    setting = backward_setting(rows.width)
    held = setting.block >= rows.width
    shared = _conventions(spec, target, weight)
    first = rounds_first(spec, target, weight)
    sums = None
    if not held:
        names = ("CENTERED", "SUM", "HAS_W", "PLUS", "PLUS_ROUNDED")
        constants = {"C": setting.block, "PLAIN": rows.plain} | {k: shared[k] for k in names}
        sums = Launcher(gradients.row_sums, constants, setting.warps)
    constants = {"R": TYPES[first or target]} | ({"ROWS": setting.rows} if held else {})
    constants |= {"C": setting.block, "PLAIN": rows.plain, "ADDED": extra is not None}
    names = ("CENTERED", "SUM", "HAS_W") if held else ("CENTERED", "HAS_W")
    constants |= {k: shared[k] for k in (*names, "FIRST", "PLUS", "PLUS_ROUNDED")}
    constants |= dict(zip(("WANT_X", "WANT_W", "WANT_B"), wanted, strict=True))
    kernel = gradients.held_backward if held else gradients.wide_backward
    return sums, Launcher(kernel, constants, setting.warps)


def _run_backward(
    launchers: tuple[Launcher | None, Launcher],
    rows: Rows,
    tensors: tuple[Tensor | None, ...],
    stats: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the float32 partials for weight and bias."""
    x = tensors[0]
    assert x is not None
    setting = backward_setting(rows.width)
    tiles = -(-rows.count // setting.rows)
    walkers = min(tiles, processors(x.device) * setting.programs) if wanted[1] or wanted[2] else tiles
    dw = torch.empty(walkers, rows.width, dtype=torch.float32, device=x.device) if wanted[1] else None
    db = torch.empty(walkers, rows.width, dtype=torch.float32, device=x.device) if wanted[2] else None
    given: list[Any] = [x if t is None else t for t in tensors]
    steps = [s for step in rows.steps for s in step]
    sums, gradient = launchers
    fast = rows.plain and aligned(*tensors)
    if sums is None:
        arguments = [*given, stats, dw if dw is not None else x, db if db is not None else x]
        arguments += [rows.count, tiles, rows.width, rows.d1, rows.d2, *steps]
        (gradient.again if fast else gradient)((walkers, 1, 1), arguments, x.device)
        return dw, db
    both = torch.empty(rows.count, 2, dtype=torch.float32, device=x.device)
    if wanted[0]:
        arguments = [*given[:3], stats, both, rows.count, rows.width, rows.d1, rows.d2, *steps[:12]]
        (sums.again if fast else sums)((rows.count, 1, 1), arguments, x.device)
    arguments = [*given, stats, both, dw if dw is not None else x, db if db is not None else x]
    arguments += [rows.count, rows.width, rows.d1, rows.d2, *steps]
    grid = (-(-rows.width // setting.block), walkers, 1)
    (gradient.again if fast else gradient)(grid, arguments, x.device)
    return dw, db


_fold = Launcher(gradients.fold_partials, {"K": FOLD_ROWS, "C": FOLD_BLOCK}, 4)


def fold(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partials in an order that their number decides, and round the sum once."""
    count, width = parts.shape
    if count == 1 and dtype == torch.float32:
        return parts[0]
    total = torch.empty(width, dtype=dtype, device=parts.device)
    _fold((-(-width // FOLD_BLOCK), 1, 1), (parts, total, count, width), parts.device)
    return total


def folded(parts: Tensor | None, p: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Return the gradient of ``p`` from partials over the elements of ``shape``, to which p broadcasts."""
    if parts is None or p is None:
        return None
    if p.numel() == parts.shape[1]:
        return fold(parts, p.dtype).view(p.shape)
    # A parameter that broadcasts along the row (a scalar gain) collects the row's sum.
    return fold(parts, torch.float32).view(tuple(shape)).sum_to_size(p.shape).to(p.dtype)
