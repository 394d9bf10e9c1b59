"""What looks at a call, and whether a tensor has memory that a kernel may touch."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn import Parameter

from normkit.kernels import registry
from normkit.kernels.contract import Kernel, Request
from normkit.kernels.registry import REFERENCE

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_keys_of = _C._dispatch_keys


# Bound once: these questions are asked on every call, and each attribute looked up costs 0.03 µs of a norm's 3.
_modes = _C._len_torch_dispatch_stack
_function_mode = _C._is_torch_function_mode_enabled
_functorch_level = _C._functorch.maybe_current_level
_tracing = _C._get_tracing_state
_known: frozenset[int] = frozenset()


def _learn() -> frozenset[int]:
    """Learn the dispatch keys of an ordinary CPU tensor and of an inference tensor, whatever mode the caller is in."""
    global _known
    keys: set[int] = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())
    _known = frozenset(keys)
    return _known


def watched() -> bool:
    """Say whether something looks inside operators right now, so that only plain ATen is right."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _function_mode()
        or _functorch_level() is not None
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or _tracing() is not None
    )


def plain(t: Tensor | None) -> bool:
    """Say whether ``t`` is an ordinary CPU tensor with memory: no subclass, no wrapper, no lazy negation."""
    if t is None:
        return True
    kind = type(t)
    return (kind is Tensor or kind is Parameter) and _keys_of(t).raw_repr() in (_known or _learn())


_known_elsewhere: dict[str, frozenset[int]] = {}


def _learn_elsewhere(device: torch.device) -> frozenset[int]:
    keys: set[int] = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.add(_keys_of(torch.empty(0, device=device)).raw_repr())
    _known_elsewhere[device.type] = frozenset(keys)
    return _known_elsewhere[device.type]


def ordinary(t: Tensor | None) -> bool:
    """As `plain`, on a CPU or a GPU."""
    if t is None or plain(t):
        return True
    kind = type(t)
    if (kind is not Tensor and kind is not Parameter) or not t.is_cuda:
        return False
    return _keys_of(t).raw_repr() in (_known_elsewhere.get("cuda") or _learn_elsewhere(t.device))


def side_by_side(x: Tensor, *others: Tensor | None) -> torch.device | None:
    """Return the device of ordinary tensors that all lie there, None where they are not such."""
    device = x.device
    for t in (x, *others):
        if t is not None and (t.device != device or not ordinary(t)):
            return None
    return device


def is_dtensor(x: Tensor) -> bool:
    """Say whether x is a DTensor that eager code works on; a compiler gets the reference, which it partitions."""
    if type(x) is Tensor or "torch.distributed.tensor" not in sys.modules:
        return False
    return isinstance(x, sys.modules["torch.distributed.tensor"].DTensor) and not torch.compiler.is_compiling()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Say whether autograd wants a gradient for any of these."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def choose(request: Request, *tensors: Tensor | None) -> Kernel:
    """Return the kernel for a request; only ordinary tensors have memory that a kernel may touch."""
    if all(map(ordinary, tensors)):
        return registry.choose(request).kernel
    registry.check_reference("a tensor is no ordinary CPU or CUDA tensor with memory")
    return REFERENCE
