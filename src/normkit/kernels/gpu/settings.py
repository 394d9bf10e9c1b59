"""Launch settings by width: how many columns and rows a program takes, and how many warps it has.

The width alone chooses, with what a tile must hold, never the number of rows, so that a row's bits do not depend on its
batch. Limits come from registers and spills as the compiler reports them (`python benchmarks/gpu_resources.py`), which
needs no GPU; everything else here is unmeasured.
"""

from __future__ import annotations

import os
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
        ctas: multiprocessors that share a tile, as a cluster.
    """

    rows: int
    block: int
    warps: int
    programs: int = 1
    ctas: int = 1


TILE = 4096  # elements of a tile: four loads of 16 bytes for each of 128 threads of bfloat16. Unmeasured.
# Columns that a program can hold. With 32 float32 a thread, a forward of 512 threads takes 98 to 128 of their 128
# registers and spills none; with 1024 threads (this number doubled, then the command above), which have 64 each, a
# layer norm spills 176–192 bytes a thread, an RMS norm of bfloat16 64.
HELD_FORWARD = 16384
# x̂, dy·γ and a partial: 101–128 registers at 8192 columns and 512 threads; at 16384 and 1024 threads 136–376 bytes
# spill.
HELD_BACKWARD = 8192
HELD_BACKWARD_FROZEN = 16384  # without a partial
CHUNK = 4096  # columns of a program, of rows that none holds. Unmeasured.
LARGEST_CLUSTER = 8  # multiprocessors: what every device with clusters has


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def clusters_wanted() -> bool:
    """Say whether rows may be shared by a cluster of multiprocessors: NORMKIT_GPU_CLUSTERS=1.

    Triton 3.9 compiles that for compute capability 9.0 and up. Backwards spill 8–16 bytes a thread, forwards none but a
    float32 layer norm of 65536 or more, 48. It is off because nobody has seen the results on a GPU.
    """
    return os.environ.get("NORMKIT_GPU_CLUSTERS", "0") == "1"


@lru_cache(maxsize=4096)
def forward_setting(width: int, clusters: bool = False) -> Setting:
    """Return how rows of ``width`` are normalised; ``block < width`` means in chunks, by `wide_forward`."""
    block = max(_power_of_two(width), 16)
    ctas = _ctas(block, HELD_FORWARD, clusters)
    if block > HELD_FORWARD * ctas:
        return Setting(1, CHUNK, 4)
    rows = min(max(1, TILE // block), 128)
    return Setting(rows, block, max(4, min(32, rows * block // (1024 * ctas))), ctas=ctas)


@lru_cache(maxsize=4096)
def backward_setting(width: int, trained: bool, clusters: bool = False) -> Setting:
    """Return how gradients of rows are taken; ``block < width`` means by `wide_backward`. trained: with dγ or dβ."""
    block = max(_power_of_two(width), 16)
    held = HELD_BACKWARD if trained else HELD_BACKWARD_FROZEN
    ctas = _ctas(block, held, clusters)
    if block > held * ctas:
        return Setting(1, CHUNK // 2, 8, programs=2)
    rows = min(max(1, TILE // 2 // block), 128)
    warps = max(4, min(32, rows * block // (512 * ctas)))
    return Setting(rows, block, warps, programs=max(1, 16 // warps), ctas=ctas)


def _ctas(block: int, held: int, clusters: bool) -> int:
    return min(LARGEST_CLUSTER, max(1, block // held)) if clusters else 1


HELD_GATED_FORWARD = 8192  # columns; x, its gate and an exponential at once: 16384 spill
HELD_GATED_BACKWARD = 4096  # columns; x̂, the gate, both slopes and a partial at once: 8192 spill


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
        return Setting(1, CHUNK // 4, 4, programs=2)
    rows = min(max(1, TILE // 4 // block), 128)
    warps = max(4, min(32, rows * block // 256))
    return Setting(rows, block, warps, programs=max(1, 16 // warps))


FOLD_ROWS, FOLD_BLOCK = 32, 64  # partials and columns of a tile in `fold_partials`. Unmeasured.
