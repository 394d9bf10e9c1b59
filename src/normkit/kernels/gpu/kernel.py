"""The GPU kernels as the registry sees them: what they take. Triton is imported for the first call that they take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from normkit.kernels import refusals
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
    why = _refuses_device(request) or refusals.of_spec(request.spec)
    if why is not None:
        return why
    if request.channel is not None:
        return refusals.of_columns(request) or _refuses_columns(request, request.channel)
    return refusals.of_rows(request) or _refuses_rows(request)


def _refuses_device(request: Request) -> str | None:
    x = request.x
    if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "x is on the CPU; TRITON_INTERPRET=1 runs the GPU kernels there, slowly, for tests"
    if x.device.type not in ("cuda", "cpu"):
        return f"x is on {x.device}; the kernels run on CUDA and ROCm devices"
    for name, t in request.tensors.items():
        if t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}"
        if t.dtype not in _TAKEN:
            return f"{name} is {t.dtype}; the kernels take float32, bfloat16 and float16"
    if x.numel() == 0:
        return "x is empty"
    return None if _installed() else "triton is not installed; CUDA builds of PyTorch bring it"


def _refuses_rows(request: Request) -> str | None:
    x = request.x
    width = math.prod([x.shape[a] for a in request.axes])
    shared = math.prod([x.shape[a] for a in refusals.sharing(request)])
    if max(shared, width) > LARGEST_WIDTH or x.numel() // width > LARGEST_COUNT:
        return f"more than {LARGEST_WIDTH} columns or {LARGEST_COUNT} rows"
    return None


def _refuses_columns(request: Request, channel: int) -> str | None:
    x = request.x
    if max(x.shape[channel], x.numel() // x.shape[channel]) > LARGEST_LENGTH:
        return f"more than {LARGEST_LENGTH} positions or channels"
    return None


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
