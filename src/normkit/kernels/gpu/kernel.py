"""The GPU kernels as the registry sees them: what they take. Triton is imported for the first call that they take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import layout
from normkit.kernels.column_layout import shape_of
from normkit.kernels.contract import Columns, Kernel, Request

_TAKEN = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_LENGTH = 2**30  # positions: chunks are cut in 32 bits
LARGEST_COUNT = 2**31 - 1  # rows: program numbers are 32-bit, offsets 64-bit
LARGEST_WIDTH = 2**27  # so that the chunks of a row number fewer than a grid's second axis takes


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


def refuses(request: Request) -> str | None:
    """Return why the GPU kernels cannot take a request, or None."""
    why = _refuses_device(request) or _refuses_spec(request)
    if why is not None:
        return why
    return _refuses_rows(request) if request.channel is None else _refuses_columns(request, request.channel)


def _tensors(request: Request) -> dict[str, Tensor | None]:
    return {
        "x": request.x,
        "weight": request.weight,
        "bias": request.bias,
        "residual": request.residual,
        "gate": request.gate,
    }


def _refuses_device(request: Request) -> str | None:
    x = request.x
    if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "x is on the CPU; TRITON_INTERPRET=1 runs the GPU kernels there, slowly, for tests"
    if x.device.type not in ("cuda", "cpu"):
        return f"x is on {x.device}; the kernels run on CUDA and ROCm devices"
    for name, t in _tensors(request).items():
        if t is not None and t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}"
        if t is not None and t.dtype not in _TAKEN:
            return f"{name} is {t.dtype}; the kernels take float32, bfloat16 and float16"
    if x.numel() == 0:
        return "x is empty"
    return None if _installed() else "triton is not installed; CUDA builds of PyTorch bring it"


def _refuses_spec(request: Request) -> str | None:
    spec = request.spec
    checks = (
        (spec.statistic_dtype == "input", "every intermediate is to be in x's dtype; the kernels compute in float32"),
        (spec.statistic == "unbiased", "the unbiased variance has no kernel"),
        (spec.eps != "inside", "ε is not inside the root"),
        (spec.root != "reciprocal", f"root={spec.root!r}; the kernels multiply by 1/√"),
        (spec.root_rounding != "none", "the inverse root is to be rounded to x's dtype"),
        (spec.gate != "none" and spec.kind != "rms", f"gated {spec.kind} norms have no kernel"),
        ((spec.gate == "none") != (request.gate is None), "the spec and the call disagree on whether there is a gate"),
        (
            request.gate is not None and (request.bias is not None or request.residual is not None),
            "a gated norm with a bias or a residual has no kernel",
        ),
        (request.masked and request.channel is None, "masks have no row kernel"),
    )
    return next((why for wrong, why in checks if wrong), None)


def _refuses_rows(request: Request) -> str | None:
    x, parameters = request.x, (request.weight, request.bias)
    if not _foldable(request):
        return "the normalised axes form no single row, or more than three outer axes cannot be merged"
    trained = [p for p in parameters if p is not None and p.requires_grad and torch.is_grad_enabled()]
    shared = request.axes if request.gate is None else (x.dim() - 2, x.dim() - 1)  # a row of weights for every group
    if any(not _one_row(p, x, shared) for p in trained):
        return "a trainable weight or bias differs from row to row; its gradient has no kernel"
    width = 1
    for a in request.axes:
        width *= x.shape[a]
    if max(math.prod(x.shape[a] for a in shared), width) > LARGEST_WIDTH or x.numel() // width > LARGEST_COUNT:
        return f"more than {LARGEST_WIDTH} columns or {LARGEST_COUNT} rows"
    return None


def _refuses_columns(request: Request, channel: int) -> str | None:
    shape = shape_of(request.x, channel, 0 not in request.axes)
    if shape is None:
        return "neither channels nor positions lie side by side, or the positions of a sample lie on no single stride"
    if shape.positions > LARGEST_LENGTH or shape.channels > LARGEST_LENGTH:
        return f"more than {LARGEST_LENGTH} positions or channels"
    return None


def _foldable(request: Request) -> bool:
    shape, axes = tuple(request.x.shape), request.axes
    views = [t.expand(shape) for t in _tensors(request).values() if t is not None]
    if any(layout.row_stride(t, axes) is None for t in views):
        return False
    outer = [a for a in range(len(shape)) if a not in axes]
    return layout.fold([shape[a] for a in outer], [[t.stride(a) for a in outer] for t in views]) is not None


def _one_row(p: Tensor, x: Tensor, axes: tuple[int, ...]) -> bool:
    missing = x.dim() - p.dim()
    return all(p.shape[a - missing] == 1 for a in range(missing, x.dim()) if a not in axes)


def forward(*args: Any, **kwargs: Any) -> Any:
    """See `normkit.kernels.gpu.rows.forward`."""
    from normkit.kernels.gpu import rows

    return rows.forward(*args, **kwargs)


def add_forward(*args: Any, **kwargs: Any) -> Any:
    """See `normkit.kernels.gpu.rows.add_forward`."""
    from normkit.kernels.gpu import rows

    return rows.add_forward(*args, **kwargs)


def backward(*args: Any, **kwargs: Any) -> Any:
    """See `normkit.kernels.gpu.row_backward.backward`."""
    from normkit.kernels.gpu import row_backward

    return row_backward.backward(*args, **kwargs)


def quick(request: Request) -> Any:
    """Return the forward for contiguous rows of these dtypes, with everything decided that can be."""
    from normkit.kernels.gpu import contiguous

    x, w, b = request.x, request.weight, request.bias
    dtypes = x.dtype, None if w is None else w.dtype, None if b is None else b.dtype
    return contiguous.forward_for(request.spec, *dtypes, x.device)


def quick_add(request: Request) -> Any:
    """As `quick`, of a residual add and norm."""
    from normkit.kernels.gpu import contiguous

    assert request.residual is not None
    x, w, b = request.x, request.weight, request.bias
    dtypes = x.dtype, request.residual.dtype, None if w is None else w.dtype, None if b is None else b.dtype
    return contiguous.add_forward_for(request.spec, *dtypes, x.device)


def _columns(name: str) -> Callable[..., Any]:
    """Return a function of `normkit.kernels.gpu.positions`, which is imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from normkit.kernels.gpu import positions

        return getattr(positions, name)(*args, **kwargs)

    return call


COLUMNS = Columns(*map(_columns, ("forward", "backward", "apply", "apply_backward", "moments")))


def gated_forward(*args: Any, **kwargs: Any) -> Any:
    """See `normkit.kernels.gpu.gated_launch.forward`."""
    from normkit.kernels.gpu import gated_launch

    return gated_launch.forward(*args, **kwargs)


def gated_backward(*args: Any, **kwargs: Any) -> Any:
    """See `normkit.kernels.gpu.gated_launch.backward`."""
    from normkit.kernels.gpu import gated_launch

    return gated_launch.backward(*args, **kwargs)


GPU = Kernel(
    "gpu",
    refuses,
    forward,
    add_forward,
    backward,
    quick,
    quick_add,
    gated_forward,
    gated_backward,
    COLUMNS,
    devices=("cuda",),  # ROCm's devices go by this name, too
)
