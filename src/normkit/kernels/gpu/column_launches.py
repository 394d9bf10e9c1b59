"""What of a launch follows from how x lies: kernel, grid, sizes. Worked out once a layout, then looked up.

A call makes three to six launches, and would choose tiles, count programs and look constants up for each
(`python benchmarks/gpu_launch.py` times calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from normkit.kernels.column_layout import Shape
from normkit.kernels.gpu import chunks, column_settings, column_sums, columns
from normkit.kernels.gpu import moments as statistics
from normkit.kernels.gpu import remember as remembering
from normkit.kernels.gpu.column_settings import Setting, power_of_two
from normkit.kernels.gpu.launch import Launcher


class Layout(NamedTuple):
    """What decides tiles and the order of sums, and so every launch.

    Args:
        shape: how x lies.
        depth: channels that share a statistic.
        per_sample: whether a sample's statistics are its own.
        masked: whether some positions do not count.
    """

    shape: Shape
    depth: int
    per_sample: bool
    masked: bool

    @property
    def segments(self) -> int:
        """Return how many sets of positions have statistics."""
        return self.shape.samples if self.per_sample else 1

    @property
    def groups(self) -> int:
        """Return how many statistics a segment has."""
        return self.shape.channels // self.depth

    @property
    def sums(self) -> tuple[int, int, int, int]:
        """Return what kernels that sum chunks are told first."""
        return self.shape.length, self.shape.positions, self.groups, self.depth

    def kinds(self) -> dict[str, Any]:
        """Return the constants that say which positions there are."""
        return {"LISTED": self.masked, "PER": self.per_sample}


class Launch(NamedTuple):
    """A kernel, how many programs of it, and the numbers that its tensors are followed by."""

    kernel: Launcher
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor], *more: float) -> None:
        """Run; ``more`` numbers come last."""
        self.kernel.launch(False, self.grid, (*tensors, *self.numbers, *more), tensors[0].device)


_launchers: dict[Any, Launcher] = {}


def _launcher(kernel: Any, warps: int, **constants: Any) -> Launcher:
    """Return the one launcher with these constants, so that layouts share what is compiled."""
    key = (kernel, warps, *constants.values())
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = Launcher(kernel, constants, warps)
    return found


@lru_cache(maxsize=1024)
def list_valid(positions: int) -> Launch:
    """Return what lists valid positions."""
    run = _launcher(chunks.list_valid, 4, B=column_settings.LISTED)
    return Launch(run, (-(-positions // column_settings.LISTED), 1, 1), (positions,))


@lru_cache(maxsize=1024)
def moments_setting(layout: Layout) -> Setting:
    """Return how moments of chunks are taken."""
    tile, warps = column_settings.MOMENTS_TILE, column_settings.MOMENTS_WARPS
    return column_settings.sums_setting(layout.shape, layout.depth, layout.per_sample, tile, warps)


@lru_cache(maxsize=1024)
def gradient_setting(layout: Layout) -> Setting:
    """Return how gradients are summed."""
    tile, warps = column_settings.GRADIENT_TILE, column_settings.GRADIENT_WARPS
    return column_settings.sums_setting(layout.shape, layout.depth, layout.per_sample, tile, warps)


def _over_chunks(layout: Layout, setting: Setting) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid and the constants of kernels that sum chunks."""
    across = -(-layout.groups // (setting.c // setting.d)) * setting.blocks
    constants: dict[str, Any] = {"K": setting.k, "C": setting.c, "D": setting.d, "BLOCKS": setting.blocks}
    constants |= {"WHOLE": layout.depth % setting.d == 0}
    return (across * setting.bound * layout.segments, 1, 1), constants | layout.kinds()


@lru_cache(maxsize=1024)
def chunk_moments(layout: Layout) -> Launch:
    """Return what takes the moments of chunks; ε, √ε and x's strides are its last numbers."""
    setting = moments_setting(layout)
    grid, constants = _over_chunks(layout, setting)
    run = _launcher(statistics.chunk_moments, setting.warps, **constants)
    return Launch(run, grid, (*layout.sums, setting.bound, setting.limit))


@lru_cache(maxsize=1024)
def join_moments(layout: Layout) -> Launch:
    """Return what joins them to statistics; ε and √ε are its last numbers."""
    setting = moments_setting(layout)
    p = setting.parts
    g = max(1, min(column_settings.JOINED // p, power_of_two(layout.groups)))
    constants: dict[str, Any] = {"K": setting.k, "D": setting.d, "BLOCKS": setting.blocks, "P": p, "G": g}
    run = _launcher(statistics.join_moments, 4, **constants, **layout.kinds())
    grid = (-(-layout.groups // g) * layout.segments, 1, 1)
    return Launch(run, grid, (*layout.sums, setting.bound, setting.limit))


def _by_element(layout: Layout, kernel: Any, **options: bool) -> Launch:
    """Return what writes element by element; the strides of x and of all that lies like it are its last numbers."""
    shape = layout.shape
    k, c = column_settings.apply_tile(shape, layout.per_sample, column_settings.APPLY_TILE)
    along = -(-shape.length // k) * shape.samples if layout.per_sample else -(-shape.positions // k)
    constants: dict[str, Any] = {"K": k, "C": c, "MASKED": layout.masked, "PER": layout.per_sample}
    constants |= {"RUNS": shape.runs}
    run = _launcher(kernel, column_settings.APPLY_WARPS, **constants, **options)
    numbers = (shape.length, shape.positions, shape.channels, layout.groups, layout.depth)
    return Launch(run, (along * -(-shape.channels // c), 1, 1), numbers)


@lru_cache(maxsize=1024)
def apply(layout: Layout, weight: bool, bias: bool) -> Launch:
    """Return what writes y."""
    return _by_element(layout, columns.apply, HAS_W=weight, HAS_B=bias)


@lru_cache(maxsize=1024)
def gradient(layout: Layout, weight: bool) -> Launch:
    """Return what writes dx."""
    return _by_element(layout, columns.gradient, HAS_W=weight)


@lru_cache(maxsize=1024)
def chunk_sums(layout: Layout, weight: bool, each: bool, joint: bool) -> Launch:
    """Return what sums gradients over chunks, of each channel and of groups; strides of x and dy come last."""
    setting = gradient_setting(layout)
    grid, constants = _over_chunks(layout, setting)
    run = _launcher(
        column_sums.chunk_sums, setting.warps, **constants, HAS_W=weight and joint, CHANNELS=each, GROUPS=joint
    )
    return Launch(run, grid, (*layout.sums, setting.bound, setting.limit))


@lru_cache(maxsize=1024)
def join_means(layout: Layout, weigh: bool) -> Launch:
    """Return what joins a segment's sums to means."""
    setting, width = gradient_setting(layout), 2 * layout.groups
    p = setting.parts
    g = max(1, min(column_settings.SUMMED // p, power_of_two(width)))
    constants: dict[str, Any] = {"K": setting.k, "BLOCKS": setting.blocks, "P": p, "G": g}
    run = _launcher(column_sums.join_means, 4, **constants, **layout.kinds(), WEIGH=weigh)
    return Launch(run, (-(-width // g) * layout.segments, 1, 1), (*layout.sums, setting.bound, setting.limit))


@lru_cache(maxsize=1024)
def remember(layout: Layout) -> Launch:
    """Return what moves running statistics; the bits of the momentum are its last number."""
    channels, g = layout.shape.channels, column_settings.MOVED
    run = _launcher(remembering.remember, 4, G=g, LISTED=layout.masked)
    return Launch(run, (-(-channels // g), 1, 1), (layout.shape.positions, channels))


@lru_cache(maxsize=1024)
def join_channels(layout: Layout) -> Launch:
    """Return what adds the sums of each channel over all segments."""
    setting, width = gradient_setting(layout), 2 * layout.shape.channels
    segments, p = column_settings.SEGMENTS, power_of_two(setting.bound)
    r = max(1, min(segments, 1024 // p))
    g = max(1, min(column_settings.SUMMED // (p * r), power_of_two(width)))
    run = _launcher(column_sums.join_channels, 8, K=setting.k, P=p, R=r, S=segments, G=g, **layout.kinds())
    numbers = (layout.segments, layout.shape.length, layout.shape.positions, width, setting.bound, setting.limit)
    return Launch(run, (-(-width // g), 1, 1), numbers)
