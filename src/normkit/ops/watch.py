"""What looks at a call, and whether a tensor has memory that a kernel may touch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from normkit.kernels import registry
from normkit.kernels.contract import Kernel, Request
from normkit.kernels.registry import REFERENCE

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_keys_of = _C._dispatch_keys


@lru_cache(maxsize=1)
def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of an ordinary CPU tensor and of an inference tensor, whatever mode the caller is in."""
    keys: set[int] = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())
    return frozenset(keys)


def watched() -> bool:
    """Say whether something looks inside operators right now, so that only plain ATen is right."""
    return (
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack() > 0
        or _C._is_torch_function_mode_enabled()
        or _C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or _C._get_tracing_state() is not None
    )


def plain(t: Tensor | None) -> bool:
    """Say whether ``t`` is an ordinary CPU tensor with memory: no subclass, no wrapper, no lazy negation."""
    if t is None:
        return True
    kind = type(t)
    return (kind is Tensor or kind is nn.Parameter) and _keys_of(t).raw_repr() in _plain_keys()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Say whether autograd wants a gradient for any of these."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def choose(request: Request, *tensors: Tensor | None) -> Kernel:
    """Return the kernel for a request; only ordinary tensors have memory that a kernel may touch."""
    if all(map(plain, tensors)):
        return registry.choose(request).kernel
    registry.check_reference("a tensor is no ordinary CPU tensor with memory")
    return REFERENCE
