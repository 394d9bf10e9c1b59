"""Kernels say what they take; choosing one returns a decision with its reason.

The reference takes everything, so there is always a decision. A backend asked for by name must run or raise; chosen
automatically it may be passed over, and `Decision.rejected` says why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from normkit.kernels.contract import Kernel, Request

BACKENDS = ("auto", "reference", "cpu")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the reference is called by ops, not through the registry")


REFERENCE = Kernel("reference", lambda request: None, *[_never] * 8)


@dataclass(frozen=True)
class Decision:
    """The kernel chosen, why, and why each kernel before it was passed over."""

    kernel: Kernel
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


class _State(threading.local):
    """What `use` set in this thread; a ContextVar would break full-graph compilation."""

    backend: str | None = None


_state = _State()


@lru_cache(maxsize=1)
def _from_environment() -> str:
    return check_backend(os.environ.get("NORMKIT_BACKEND", "auto"), "NORMKIT_BACKEND")


def check_backend(name: str, owner: str) -> str:
    """Return the name of a backend, or raise."""
    if name not in BACKENDS:
        raise ValueError(f"{owner}: unknown backend {name!r}; one of {', '.join(BACKENDS)}")
    return name


def backend() -> str:
    """Return the backend in force: what `use` says, else NORMKIT_BACKEND, else ``"auto"``."""
    return _state.backend or _from_environment()


@contextmanager
def use(backend: str = "auto") -> Generator[None]:
    """Choose what computes norms inside a ``with`` block, in this thread.

    Args:
        backend: ``"auto"`` the fastest kernel that takes a call, the reference otherwise; ``"reference"`` plain PyTorch
            operators; ``"cpu"`` the fused CPU kernels or an error that says why they cannot.

    A backward pass uses what its forward used. Whatever looks inside operators (compiling, exporting, `torch.func`,
    forward mode, dispatch and function modes) is given plain PyTorch operators under every backend. NORMKIT_BACKEND
    sets the same for a whole process.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.randn(2, 8)
        >>> with nk.use("reference"):
        ...     a = nk.rms_norm(x)
        >>> bool(torch.allclose(a, nk.rms_norm(x)))
        True
    """
    before, _state.backend = _state.backend, check_backend(backend, "use")
    try:
        yield
    finally:
        _state.backend = before


@lru_cache(maxsize=1)
def _kernels() -> tuple[Kernel, ...]:
    from normkit.kernels.cpu.kernel import CPU  # not before it is needed, and where a digest of our imports finds it

    return (CPU,)


def check_reference(why: str) -> None:
    """Raise where a backend was asked for by name although only the reference can run.

    Raises:
        ValueError: naming ``why``.
    """
    wanted = backend()
    if wanted not in ("auto", "reference"):
        raise ValueError(f"backend {wanted!r} was asked for by name but cannot take this call: {why}")


def choose(request: Request) -> Decision:
    """Return the first kernel that takes the request.

    Raises:
        ValueError: when a backend was asked for by name and refuses an x that is not empty.
    """
    wanted = backend()
    if wanted == "reference":
        return Decision(REFERENCE, "asked for by name")
    rejected: list[tuple[str, str]] = []
    for kernel in _kernels():
        if wanted not in ("auto", kernel.name):
            continue
        why = kernel.refuses(request)
        if why is None:
            return Decision(kernel, "takes this call" if wanted == "auto" else "asked for by name", tuple(rejected))
        rejected.append((kernel.name, why))
    if request.x.numel():  # an empty x leaves nothing to compute, by whatever name
        check_reference(rejected[-1][1])
    return Decision(REFERENCE, "plain PyTorch operators take every call", tuple(rejected))
