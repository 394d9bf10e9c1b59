"""What the GPU kernels take per width, compiled for a GPU that need not be there: `python benchmarks/gpu_resources.py`.

Registers, stack (what spills) and shared memory are the compiler's own report. "Moved" is what a kernel reads and
writes over what its operator must: x and dy once, y and dx once, one row of weights; at the copy's rate it can reach at
most "bound" of it. "In flight" is what the programs that fit on a multiprocessor have asked memory for at once, at
least: one tile each of x, and of dy. None of this is a measurement on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import normkit as nk
from normkit.kernels.gpu import resources, row_backward, rows
from normkit.kernels.gpu.launch import clusters_on
from normkit.kernels.gpu.resources import Resources
from normkit.kernels.gpu.settings import backward_setting, forward_setting

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536, 131072, 262144)
ROWS = 256
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor, from compute capability 8.0 on


@dataclass(frozen=True)
class Line:
    """One kernel of one operator at one width."""

    norm: str
    phase: str
    width: int
    used: Resources
    moved: float  # bytes over those that must move
    tile: float  # bytes that a program asks for at once on one multiprocessor

    @property
    def resident(self) -> int:
        """Return how many programs a multiprocessor holds."""
        threads = self.used.warps * 32
        allotted = -(-self.used.registers // 8) * 8
        return min(REGISTERS // (allotted * threads), THREADS // threads, 32)

    def __str__(self) -> str:
        u = self.used
        return (
            f"{self.norm:5} {self.phase:8} {self.width:7} {u.kernel:14} {u.warps:5} {u.registers:9} "
            f"{u.local_bytes + u.stack_bytes:5} {u.shared_bytes:6} {self.moved:6.2f} {1 / self.moved:6.0%} "
            f"{self.resident:8} {self.resident * self.tile / 1024:9.0f}"
        )


def forward_call(width: int, dtype: torch.dtype, spec: nk.NormSpec) -> Callable[[], object]:
    """Return a forward that keeps statistics, over rows that nobody reads."""
    x, w = torch.empty(ROWS, width, dtype=dtype), torch.empty(width, dtype=dtype)
    return lambda: rows.forward(x, spec, w, w if spec.centered else None, axes=(1,), eps=1e-6, keep=True)


def backward_call(width: int, dtype: torch.dtype, spec: nk.NormSpec) -> Callable[[], object]:
    """Return a backward of everything trained."""
    x, w = torch.empty(ROWS, width, dtype=dtype), torch.empty(width, dtype=dtype)
    kept = rows.new_statistics(spec, ROWS, x.device)
    b, wanted = (w, (True, True, True)) if spec.centered else (None, (True, True, False))
    return lambda: row_backward.backward(x, spec, w, b, x, kept, axes=(1,), wanted=wanted)


def design(phase: str, width: int, dtype: torch.dtype, spec: nk.NormSpec) -> tuple[float, float]:
    """Return the bytes that a pass moves, over those that must move, and those that a multiprocessor asks for at once.

    Where a cluster holds a row, that is a program's tile over the multiprocessors that share it.
    """
    forward, size, clusters = phase == "forward", dtype.itemsize, clusters_on(torch.device("cpu"))
    setting = forward_setting(width, clusters) if forward else backward_setting(width, True, clusters)
    row, kept, held = width * size, 4 * (4 if spec.centered else 2), setting.block >= width
    if forward:
        chunks = 0 if held else -(-width // setting.block) * 16
        moved = ((2 if held else 3) * row + kept + 2 * chunks) / (2 * row)
    else:
        moved = ((3 if held else 5) * row + kept * (1 if held else 2) + (0 if held else 16)) / (3 * row)
    tile = setting.rows * min(setting.block, width) * size / setting.ctas
    return moved, tile if forward else 2 * tile


def lines(dtype: torch.dtype, capability: int, widths: tuple[int, ...] = WIDTHS) -> Iterator[Line]:
    """Yield every kernel at every width, with the bytes that its operator's design moves."""
    for norm, spec in (("rms", nk.TORCH_RMS_NORM), ("layer", nk.TORCH_LAYER_NORM)):
        for width in widths:
            for phase, call in (("forward", forward_call), ("backward", backward_call)):
                moved, tile = design(phase, width, dtype, spec)
                for used in resources.of(call(width, dtype, spec), capability):
                    if used.kernel != "fold_partials":
                        yield Line(norm, phase, width, used, moved, tile)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    print(f"{given.dtype}, compute capability {given.capability / 10}, {ROWS} rows; spills in bytes a thread")
    print("norm  phase      width kernel         warps registers spill shared  moved  bound resident in flight (KiB)")
    for line in lines(getattr(torch, given.dtype), given.capability):
        print(line)


if __name__ == "__main__":
    main()
