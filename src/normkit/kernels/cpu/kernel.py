"""The CPU kernels as the registry sees them: what they take, and tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from normkit.kernels.contract import Kernel, Request
from normkit.kernels.cpu import pool, positions
from normkit.kernels.cpu import rows as launch
from normkit.kernels.rounding import result_dtype
from normkit.spec import NormSpec


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("llvmlite") is not None and find_spec("numba") is not None


def refuses(request: Request) -> str | None:
    """Return why the CPU kernels cannot take a request, or None."""
    why = _refuses_spec(request.spec) or _refuses_tensors(request)
    if why is not None:
        return why
    return _refuses_rows(request) if request.channel is None else positions.refuses(request)


def _refuses_spec(spec: NormSpec) -> str | None:
    checks = (
        (spec.statistic_dtype == "input", "every intermediate is to be in x's dtype; the kernels compute in float32"),
        (spec.statistic == "unbiased", "the unbiased variance has no kernel"),
        (spec.eps != "inside", "ε is not inside the root"),
        (spec.root != "reciprocal", f"root={spec.root!r}; the kernels multiply by 1/√"),
        (spec.root_rounding != "none", "the inverse root is to be rounded to x's dtype"),
        (spec.gate != "none", "gated norms have no kernel"),
    )
    return next((why for wrong, why in checks if wrong), None)


def _refuses_tensors(request: Request) -> str | None:
    tensors = {"x": request.x, "weight": request.weight, "bias": request.bias, "residual": request.residual}
    for name, t in tensors.items():
        if t is not None and t.device.type != "cpu":
            return f"{name} is on {t.device}"
        if t is not None and t.dtype not in launch.NAMES:
            return f"{name} is {t.dtype}; the kernels take float32, bfloat16 and float16"
    if request.x.numel() == 0:
        return "x is empty"
    return None if _installed() else "numba is not installed"


def _refuses_rows(request: Request) -> str | None:
    parameters = (request.weight, request.bias)
    if request.gated or request.masked:
        return "masks and gates have no row kernel"
    if (
        not _contiguous(request)
        and layout_of(request.x, request.axes, request.weight, request.bias, request.residual) is None
    ):
        return "the normalised axes form no single row, or more than three outer axes cannot be merged"
    trained = [p for p in parameters if p is not None and p.requires_grad and torch.is_grad_enabled()]
    if any(not one_row(p, request.x, request.axes) for p in trained):
        return "a trainable weight or bias differs from row to row; its gradient has no kernel"
    return None


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


def layout_of(
    x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> launch.Rows | None:
    """Return how the rows of the inputs lie, or None."""
    return launch.lay_out(axes, (x, weight, bias, residual), x.shape)


def one_row(p: Tensor, x: Tensor, axes: tuple[int, ...]) -> bool:
    """Say whether every row uses the same values of ``p``, so that its gradient is one sum over rows."""
    missing = x.dim() - p.dim()
    return all(p.shape[a - missing] == 1 for a in range(missing, x.dim()) if a not in axes)


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


def quick(request: Request) -> Callable[..., Tensor]:
    """Return the forward for contiguous rows of these dtypes, with everything decided that can be."""
    spec, w, b, dtype = request.spec, _dtype(request.weight), _dtype(request.bias), request.x.dtype
    kinds = launch.Kinds(dtype, w, b, result_dtype(spec, dtype, w, b))
    code = launch.forward_code(spec, kinds)

    size, out = dtype.itemsize, kinds.y.itemsize
    call, pack, most = code.call, launch.pack_forward, pool.PARALLEL_FROM

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty_like(x) if kinds.y == dtype else torch.empty(x.shape, dtype=kinds.y)
        elements, width = x.numel(), x.shape[-1]
        if elements >= most:
            launch.forward_contiguous(code, x, weight, bias, eps, y, None)
        elif elements:
            rows = elements // width
            wp, bp = 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()
            block = pack(
                0, rows, rows, width, eps, 1.0, 1.0, 0, 0, 1, rows, 0, 0,
                x.data_ptr(), 0, 0, width * size, 0, wp, 0, 0, 0, 0, bp, 0, 0, 0, 0, y.data_ptr(), 0, 0, width * out, 0,
                0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
            call(block)
        return y

    return run


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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the sum s and, if ``keep``, the row statistics of s."""
    w, b = _dtype(weight), _dtype(bias)
    stream = torch.promote_types(x.dtype, residual.dtype)
    s, y_dtype = torch.empty(x.shape, dtype=stream), result_dtype(spec, x.dtype, w, b)
    y = torch.empty(x.shape, dtype=y_dtype)
    tensors = (s, weight, bias, y, x, residual)
    plain = _all_contiguous(x, axes, weight, bias, residual)
    rows = launch.contiguous_rows(x, tensors) if plain else _laid_out(axes, tensors, x)
    kinds = launch.Kinds(stream, w, b, y_dtype, x.dtype, residual.dtype, rows.packed)
    code = launch.forward_code(spec, kinds)
    stats = launch.new_statistics(spec, rows.count) if keep else None
    launch.forward(code, rows, eps, s, weight, bias, y, stats, x, residual, alpha, beta)
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
    dx = torch.empty(x.shape, dtype=x.dtype) if wanted[0] else None
    tensors = (x, weight, dy, dx, extra)
    if axes == (x.dim() - 1,) and _is_row(weight, x) and all(t is None or t.is_contiguous() for t in tensors):
        rows = launch.contiguous_rows(x, tensors)
    else:
        rows = launch.lay_out(axes, tensors, x.shape)
    if rows is None:  # upstream gradients whose outer axes do not fold with x's to three
        dy, extra = dy.contiguous(), None if extra is None else extra.contiguous()
        rows = _laid_out(axes, (x, weight, dy, dx, extra), x)
    kinds = launch.Kinds(x.dtype, _dtype(weight), None, x.dtype, branch=target, packed=rows.packed)
    code = launch.backward_code(spec, kinds, dy.dtype, x.dtype, _dtype(extra), wanted)
    dw, db = launch.backward(code, rows, x, weight, dy, dx, extra, stats, wanted[1], wanted[2])
    shape = [x.shape[a] if a in axes else 1 for a in range(x.dim())]

    def of(gradient: Tensor | None, p: Tensor | None) -> Tensor | None:
        if gradient is None or p is None:
            return None
        if p.numel() == gradient.shape[1]:
            return launch.fold(gradient, p.dtype).view(p.shape)
        # A parameter that broadcasts along the row (a scalar gain) collects the row's sum.
        return launch.fold(gradient, torch.float32).view(shape).sum_to_size(p.shape).to(p.dtype)

    return dx, of(dw, weight), of(db, bias)


CPU = Kernel("cpu", refuses, forward, add_forward, backward, quick, positions.COLUMNS)
