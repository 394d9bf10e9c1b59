"""Launching: what Triton compiled once is called again without asking Triton.

`kernel[grid](…)` binds, specialises and hashes forty arguments on every call. Here the compiled kernel is kept under
all that Triton would look at, and its launcher called: `python benchmarks/gpu_launch.py` times both. Where all of it is
known (contiguous rows of one width, every address a multiple of 16) it is not even collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from normkit.kernels.gpu.settings import Setting, clusters_wanted

TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BY_SIZE = torch.version.hip is not None  # there buffer instructions take 32-bit offsets where those reach
ALIGNMENT = 16  # bytes: what Triton asks of an address before it uses 128-bit loads and stores


class Launcher:
    """A kernel with its constants, which come last in its signature.

    Args:
        kernel: the ``triton.jit`` function.
        constants: by name, in the order of the signature.
        warps: of a program.
        ctas: multiprocessors that share a program's tile.
    """

    __slots__ = ("_compiled", "_options", "_values", "constants", "ctas", "kernel", "warps")

    def __init__(self, kernel: Any, constants: dict[str, Any], warps: int, ctas: int = 1) -> None:
        self.kernel, self.constants, self.warps, self.ctas = kernel, constants, warps, ctas
        self._options = options_of(warps, ctas)
        self._values = tuple(constants.values())
        self._compiled: dict[Any, Any] = {}

    def launch(self, same: bool, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device) -> None:
        """Launch what is compiled already, or ask Triton. Tensors come first, then numbers.

        ``same`` says that Triton would specialise as it did when that was said before: aligned addresses and the same
        integers. Without it every argument is looked at. Under the interpreter and on another than the current device
        it is the long way.
        """
        if device.type == "cpu" or device.index != torch.cuda.current_device():
            self(grid, arguments, device)
            return
        kind = device.index if same and not _BY_SIZE else (device.index, kind_of(arguments))
        compiled = self._compiled.get(kind)
        if compiled is None:
            self._compiled[kind] = self.ask(grid, arguments)
            return
        run_compiled(compiled, grid, (*arguments, *self._values), stream_of(device.index))

    def __call__(self, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device) -> None:
        """Launch with Triton's own look at every argument."""
        if device.type == "cpu":
            self.kernel[grid](*arguments, **self.constants)
            return
        with torch.cuda.device(device):
            self.ask(grid, arguments)

    def ask(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> Any:
        """Launch by Triton's own way on the current device, and return the compiled kernel."""
        return self.kernel[grid](*arguments, **self.constants, **self._options)


def kind_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return all that Triton would look at: arguments that differ in less run the same compiled kernel.

    Of a tensor that is the dtype and whether its address is a multiple of 16, neither sizes nor strides, but on AMD's
    whether 32 bits reach all of its storage; of a number what `_kinds` says (Triton's `native_specialize_impl`, asked
    in 3.6 and 3.9). Where a kernel says do_not_specialize it ignores some of that, and one compiled kernel is kept
    under two kinds.
    """
    found: list[Any] = []
    for t in arguments:
        if not isinstance(t, Tensor):
            break
        found.append(t.dtype)
        short = not _BY_SIZE or t.untyped_storage().size() < 2**31
        found.append((t.data_ptr() % ALIGNMENT == 0, short))
    return _kinds(*arguments[len(found) // 2 :]), *found


@lru_cache(maxsize=4096, typed=True)
def _kinds(*numbers: int | float) -> tuple[Any, ...]:
    """Integers of 1 become constants, multiples of 16 are known as such, and 64 bits are taken where 32 do not suffice.

    Floats are float32 whatever they are. No bool or None is passed, and 1 and 1.0 are told apart here.
    """
    return tuple([None if isinstance(n, float) else (n == 1, n % 16 == 0, -(2**31) <= n < 2**31) for n in numbers])


def launcher_of(kernel: Any, constants: dict[str, Any], setting: Setting) -> Launcher:
    """Return a launcher with those of the constants that the kernel has, in the order of its signature."""
    given = constants | {"ROWS": setting.rows, "C": setting.block}
    own = {name: given[name] for name in kernel.arg_names if name in given}
    return Launcher(kernel, own, setting.warps, setting.ctas)


def options_of(warps: int, ctas: int) -> dict[str, Any]:
    """Return what the compiler is asked for: nothing is fused that the source does not fuse."""
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    return options | {"num_ctas": ctas} if ctas > 1 else options


def run_compiled(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int) -> None:
    """Call a compiled kernel's launcher; hooks of a profiler are told as Triton would tell them."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    metadata = compiled.launch_metadata(grid, stream, *arguments)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *arguments)


stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)  # pyright: ignore[reportPrivateUsage]


def aligned(*tensors: Tensor | None) -> bool:
    """Say whether every address is a multiple of 16."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return bits % ALIGNMENT == 0


@lru_cache(maxsize=16)
def clusters_on(device: torch.device) -> bool:
    """Say whether tiles are shared by clusters on this device: where that is wanted and the device has them."""
    if not clusters_wanted():
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; four under the interpreter, so that partials are many."""
    if device.type == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
