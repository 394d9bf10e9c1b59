"""Launch settings by width: how many columns and rows a program takes, and how many warps it has.

The width alone chooses, never the number of rows, so that a row's bits do not depend on its batch. Every figure here is
unmeasured on a GPU unless the line says otherwise: limits come from registers and spills as the compiler reports them
(`python benchmarks/gpu_resources.py`), which needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Setting:
    """How a kernel is launched for rows of one width.

    Args:
        rows: rows of a tile.
        block: columns of a tile, a power of two; a tile holds the row where that is at least the width.
        warps: of 32 threads, a program.
        programs: how many a streaming multiprocessor gets of a kernel whose programs walk over the rows.
    """

    rows: int
    block: int
    warps: int
    programs: int = 1


# Elements of a program's tile: four loads of 16 bytes in flight for each of 128 threads of bfloat16. Unmeasured.
TILE = 4096
HELD_FORWARD = 32768  # columns; 32 float32 for each of 1024 threads, of 64 registers
HELD_BACKWARD = 16384  # columns; x̂, g and a partial at once
CHUNK = 4096  # columns a step of kernels that read a row in pieces. Unmeasured.


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _warps(elements: int) -> int:
    """Return the warps of a tile: 4 up to 4096 elements, then 32 elements a thread, at most 32."""
    return max(4, min(32, elements // 1024))


@lru_cache(maxsize=1024)
def forward_setting(width: int) -> Setting:
    """Return how rows of ``width`` are normalised; ``block < width`` means in pieces."""
    block = max(_power_of_two(width), 16)
    if block > HELD_FORWARD:
        return Setting(1, CHUNK, 8)
    rows = max(1, TILE // block)
    return Setting(min(rows, 128), block, _warps(rows * block))


@lru_cache(maxsize=1024)
def backward_setting(width: int) -> Setting:
    """Return how gradients of rows of ``width`` are taken; ``block < width`` means by `wide_backward`."""
    block = max(_power_of_two(width), 16)
    if block > HELD_BACKWARD:
        return Setting(1, CHUNK // 2, 8, programs=2)
    rows = max(1, TILE // 2 // block)
    warps = max(4, min(32, rows * block // 512))
    return Setting(min(rows, 128), block, warps, programs=max(1, 16 // warps))


HELD_GATED_FORWARD = 16384  # columns; x, its gate and an exponential at once
HELD_GATED_BACKWARD = 8192  # columns; x̂, the gate, both slopes and a partial at once


@lru_cache(maxsize=1024)
def gated_forward_setting(width: int) -> Setting:
    """As `forward_setting`, of gated norms."""
    block = max(_power_of_two(width), 16)
    if block > HELD_GATED_FORWARD:
        return Setting(1, CHUNK // 2, 8)
    rows = min(max(1, TILE // 2 // block), 128)
    return Setting(rows, block, max(4, min(32, rows * block // 512)))


@lru_cache(maxsize=1024)
def gated_backward_setting(width: int) -> Setting:
    """As `backward_setting`, of gated norms."""
    block = max(_power_of_two(width), 16)
    if block > HELD_GATED_BACKWARD:
        return Setting(1, CHUNK // 4, 8, programs=2)
    rows = min(max(1, TILE // 4 // block), 128)
    warps = max(4, min(32, rows * block // 256))
    return Setting(rows, block, warps, programs=max(1, 16 // warps))


FOLD_ROWS, FOLD_BLOCK = 32, 64  # partials and columns of a tile in `fold_partials`. Unmeasured.
