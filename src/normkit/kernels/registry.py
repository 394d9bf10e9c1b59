"""Kernels say what they take; choosing one returns a decision with its reason.

The reference takes everything, so there is always a decision. Faster kernels register in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.spec import NormSpec


@dataclass(frozen=True)
class Request:
    """What is to be computed, as far as a kernel's choice depends on it."""

    spec: NormSpec
    x: Tensor
    axes: tuple[int, ...]
    masked: bool


@dataclass(frozen=True)
class Kernel:
    """A way to compute `normkit.kernels.reference.normalize`, with the same signature.

    Args:
        name: how reports and ``explain`` call it.
        refuses: returns why it cannot take a request, or None if it can.
        normalize: the computation.
    """

    name: str
    refuses: Callable[[Request], str | None]
    normalize: Callable[..., Tensor]


@dataclass(frozen=True)
class Decision:
    """The kernel chosen, why, and why each kernel before it was passed over."""

    kernel: Kernel
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


REFERENCE = Kernel("reference", lambda request: None, reference.normalize)
_kernels: list[Kernel] = [REFERENCE]


def choose(request: Request) -> Decision:
    """Return the first kernel that takes the request."""
    rejected: list[tuple[str, str]] = []
    for kernel in _kernels:
        why = kernel.refuses(request)
        if why is None:
            reason = "plain PyTorch operators take every request" if kernel is REFERENCE else "takes this request"
            return Decision(kernel, reason, tuple(rejected))
        rejected.append((kernel.name, why))
    raise AssertionError("the reference refuses nothing")


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axes: tuple[int, ...],
    eps: float,
    mask: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Choose a kernel and run it; arguments as `normkit.kernels.reference.normalize` takes them."""
    if torch.compiler.is_compiling():  # what is traced is always the formula: Inductor fuses it
        return reference.normalize(x, spec, weight, bias, axes=axes, eps=eps, mask=mask, **rest)
    kernel = choose(Request(spec, x, axes, mask is not None)).kernel
    return kernel.normalize(x, spec, weight, bias, axes=axes, eps=eps, mask=mask, **rest)
