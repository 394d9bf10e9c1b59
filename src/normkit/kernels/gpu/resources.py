"""What a launch would use on a GPU that is not there: compiled for a target, its PTX and its registers are read.

Example:
    >>> from importlib.util import find_spec
    >>> import torch, normkit as nk
    >>> if find_spec("triton"):
    ...     from normkit.kernels.gpu import resources, rows
    ...
    ...     x = torch.empty(8, 4096, dtype=torch.bfloat16)
    ...     call = lambda: rows.forward(x, nk.TORCH_RMS_NORM, None, None, axes=(1,), eps=1e-6)
    ...     [used] = resources.of(call)
    ...     assert used.local_bytes == 0 and used.stack_bytes == 0
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normkit.kernels.gpu.launch import ALIGNMENT, Launcher, options_of

_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
    torch.uint8: "u8",
}

_REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+).*?\(\{(.*?)\}\).*?: \(tensor<([0-9x]+)x', re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """A kernel, what it is compiled for, and with how many programs it would have been started."""

    kernel: Any
    constants: dict[str, Any]
    warps: int
    ctas: int
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Resources:
    """What the compiler reports of one kernel.

    Args:
        kernel: its name.
        warps: of a program.
        registers: of a thread.
        shared_bytes: of a program.
        local_bytes: of a thread: what spilled, or an array that found no registers.
        stack_bytes: of a thread.
        ptx: the program.
        ttgir: the program before, where reductions still are: Triton's IR with the layouts it chose.
    """

    kernel: str
    warps: int
    registers: int
    shared_bytes: int
    local_bytes: int
    stack_bytes: int
    ptx: str
    ttgir: str

    def count(self, pattern: str) -> int:
        """Return how often a regular expression matches in the PTX."""
        return len(re.findall(pattern, self.ptx))

    def sums(self) -> list[int]:
        """Return over how many elements each reduction by addition runs."""
        found: list[int] = []
        for axis, body, shape in _REDUCTION.findall(self.ttgir):
            if "arith.addf" in body:
                found.append(int(shape.split("x")[int(axis)]))
        return found


def launches(call: Callable[[], object]) -> list[Launch]:
    """Return what ``call`` would launch; nothing runs, and outputs stay as they were allocated."""
    seen: list[Launch] = []

    def note(self: Launcher, same: bool, grid: tuple[int, int, int], arguments: Sequence[Any], device: object) -> None:
        seen.append(Launch(self.kernel, self.constants, self.warps, self.ctas, grid, tuple(arguments)))

    with patch.object(Launcher, "launch", note):
        call()
    return seen


def of(call: Callable[[], object], capability: int = 90) -> list[Resources]:
    """Compile everything that ``call`` would launch for a CUDA target, and return what each kernel uses.

    Raises:
        RuntimeError: under TRITON_INTERPRET, where Triton compiles nothing.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton compiles nothing; run without it")
    return [compiled(launch, capability) for launch in launches(call)]


def compiled(launch: Launch, capability: int) -> Resources:
    """Compile one launch for a CUDA target, and return what it uses."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    generic = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for i, name in enumerate(names):
        value = values[name]
        if name in launch.constants or (
            value is not True and type(value) is int and value == 1 and name not in generic
        ):
            signature[name], constants[i,] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        size = value.data_ptr() if isinstance(value, Tensor) else value
        if type(size) is int and size % ALIGNMENT == 0 and name not in generic:
            attributes[i,] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    program = triton.compile(source, target=target, options=options_of(launch.warps, launch.ctas))
    registers, local, stack = _usage(program.asm["cubin"])
    shared = int(program.metadata.shared)
    texts = program.asm["ptx"], program.asm["ttgir"]
    return Resources(launch.kernel.__name__, launch.warps, registers, shared, local, stack, *texts)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Return registers, local and stack bytes, as the disassembler inside Triton's package reports them.

    What it calls shared leaves out what a launch asks for, which is all that a kernel uses.
    """
    [tool] = [p for p in Path(str(triton.__file__)).parent.rglob("cuobjdump") if p.is_file()]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    registers, local, stack = (int(found[k]) for k in ("REG", "LOCAL", "STACK"))
    return registers, local, stack
