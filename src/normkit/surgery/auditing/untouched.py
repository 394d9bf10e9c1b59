"""Running a model without leaving a trace on it."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Generator[None]:
    """Evaluate ``model`` inside; afterwards training flags, buffers and random states are what they were.

    Training flags are set module by module: a model's own ``train`` may do more than that. Gradients are not touched
    because nothing inside records any. PyTorch's fused encoder layer is off inside, so that its parts can be seen.

    Example:
        >>> model = nn.BatchNorm1d(3)
        >>> with untouched(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    flags = [(module, module.training) for module in model.modules()]
    kept = [(module, dict(module._buffers)) for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
    values = {id(b): (b, b._version, b.detach().clone()) for _, named in kept for b in named.values() if b is not None}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state = random.getstate()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(devices):
            for module, _ in flags:
                module.training = False
            torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        random.setstate(python_state)
        for module, training in flags:
            module.training = training
        for module, buffers in kept:
            module._buffers.clear()  # pyright: ignore[reportPrivateUsage]
            module._buffers.update(buffers)  # pyright: ignore[reportPrivateUsage]
        for buffer, version, value in values.values():
            _put_back(buffer, version, value)


def _put_back(buffer: Tensor, version: int, value: Tensor) -> None:
    if buffer._version != version:
        with torch.no_grad():
            buffer.copy_(value)
