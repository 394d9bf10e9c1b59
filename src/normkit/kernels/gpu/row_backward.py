"""Row norms backward on a GPU: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.gpu.backward import fold_partials, held_backward, row_sums, wide_backward
from normkit.kernels.gpu.launch import Launcher, aligned, clusters_on, launcher_of, processors
from normkit.kernels.gpu.rows import Rows, contiguous_rows, conventions, lay_out
from normkit.kernels.gpu.settings import FOLD_BLOCK, FOLD_ROWS, Setting, backward_setting
from normkit.spec import NormSpec

_launchers: dict[Any, _Backward] = {}


@dataclass(frozen=True)
class _Backward:
    """The kernels of a backward: one where tiles hold rows, else the sums of each row before it."""

    setting: Setting
    run: Launcher
    sums: Launcher | None


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
    if axes == (x.dim() - 1,) and _gapless(x, weight, dy, extra):
        rows = contiguous_rows(x, 5)
    else:
        rows = lay_out(axes, (x, weight, dy, dx, extra), x.shape, (1,))
    if rows is None:  # upstream gradients whose outer axes do not fold with x's to three
        dy, extra = dy.contiguous(), None if extra is None else extra.contiguous()
        rows = lay_out(axes, (x, weight, dy, dx, extra), x.shape, (1,))
    assert rows is not None, "refuses() let through what cannot be laid out"
    w = None if weight is None else weight.dtype
    kinds = (x.dtype, w, dy.dtype, None if extra is None else extra.dtype)
    key = (spec, *kinds, target, rows.width, rows.plain, wanted, x.device)
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = _backward_of(spec, target or x.dtype, w, rows, extra is not None, wanted, x.device)
    dw, db = _run(found, rows, (x, weight, dy, dx, extra), stats, wanted)
    shape = [x.shape[a] if a in axes else 1 for a in range(x.dim())]
    return dx, folded(dw, weight, shape), folded(db, bias, shape)


def _gapless(x: Tensor, weight: Tensor | None, dy: Tensor, extra: Tensor | None) -> bool:
    """Say whether rows along the last axis follow one another, and the weight is one of them."""
    if not (x.is_contiguous() and dy.is_contiguous() and (extra is None or extra.is_contiguous())):
        return False
    return weight is None or (weight.dim() == 1 and weight.numel() == x.shape[-1] and weight.is_contiguous())


def _backward_of(
    spec: NormSpec,
    target: torch.dtype,
    weight: torch.dtype | None,
    rows: Rows,
    added: bool,
    wanted: tuple[bool, bool, bool],
    device: torch.device,
) -> _Backward:
    setting = backward_setting(rows.width, wanted[1] or wanted[2], clusters_on(device))
    held = setting.block >= rows.width
    constants = conventions(spec, target, target, weight) | {"PLAIN": rows.plain, "ADDED": added}
    constants |= dict(zip(("WANT_X", "WANT_W", "WANT_B"), wanted, strict=True))
    run = launcher_of(held_backward if held else wide_backward, constants, setting)
    return _Backward(setting, run, None if held else launcher_of(row_sums, constants, setting))


def _run(
    kernels: _Backward,
    rows: Rows,
    tensors: tuple[Tensor | None, ...],
    stats: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the float32 partials for weight and bias."""
    x = tensors[0]
    assert x is not None
    setting = kernels.setting
    tiles = -(-rows.count // setting.rows)
    walkers = tiles
    if wanted[1] or wanted[2]:
        walkers = min(tiles, max(1, processors(x.device) * setting.programs // setting.ctas))
    dw, db = (
        torch.empty(walkers, rows.width, dtype=torch.float32, device=x.device) if want else None for want in wanted[1:]
    )
    given: list[Any] = [x if t is None else t for t in tensors]
    parts = [x if t is None else t for t in (dw, db)]
    steps = [s for step in rows.steps for s in step]
    fast = rows.plain and aligned(*tensors)
    if kernels.sums is None:
        arguments = [*given, stats, *parts, rows.count, tiles, rows.width, rows.d1, rows.d2, *steps]
        kernels.run.launch(fast, (walkers, 1, 1), arguments, x.device)
        return dw, db
    walkers = min(walkers, MOST_WALKERS)
    both = torch.empty(rows.count, 2, dtype=torch.float32, device=x.device)
    if wanted[0]:
        arguments = [*given[:3], stats, both, rows.count, rows.width, rows.d1, rows.d2, *steps[:12]]
        kernels.sums.launch(fast, (rows.count, 1, 1), arguments, x.device)
    arguments = [*given, stats, both, *parts, rows.count, rows.width, rows.d1, rows.d2, *steps]
    kernels.run.launch(fast, (-(-rows.width // setting.block), walkers, 1), arguments, x.device)
    return dw, db


MOST_WALKERS = 65535  # programs along a grid's second axis
_fold = Launcher(fold_partials, {"K": FOLD_ROWS, "C": FOLD_BLOCK}, 4)


def fold(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partials in an order that their number decides, and round the sum once."""
    count, width = parts.shape
    if count == 1 and dtype == torch.float32:
        return parts[0]
    total = torch.empty(width, dtype=dtype, device=parts.device)
    _fold.launch(False, (-(-width // FOLD_BLOCK), 1, 1), (parts, total, count, width), parts.device)
    return total


def folded(parts: Tensor | None, p: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Return the gradient of ``p`` from partials over the elements of ``shape``, to which p broadcasts."""
    if parts is None or p is None:
        return None
    if p.numel() == parts.shape[1]:
        return fold(parts, p.dtype).view(p.shape)
    # A parameter that broadcasts along the row (a scalar gain) collects the row's sum.
    return fold(parts, torch.float32).view(tuple(shape)).sum_to_size(p.shape).to(p.dtype)
