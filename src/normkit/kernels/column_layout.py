"""How samples, positions and channels lie in memory, and which positions count, where statistics cross positions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.kernels import layout


class Shape(NamedTuple):
    """Samples × positions × channels, and whether positions lie side by side (else channels do)."""

    samples: int
    length: int
    channels: int
    runs: bool

    @property
    def positions(self) -> int:
        """Return how many there are, masked ones included."""
        return self.samples * self.length


def shape_of(x: Tensor, channel: int, per_sample: bool) -> Shape | None:
    """Return how ``x`` lies, or None where neither channels nor positions lie side by side."""
    samples, channels = x.shape[0], x.shape[channel]
    length = x.numel() // (samples * channels)
    if length == 1 and not per_sample:  # (N, C): the samples are the positions
        samples, length = 1, samples
    for runs in (channels == 1, channels != 1):
        shape = Shape(samples, length, channels, runs)
        if strides_of(x, channel, shape) is not None:
            return shape
    return None


def strides_of(t: Tensor, channel: int, shape: Shape) -> tuple[int, int, int] | None:
    """Return the strides of sample, position and channel, or None where ``t`` does not lie as ``shape`` says."""
    return _strides(t.shape, t.stride(), channel, shape)


@lru_cache(maxsize=4096)  # a call asks up to seven times
def _strides(
    sizes: tuple[int, ...], strides: tuple[int, ...], channel: int, shape: Shape
) -> tuple[int, int, int] | None:
    axes = [a for a in range(1, len(sizes)) if a != channel and sizes[a] > 1]
    sample, across = strides[0], strides[channel]
    step = layout.stride_along(sizes, strides, axes) if axes else sample
    if step is None:
        return None
    # The stride of an axis of size 1 means nothing: it is what makes the others regular.
    sample = shape.length * step if shape.samples == 1 else sample
    if not (step == 1 or shape.length == 1 if shape.runs else across == 1 or shape.channels == 1):
        return None
    return sample, step, across


def flags_of(x: Tensor, channel: int, shape: Shape, mask: Tensor) -> Tensor:
    """Return ``mask`` (broadcastable to x, alike for all channels) as (samples, length), one contiguous bool each."""
    flags = mask.squeeze(channel)
    if flags.shape == (shape.samples, shape.length) and flags.is_contiguous():
        return flags
    flags = flags.expand([n for a, n in enumerate(x.shape) if a != channel])
    return flags.reshape(shape.samples, shape.length).contiguous()


def fresh_like(x: Tensor, channel: int, shape: Shape) -> Tensor:
    """Return memory for a result that lies as ``shape`` says: like x, but dense (x may be expanded)."""
    like = torch.empty_like(x)
    if strides_of(like, channel, shape) is not None:
        return like
    positions = [a for a in range(1, x.dim()) if a != channel]
    last = positions if shape.samples == x.shape[0] else [*positions, 0]  # (N, C), whose samples are positions
    order = [*(a for a in range(x.dim()) if a not in (*last, channel)), channel, *last]
    if not shape.runs:
        order = [0, *positions, channel]
    made = torch.empty([x.shape[a] for a in order], dtype=x.dtype, device=x.device)
    return made.permute([order.index(a) for a in range(x.dim())])


def laid_like(dy: Tensor, x: Tensor, channel: int, shape: Shape) -> Tensor:
    """Return ``dy`` as it is where it lies like x, else a copy that does; of one value for all a single row is made."""
    if strides_of(dy, channel, shape) is not None:
        return dy
    if not any(dy.stride()):
        row = [1] * dy.dim()
        axes = range(1, dy.dim()) if shape.runs else [channel]
        for axis in axes:
            row[axis] = dy.shape[axis]
        wide = dy.as_strided(row, [0] * dy.dim()).contiguous().expand(dy.shape)
        if strides_of(wide, channel, shape) is not None:
            return wide
    return fresh_like(x, channel, shape).copy_(dy)


def movable(mean: Tensor, var: Tensor, device: torch.device) -> bool:
    """Say whether a kernel on ``device`` may move running statistics in place, as operators would."""

    def plain(t: Tensor) -> bool:
        kind = type(t) is Tensor and t.dtype == torch.float32 and t.device == device
        return kind and t.is_contiguous() and not t.is_inference() and not t.is_neg()

    return plain(mean) and plain(var) and abs(mean.data_ptr() - var.data_ptr()) >= 4 * mean.numel()
