"""The device of a run: whether it is there, the clock that tells its time, and the memory that a sample may take."""

from __future__ import annotations

import re
import time
from importlib.util import find_spec

import torch

from normkit.bench.shapes import is_gpu
from normkit.bench.timing import SAMPLE, Clock

GPU_SAMPLE = 5e-3  # seconds: a wait for the device costs some 10 µs, and the first call of a sample finds it idle
_HOST_BYTES = 1 << 32


def check_device(name: str) -> str:
    """Return the name of a device that can be timed, and make it the current one.

    Raises:
        ValueError: for any other, with what to do about it.

    Example:
        >>> check_device("cpu")
        'cpu'
    """
    if name == "cpu":
        return name
    if re.fullmatch(r"cuda(:\d+)?", name) is None:
        raise ValueError(f"--device {name!r}: expected cpu, cuda or cuda:1")
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"--device {name}: this PyTorch ({torch.__version__}) is built for CPUs; install a build for CUDA or ROCm"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: PyTorch finds no GPU; see that nvidia-smi lists one and CUDA_VISIBLE_DEVICES names it"
        )
    index, count = int(name.partition(":")[2] or torch.cuda.current_device()), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"--device {name}: PyTorch finds {count} GPU{'s' if count > 1 else ''}; take cuda:{count - 1}")
    if find_spec("triton") is None:
        raise ValueError(f"--device {name}: the GPU kernels need Triton: pip install triton")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def clock_of(device: str) -> Clock:
    """Return seconds as a function; on a GPU everything queued before has run when they are read."""
    if not is_gpu(device):
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def least_of(device: str) -> float:
    """Return how many seconds a sample is to last."""
    return GPU_SAMPLE if is_gpu(device) else SAMPLE


def bytes_for_graphs(device: str) -> int:
    """Return what the forwards of one sample may hold until their backwards run: a quarter of a GPU's memory."""
    if not is_gpu(device):
        return _HOST_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
