"""Launch settings of norms across positions: which tile, how many tiles a chunk, how many parts are joined at once.

What decides the order of a sum (positions of a tile, channels of a group in a tile, parts) follows from the number of
channels, the depth of a group and the layout alone; a tile is only cut down where no statistic could fill it, and
zeros at its end change no bit. Every figure here is unmeasured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from normkit.kernels.column_layout import Shape

ACROSS = 64  # channels of a tile where they lie side by side: 128 bytes of bfloat16
ALONG = 1024  # positions of a tile where those do
LIMIT = 512  # parts of a statistic, which one tile joins
JOINED = 2048  # elements of a tile that joins moments, of which it holds four numbers each
SUMMED = 8192  # elements of a tile that joins sums
SEGMENTS = 64  # sums that segments are added to in turn, before those are added to each other
LISTED = 1024  # positions a program lists
MOVED = 256  # channels of running statistics a program moves


@dataclass(frozen=True)
class Setting:
    """How chunks are summed and joined.

    Args:
        k: positions of a tile.
        c: channels of a tile.
        d: channels of a group in a tile; a tile holds c / d groups.
        blocks: tiles that a group's channels take.
        limit: chunks of a segment at most.
        bound: chunks that the positions there are can make.
        warps: of a program.
    """

    k: int
    c: int
    d: int
    blocks: int
    limit: int
    bound: int
    warps: int

    @property
    def parts(self) -> int:
        """Return the power of two that holds a statistic's parts."""
        return power_of_two(self.bound * self.blocks)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1024)
def sums_setting(shape: Shape, depth: int, per_sample: bool, elements: int, warps: int) -> Setting:
    """Return how statistics of ``depth`` channels are summed, with ``elements`` a tile."""
    groups, longest = shape.channels // depth, shape.length if per_sample else shape.positions
    whole = power_of_two(depth)
    d = min(whole, ACROSS)
    blocks = -(-depth // d)
    every = d * power_of_two(groups) if blocks == 1 else d
    k = min(elements // d, ALONG) if shape.runs else elements // min(every, ACROSS)
    k = min(k, power_of_two(longest))
    c = max(d, min(every, elements // k))
    limit = max(1, LIMIT // blocks)
    return Setting(k, c, d, blocks, limit, min(limit, -(-longest // k)), max(1, min(warps, k * c // 128)))


@lru_cache(maxsize=1024)
def apply_tile(shape: Shape, per_sample: bool, elements: int) -> tuple[int, int]:
    """Return the positions and channels of a tile that is written."""
    longest, channels = shape.length if per_sample else shape.positions, power_of_two(shape.channels)
    k = ALONG if shape.runs else elements // min(channels, ACROSS)
    k = min(k, power_of_two(longest))
    return k, min(channels, max(elements // k, 1))


MOMENTS_TILE, MOMENTS_WARPS = 4096, 4
GRADIENT_TILE, GRADIENT_WARPS = 4096, 8
APPLY_TILE, APPLY_WARPS = 4096, 4
