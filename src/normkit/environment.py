"""What machine and which versions this is, for `normkit env` and for the head of every run folder.

Everything is optional: what cannot be found out is left out, and nothing here raises. Nothing of normkit is
imported.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# The instruction sets that decide how fast, and by which kernels, a norm or a matrix product runs.
_FLAGS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16",
)  # fmt: skip


def describe(calibrate: bool = True) -> dict[str, Any]:
    """Return the environment as a JSON-ready dict; the calibration takes about half a second."""
    facts: dict[str, Callable[[], Any]] = {
        "normkit": lambda: _version("normkit"),
        "python": platform.python_version,
        "torch": lambda: str(torch.__version__),
        "numpy": lambda: _version("numpy"),
        "platform": platform.platform,
        "cpu": cpu_model,
        "cpu_flags": _cpu_flags,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability,
        "cores": usable_cores,
        "torch_threads": torch.get_num_threads,
        "blas": _blas,
        "memory_bytes": _memory,
        "gpus": _gpus,
        "cuda": lambda: torch.version.cuda or torch.version.hip,
        "triton": lambda: _version("triton"),
    }
    if calibrate:
        facts["calibration"] = _calibration
    return {name: _or_none(fact) for name, fact in facts.items()}


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, and its container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _or_none(_quota)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def lines(environment: dict[str, Any]) -> Iterable[str]:
    """Return the environment as aligned text, one fact a line."""
    flat: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": _text(item) for key, item in value.items()}
        else:
            flat[name] = _text(value)
    width = max(map(len, flat))
    return [f"{name:<{width}}  {value}".rstrip() for name, value in flat.items()]


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _or_none(fact: Callable[[], Any]) -> Any:
    """Return the fact, or None where it cannot be had: an odd system must not stop a run."""
    try:
        return fact()
    except Exception:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _quota() -> float | None:
    """Return the cgroup's processor quota in cores (version 2, then version 1)."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _cpu_flags() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    present = set(match.group(1).split()) if match else set[str]()
    return [flag for flag in _FLAGS if flag in present]


def _blas() -> list[str]:
    """Return the lines in which torch names its matrix and vector libraries."""
    names = ("Math Kernel Library", "MKL-DNN", "oneDNN", "OpenMP", "OpenBLAS", "Accelerate")
    shown = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return [line for line in shown if any(name in line for name in names) and "=" not in line]


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _calibration() -> dict[str, float]:
    """Measure what this machine gives right now: a float32 matrix product and a copy beyond the caches."""
    n = 768
    a, b, c = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    source, target = torch.ones(2**24), torch.empty(2**24)  # 64 MiB each
    matmul = _best(lambda: torch.mm(a, b, out=c), budget=0.2)
    copy = _best(lambda: target.copy_(source), budget=0.2)
    return {
        "matmul_gflops": round(2 * n**3 / matmul / 1e9, 1),
        "copy_gb_per_s": round(2 * source.numel() * source.element_size() / copy / 1e9, 1),
    }


def _best(call: Callable[[], object], budget: float) -> float:
    """Return the shortest time of one call within ``budget`` seconds: noise only ever adds."""
    call()
    best, end = math.inf, time.perf_counter() + budget
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
