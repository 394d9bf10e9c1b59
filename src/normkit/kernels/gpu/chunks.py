"""Which valid positions a program sums, and where they and their channels lie.

A segment is what shares statistics: a sample, or all samples. Its valid positions are cut into chunks of whole tiles.
How many tiles a chunk has follows from how many positions are valid, so that padding changes neither a chunk nor the
order in which chunks are joined; what a mask lets through stays on the device, where nobody waits for it.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_valid(flags, ranks, listed, total, B: tl.constexpr):
    """Write the numbers of valid positions one after the other; ranks counts them up to and including each."""
    p = tl.program_id(0) * B + tl.arange(0, B)
    inside = p < total
    valid = inside & (tl.load(flags + p, mask=inside, other=0) != 0)
    tl.store(listed + tl.load(ranks + p, mask=inside, other=1) - 1, p, mask=valid)


@triton.jit
def segment(
    s: tl.tensor, ranks: tl.tensor, length: tl.tensor, total: tl.tensor, LISTED: tl.constexpr, PER: tl.constexpr
) -> tl.tensor:
    """(first, count) of the valid positions of segment s, among all valid ones."""
    first, end = s * 0, s * 0 + total
    if PER:
        first = s * length
        end = first + length
    if LISTED:
        end = tl.load(ranks + end - 1)
        first = tl.load(ranks + first - 1, mask=first > 0, other=0)
    return first, end - first


@triton.jit
def chunk_length(count: tl.tensor, limit: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Positions of a chunk: as few tiles of K as make at most ``limit`` chunks of ``count`` positions."""
    tiles = (count + (K - 1)) // K
    return tl.maximum((tiles + limit - 1) // limit, 1) * K


@triton.jit
def channels_of(
    block: tl.tensor,
    groups: tl.tensor,
    depth: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """(channel, group, which exist) of the C columns of a tile: C / D groups, or one of BLOCKS pieces of a group.

    WHOLE says that every column has a channel. Then the compiler can tell that they lie side by side: of a depth that
    is no multiple of 16 it could not, and loaded one element at a time.
    """
    j = tl.arange(0, C)
    if WHOLE:
        channel = block * C + j
        group = channel // (D * BLOCKS)
        column = channel < groups * (D * BLOCKS)
    else:
        group = block // BLOCKS * (C // D) + j // D
        within = block % BLOCKS * D + j % D
        channel = group * depth + within
        column = (group < groups) & (within < depth)
    return channel, group, column


@triton.jit
def positions_at(
    listed: tl.tensor,
    i: tl.tensor,
    live: tl.tensor,
    length: tl.tensor,
    sample: tl.tensor,
    step: tl.tensor,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """The offsets of the i-th valid positions."""
    p = i
    if LISTED:
        p = tl.load(listed + i, mask=live, other=0)
    return (p // length).to(tl.int64) * sample + (p % length).to(tl.int64) * step
