"""Which valid positions are summed at once, and in which order what they hold is joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from normkit.kernels.column_layout import Shape, flags_of

FAN = 128  # as merges.py has it, which only compiling imports; so do columns.py and runs.py these:
CHUNK, RUN = 64, 4096


@dataclass(frozen=True)
class Chunks:
    """Chunks of valid positions, and the levels on which they are joined to segments that share a statistic.

    Args:
        begins, counts: of each chunk, the number of its first valid position and how many there are; int64.
        levels: for each level, where its results' parts begin among the parts of the level below; the last level's
            results are the segments. Empty where every chunk is a segment of its own.
        sizes: valid positions of each segment.
    """

    begins: Tensor
    counts: Tensor
    levels: tuple[Tensor, ...]
    sizes: Tensor


def chunks_of(lengths: Tensor, chunk: int, joined: bool) -> Chunks:
    """Cut runs of valid positions that follow each other into chunks; each run is a segment, or ``joined`` all."""
    ends, per_run = lengths.cumsum(0), (lengths + (chunk - 1)) // chunk
    within, bounds = _numbered(per_run)
    owner = torch.repeat_interleave(per_run)
    begins = (ends - lengths)[owner] + within * chunk
    counts = torch.minimum(ends[owner] - begins, torch.tensor(chunk))
    sizes = lengths
    if joined:
        sizes, bounds = lengths.sum().reshape(1), torch.tensor([0, len(begins)])
    levels: list[Tensor] = []
    single = len(begins) == len(sizes) and bool((bounds.diff() == 1).all())
    while not single:
        parts = bounds.diff()
        if int(parts.max()) <= FAN:
            levels.append(bounds)
            break
        fewer = (parts + (FAN - 1)) // FAN
        inside, upper = _numbered(fewer)
        starts = bounds[:-1][torch.repeat_interleave(fewer)] + inside * FAN
        levels.append(torch.cat([starts, bounds[-1:]]))
        bounds = upper
    return Chunks(begins, counts, tuple(levels), sizes)


@lru_cache(maxsize=16)
def even_chunks(runs: int, length: int, chunk: int, joined: bool) -> Chunks:
    """Return `chunks_of` runs of one length."""
    return chunks_of(torch.full((runs,), length), chunk, joined)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return 0 … count − 1 for every count, one after the other, and where each begins (and the last ends)."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return torch.arange(int(bounds[-1])) - torch.repeat_interleave(bounds[:-1], counts), bounds


@dataclass(frozen=True)
class Valid:
    """Which positions count: all, or those of a list. ``flags`` has a byte a position."""

    chunks: Chunks
    listed: Tensor | None = None
    flags: Tensor | None = None


def valid_positions(x: Tensor, channel: int, shape: Shape, mask: Tensor | None, per_sample: bool) -> Valid:
    """Return the positions that ``mask`` (broadcastable to x, alike for all channels) lets through, in chunks."""
    chunk, joined = RUN if shape.runs else CHUNK, not per_sample
    if mask is not None:
        flags = flags_of(x, channel, shape, mask)
        listed = flags.view(-1).nonzero().view(-1)
        if len(listed) < shape.positions:
            apart = shape.runs or per_sample  # a chunk of runs lies in one sample
            lengths = flags.sum(1) if apart else torch.tensor([len(listed)])
            return Valid(chunks_of(lengths, chunk, joined), listed, flags)
    if shape.runs or per_sample:
        return Valid(even_chunks(shape.samples, shape.length, chunk, joined))
    return Valid(even_chunks(1, shape.positions, chunk, joined))
