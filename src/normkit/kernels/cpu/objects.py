"""Compiled kernels: made once, kept on disk under a name that changes with anything that could change them.

The name of the folder is a digest of every source file of this package, of the versions of Numba, llvmlite and Python,
and of the processor and its features. A stale object can therefore not be found, let alone run. Loading one needs
llvmlite alone; Numba is imported only to compile (`python benchmarks/first_call.py`). A version that starts a folder
removes those that no process used for 30 days.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from normkit.kernels.cpu.compile import ENTRY, SHORT, compile_kernel, target_machine
from normkit.kernels.cpu.expiry import mark_used, remove_unused

_lock = threading.Lock()
# A fork waits for a compilation to end: the child would find Numba's locks held by a thread that it does not have.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_loaded: dict[str, tuple[int, int]] = {}
_keep: list[Any] = []  # the JIT and its libraries own the code they loaded
_said = False


def addresses_of(name: str, make: Callable[[], Callable[[Any], None]]) -> tuple[int, int]:
    """Return where the kernel called ``name`` is entered with a full block and with a short one.

    It comes from memory, from disk, or is compiled from ``make()``.

    Args:
        name: kind and tags, unique per kernel.
        make: returns the Python function to compile; called only when there is no object yet.
    """
    found = _loaded.get(name)
    if found is not None:
        return found
    with _lock:
        if name not in _loaded:
            _loaded[name] = _load(_object(name, make), name)
        return _loaded[name]


def _object(name: str, make: Callable[[], Callable[[Any], None]]) -> bytes:
    folder = cache_folder()
    path = None if folder is None else folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.o"
    stored = b"" if path is None else _read(path)
    if folder is not None and _intact(stored):
        mark_used(folder)
        return stored[32:]
    began = time.perf_counter()
    code = compile_kernel(make())
    kept = path is not None and _write(path, hashlib.sha256(code).digest() + code)
    _say_once(time.perf_counter() - began, folder if kept else None)
    return code


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _intact(stored: bytes) -> bool:
    """Say whether a file is whole: a torn write must not be run."""
    return len(stored) > 32 and hashlib.sha256(stored[32:]).digest() == stored[:32]


def _say_once(seconds: float, folder: Path | None) -> None:
    global _said
    if seconds > 1 and not _said:
        _said = True
        where = f"it is kept in {folder} for the next process"
        if folder is None:
            where = "it could not be kept for the next process; NORMKIT_CACHE names a folder that can be written"
        message = f"normkit: compiled a CPU kernel in {seconds:.1f} s; {where}"
        print(message, file=sys.stderr)  # noqa: T201  a wait of seconds needs a word, whatever the logging set-up


def _write(path: Path, content: bytes) -> bool:
    """Write whole or not at all; where the folder cannot be written, the object lives in this process alone."""
    try:
        first = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        if first:
            remove_unused(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)  # a folder filled by one user serves all who may read it
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError:
        return False
    return True


def _load(code: bytes, name: str) -> tuple[int, int]:
    import llvmlite.binding as llvm

    builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY).export_symbol(SHORT)
    library = builder.link(_linker(), name)
    _keep.append(library)
    return library[ENTRY], library[SHORT]


def link(name: str, code: str, symbol: str) -> int:
    """Return the address of ``symbol`` in LLVM code that calls into this process."""
    import llvmlite.binding as llvm

    with _lock:
        builder = llvm.JITLibraryBuilder().add_ir(code).export_symbol(symbol).add_current_process()
        library = builder.link(_linker(), name)
        _keep.append(library)
        return library[symbol]  # type: ignore[no-any-return]


def _linker() -> Any:
    import llvmlite.binding as llvm

    if not _keep:
        _keep.append(llvm.create_lljit_compiler(target_machine()))
    return _keep[0]


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """Return the folder of this version's objects, in NORMKIT_CACHE or the user's cache; None without a home."""
    root = os.environ.get("NORMKIT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if not root:
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # a user without a home, as containers have them
            return None
    return Path(root) / "normkit" / f"cpu-{fingerprint()}"


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Digest all that the machine code depends on."""
    import llvmlite.binding as llvm

    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {version(package)}\0".encode())
    digest.update(llvm.get_host_cpu_name().encode() + llvm.get_host_cpu_features().flatten().encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()[:20]
