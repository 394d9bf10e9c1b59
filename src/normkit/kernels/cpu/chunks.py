"""Which valid positions are summed at once, and in which order what they hold is joined."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.column_layout import Shape
from normkit.kernels.cpu.rows import Code, code_of

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
    single = len(begins) == len(sizes) and bool((bounds.diff() == 1).all())
    return Chunks(begins, counts, () if single else _levels(bounds), sizes)


def _levels(bounds: Tensor) -> tuple[Tensor, ...]:
    """Return the levels that join what lies between two bounds."""
    levels: list[Tensor] = []
    while True:
        parts = bounds.diff()
        if int(parts.max()) <= FAN:
            return (*levels, bounds)
        fewer = (parts + (FAN - 1)) // FAN
        inside, upper = _numbered(fewer)
        starts = bounds[:-1][torch.repeat_interleave(fewer)] + inside * FAN
        levels.append(torch.cat([starts, bounds[-1:]]))
        bounds = upper


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
    """Which positions count, and how many: all, or those of a list. ``flags`` has a byte a position."""

    chunks: Chunks
    count: int
    listed: Tensor | None = None
    flags: Tensor | None = None


def valid_positions(flags: Tensor | None, shape: Shape, per_sample: bool) -> Valid:
    """Return the positions that contiguous ``flags`` let through, all without them, in chunks."""
    chunk, joined = RUN if shape.runs else CHUNK, not per_sample
    apart = shape.runs or per_sample  # a chunk of runs lies in one sample
    runs, length = (shape.samples, shape.length) if apart else (1, shape.positions)
    if flags is not None:
        listed, chunks = listed_chunks(flags, runs, length, chunk, joined)
        if len(listed) < shape.positions:
            return Valid(chunks, len(listed), listed, flags)
    return Valid(even_chunks(runs, length, chunk, joined), shape.positions)


_LISTING = struct.Struct("10q")


def listed_chunks(flags: Tensor, runs: int, length: int, chunk: int, joined: bool) -> tuple[Tensor, Chunks]:
    """Return the positions of contiguous ``flags`` that are set, and their `Chunks`; see listing.py."""
    most = runs * length // chunk + runs
    words = torch.empty(runs * length + 2 * most + 2 * runs + 4, dtype=torch.int64)
    totals, bounds, sizes, begins, counts, listed = words.split([3, runs + 1, runs, most, most, runs * length])
    tables = (t.data_ptr() for t in (listed, begins, counts, bounds, sizes, totals))
    _listing().call(_LISTING.pack(flags.data_ptr(), runs, length, chunk, *tables))
    valid, found, most = totals.tolist()
    if joined and runs > 1:
        bounds, sizes, most = torch.tensor([0, found]), torch.tensor([valid]), found
    single = found == len(sizes) and most == 1
    levels = () if single else (bounds,) if most <= FAN else _levels(bounds)
    return listed[:valid], Chunks(begins[:found], counts[:found], levels, sizes)


@lru_cache(maxsize=1)
def _listing() -> Code:
    def make() -> Callable[[Any], None]:
        from normkit.kernels.cpu.listing import listing_kernel

        return listing_kernel()

    return code_of("listing", make)
