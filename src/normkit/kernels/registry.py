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

BACKENDS = ("auto", "reference", "cpu", "gpu")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the reference is called by ops, not through the registry")


REFERENCE = Kernel("reference", lambda request: None, _never, _never, _never, _never, _never, _never, _never)


@dataclass(frozen=True)
class Decision:
    """The kernel chosen, why, and why each kernel before it was passed over."""

    kernel: Kernel
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


class _State(threading.local):
    """What `use` set in this thread; a ContextVar would break full-graph compilation.

    Set in ``__init__``, so that every thread has attributes of its own: torch.compile guards those, and a value that
    lay on the class would be burnt into the code that it compiles first.
    """

    def __init__(self) -> None:
        self.backend: str | None = None
        self.batch_invariant: bool = _invariance_from_environment()


@lru_cache(maxsize=1)
def _from_environment() -> str:
    return check_backend(os.environ.get("NORMKIT_BACKEND", "auto"), "NORMKIT_BACKEND")


def _invariance_from_environment() -> bool:
    given = os.environ.get("NORMKIT_BATCH_INVARIANT", "0")
    if given not in ("", "0", "1"):
        raise ValueError(f"NORMKIT_BATCH_INVARIANT: expected 0 or 1, got {given!r}")
    return given == "1"


_state = _State()


def check_backend(name: str, owner: str) -> str:
    """Return the name of a backend, or raise."""
    if name not in BACKENDS:
        raise ValueError(f"{owner}: unknown backend {name!r}; one of {', '.join(BACKENDS)}")
    return name


def backend() -> str:
    """Return the backend in force: what `use` says, else NORMKIT_BACKEND, else ``"auto"``."""
    return _state.backend or _from_environment()


def batch_invariant() -> bool:
    """Say whether a row's bits must depend on that row alone: what `use` says, else NORMKIT_BATCH_INVARIANT."""
    return _state.batch_invariant


@contextmanager
def use(backend: str | None = None, *, batch_invariant: bool | None = None) -> Generator[None]:
    """Choose what computes norms inside a ``with`` block, in this thread. What is left out stays as it is.

    Args:
        backend: ``"auto"`` the fastest kernel that takes a call, the reference otherwise; ``"reference"`` plain PyTorch
            operators; ``"cpu"`` or ``"gpu"`` these fused kernels, or an error that says why they cannot.
        batch_invariant: True: the bits of a row of y, and of dx, depend on that row alone, not on how many rows there
            are, where it stands, strides or threads. The fused kernels keep that; the reference and compiled code do
            not. So a fused kernel runs, or an error says why it cannot. Under ``torch.compile`` and dispatch modes
            it is called through a registered operator, which a compiler does not look into; export, `torch.func`,
            forward mode, function modes, subclasses and second derivatives raise.

    A backward pass uses what its forward used. Whatever looks inside operators (compiling, exporting, `torch.func`,
    forward mode, dispatch and function modes) is given plain PyTorch operators under every backend, unless
    ``batch_invariant`` is on. NORMKIT_BACKEND and NORMKIT_BATCH_INVARIANT=1 set the same for a whole process.

    Raises:
        ValueError: for an unknown name, and for the reference where rows are to be batch-invariant.
        TypeError: for a ``batch_invariant`` that is no bool.

    Example:
        >>> import torch, normkit as nk
        >>> x = torch.randn(2, 8)
        >>> with nk.use("reference"):
        ...     a = nk.rms_norm(x)
        >>> bool(torch.allclose(a, nk.rms_norm(x)))
        True
        >>> with nk.use(batch_invariant=True):
        ...     bool(torch.equal(nk.rms_norm(x)[1], nk.rms_norm(x[1])))
        True
    """
    before = _state.backend, _state.batch_invariant
    wanted = before[0] if backend is None else check_backend(backend, "use")
    if batch_invariant is not None and not isinstance(batch_invariant, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"use: batch_invariant must be True or False, got {batch_invariant!r}")
    invariant = before[1] if batch_invariant is None else batch_invariant
    if invariant and wanted == "reference":
        raise ValueError(
            "use: backend='reference' and batch_invariant=True contradict each other: plain PyTorch operators choose "
            "the order of a sum by the shape of x"
        )
    _state.backend, _state.batch_invariant = wanted, invariant
    try:
        yield
    finally:
        _state.backend, _state.batch_invariant = before


@lru_cache(maxsize=1)
def _kernels() -> tuple[Kernel, ...]:
    from normkit.kernels.cpu.kernel import CPU  # not before it is needed, and where a digest of our imports finds it
    from normkit.kernels.gpu.kernel import GPU

    return (CPU, GPU)


def check_reference(why: str) -> None:
    """Raise where only the reference can run, although another backend or batch-invariant rows were asked for.

    Raises:
        ValueError: naming ``why``.
    """
    wanted = backend()
    if wanted not in ("auto", "reference"):
        raise ValueError(f"backend {wanted!r} was asked for by name but cannot take this call: {why}")
    refuse_invariant(why)


def not_invariant(why: str) -> ValueError:
    """Return the error of a call that no kernel can compute row by row."""
    return ValueError(
        f"batch_invariant=True needs a fused kernel, and none can take this call: {why}. Without batch_invariant plain "
        "PyTorch operators run, whose order of a sum follows the shape of x"
    )


def refuse_invariant(why: str) -> None:
    """Raise where batch-invariant rows were asked for of a norm that asks no kernel.

    Raises:
        ValueError: naming ``why``.
    """
    if batch_invariant():
        raise not_invariant(why)


def choose(request: Request) -> Decision:
    """Return the first kernel that takes the request.

    Raises:
        ValueError: when a backend was asked for by name and refuses an x that is not empty, or when rows are to be
            batch-invariant and no kernel takes them.
    """
    wanted = backend()
    if wanted == "reference":
        refuse_invariant("the reference was asked for by name")
        return Decision(REFERENCE, "asked for by name")
    rejected: list[tuple[str, str]] = []
    here = [k for k in _kernels() if request.x.device.type in k.devices]
    for kernel in (here or _kernels()[:1]) if wanted == "auto" else _kernels():
        if wanted not in ("auto", kernel.name):
            continue
        why = kernel.refuses(request)
        if why is None:
            return Decision(kernel, "takes this call" if wanted == "auto" else "asked for by name", tuple(rejected))
        rejected.append((kernel.name, why))
    if request.x.numel():  # an empty x leaves nothing to compute, by whatever name
        check_reference(rejected[-1][1])
    return Decision(REFERENCE, "plain PyTorch operators take every call", tuple(rejected))
