"""The CPU kernels as the registry sees them: what they take, and tensors in, tensors out."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from normkit.kernels import refusals
from normkit.kernels.contract import Kernel, Request
from normkit.kernels.cpu import contiguous, gated_launch, positions
from normkit.kernels.cpu import rows as launch
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("llvmlite") is not None and find_spec("numba") is not None


def refuses(request: Request) -> str | None:
    """Return why the CPU kernels cannot take a request, or None."""
    why = refusals.of_spec(request.spec) or _refuses_tensors(request)
    if why is not None:
        return why
    if request.channel is not None:
        return refusals.of_columns(request)
    return refusals.of_rows(request, _contiguous(request))


def _refuses_tensors(request: Request) -> str | None:
    for name, t in request.tensors.items():
        if t.device.type != "cpu":
            return f"{name} is on {t.device}"
        if t.dtype not in launch.NAMES:
            return f"{name} is {t.dtype}; the kernels take float32, bfloat16 and float16"
    if request.x.numel() == 0:
        return "x is empty"
    return None if _installed() else "numba is not installed"


def _contiguous(request: Request) -> bool:
    x = request.x
    return _all_contiguous(x, request.axes, request.weight, request.bias, request.residual)


def _all_contiguous(
    x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Say whether x and the residual are contiguous with rows along the last axis, and the parameters single rows."""
    if axes != (x.dim() - 1,) or not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return False
    return _is_row(weight, x) and _is_row(bias, x)


def _dtype(p: Tensor | None) -> torch.dtype | None:
    return None if p is None else p.dtype


def _is_row(p: Tensor | None, x: Tensor) -> bool:
    return p is None or (p.numel() == x.shape[-1] and p.shape[-1] == x.shape[-1] and p.is_contiguous())


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
    w, b = _dtype(weight), _dtype(bias)
    kinds = launch.Kinds(x.dtype, w, b, result_dtype(spec, x.dtype, w, b))
    y = torch.empty(x.shape, dtype=kinds.y) if out is None else out
    if axes == (x.dim() - 1,) and x.is_contiguous() and y.is_contiguous() and _is_row(weight, x) and _is_row(bias, x):
        stats = launch.new_statistics(spec, x.numel() // x.shape[-1]) if keep else None
        code = launch.forward_code(spec, kinds)
        launch.forward_contiguous(code, x, weight, bias, eps, y, stats, given=out is not None)
        return y, stats
    rows = launch.lay_out(axes, (x, weight, bias, y, None, None), x.shape)
    if rows is None:  # an out= whose outer axes do not fold with x's to three
        y, stats = forward(x, spec, weight, bias, axes=axes, eps=eps, keep=keep)
        return y if out is None else out.copy_(y), stats
    stats = launch.new_statistics(spec, rows.count) if keep else None
    code = launch.forward_code(spec, replace(kinds, packed=rows.packed))
    launch.forward(code, rows, eps, x, weight, bias, y, stats, given=out is not None)
    return y, stats


def quick(request: Request) -> contiguous.Forward:
    """Return the forward for contiguous rows of these dtypes, with everything decided that can be."""
    return contiguous.forward_of(request.spec, request.x.dtype, _dtype(request.weight), _dtype(request.bias))


def quick_add(request: Request) -> contiguous.AddForward:
    """As `quick`, of a residual add and norm."""
    assert request.residual is not None
    dtypes = request.x.dtype, request.residual.dtype, _dtype(request.weight), _dtype(request.bias)
    return contiguous.add_forward_of(request.spec, *dtypes)


def _laid_out(axes: tuple[int, ...], tensors: tuple[Tensor | None, ...], x: Tensor) -> launch.Rows:
    rows = launch.lay_out(axes, tensors, x.shape)
    assert rows is not None, "refuses() let through what cannot be laid out"
    return rows


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
    """Return y, the sum s and, if ``keep``, the row statistics of s."""
    w, b = _dtype(weight), _dtype(bias)
    stream = torch.promote_types(x.dtype, residual.dtype)
    y_dtype = result_dtype(spec, x.dtype, w, b)
    y, s = out or (torch.empty(x.shape, dtype=y_dtype), torch.empty(x.shape, dtype=stream))
    tensors = (s, weight, bias, y, x, residual)
    plain = _all_contiguous(x, axes, weight, bias, residual) and y.is_contiguous() and s.is_contiguous()
    rows = launch.contiguous_rows(x, tensors) if plain else launch.lay_out(axes, tensors, x.shape)
    if rows is None:  # an out= whose outer axes do not fold with x's to three
        assert out is not None, "refuses() let through what cannot be laid out"
        fresh = add_forward(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps)
        return y.copy_(fresh[0]), s.copy_(fresh[1]), None
    kinds = launch.Kinds(stream, w, b, y_dtype, x.dtype, residual.dtype, rows.packed)
    code = launch.forward_code(spec, kinds)
    stats = launch.new_statistics(spec, rows.count) if keep else None
    launch.forward(code, rows, eps, s, weight, bias, y, stats, x, residual, alpha, beta, given=out is not None)
    return y, s, stats


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
    if (
        axes == (x.dim() - 1,)
        and x.is_contiguous()
        and dy.is_contiguous()
        and (extra is None or extra.is_contiguous())
        and _is_row(weight, x)
        and _is_row(bias, x)
    ):
        return contiguous.backward(x, spec, weight, bias, dy, stats, wanted, extra, target)
    dx = torch.empty(x.shape, dtype=x.dtype) if wanted[0] else None
    rows = launch.lay_out(axes, (x, weight, dy, dx, extra), x.shape)
    if rows is None:  # upstream gradients whose outer axes do not fold with x's to three
        dy, extra = dy.contiguous(), None if extra is None else extra.contiguous()
        rows = _laid_out(axes, (x, weight, dy, dx, extra), x)
    kinds = launch.Kinds(x.dtype, _dtype(weight), None, x.dtype, branch=target, packed=rows.packed)
    code = launch.backward_code(spec, kinds, dy.dtype, x.dtype, _dtype(extra), wanted)
    dw, db = launch.backward(code, rows, x, weight, dy, dx, extra, stats, wanted[1], wanted[2])
    shape = [x.shape[a] if a in axes else 1 for a in range(x.dim())]
    return (
        dx,
        None if dw is None or weight is None else launch.folded(dw, weight, shape),
        None if db is None or bias is None else launch.folded(db, bias, shape),
    )


CPU = Kernel(
    "cpu",
    refuses,
    forward,
    add_forward,
    backward,
    quick,
    quick_add,
    gated_launch.forward,
    gated_launch.backward,
    positions.COLUMNS,
    devices=("cpu",),
)
