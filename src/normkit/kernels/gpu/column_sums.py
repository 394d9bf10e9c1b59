"""Sums of gradients over positions: (Σ dy, Σ dy·x̂) of chunks, which join to a group's means and to dβ and dγ."""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.arithmetic import value_of
from normkit.kernels.gpu.chunks import channels_of, chunk_length, positions_at, segment
from normkit.kernels.gpu.columns import statistics_at
from normkit.kernels.gpu.sums import down, halved, over_groups


@triton.jit(do_not_specialize=["bound"])
def chunk_sums(
    x, dy, w, listed, ranks, table, per_channel, per_group, length, total, groups, depth, bound, limit,
    x0, x1, x2, g0, g1, g2,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr, PER: tl.constexpr, HAS_W: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The sums of one chunk and C columns: of channels, (segments, bound, 2, channels), and times γ of groups.

    The latter go to (segments, bound, BLOCKS, 2, groups). Chunks that hold nothing write nothing.
    """
    blocks = tl.cdiv(groups, C // D) * BLOCKS
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % bound
    s = tl.program_id(0) // blocks // bound
    first, count = segment(s, ranks, length, total, LISTED, PER)
    size = chunk_length(count, limit, K)
    first += chunk * size
    count = tl.minimum(count - chunk * size, size)
    if count > 0:
        channel, own, column = channels_of(block, groups, depth, C, D, BLOCKS, WHOLE)
        mean, remainder, rstd, scale = statistics_at(table, s, own, groups, column)
        x_channels = x + channel.to(tl.int64)[None, :] * x2
        dy_channels = dy + channel.to(tl.int64)[None, :] * g2
        plain, weighted = tl.zeros([K, C], tl.float32), tl.zeros([K, C], tl.float32)
        for start in range(0, count, K):
            i = start + tl.arange(0, K)
            live = i < count
            inside = live[:, None] & column[None, :]
            at = positions_at(listed, first + i, live, length, x0, x1, LISTED)
            v = tl.load(x_channels + at[:, None], mask=inside, other=0.0).to(tl.float32)
            at = positions_at(listed, first + i, live, length, g0, g1, LISTED)
            g = tl.load(dy_channels + at[:, None], mask=inside, other=0.0).to(tl.float32)
            v = value_of(v, mean[None, :], remainder[None, :], rstd[None, :], scale[None, :], True)
            plain += g
            weighted = tl.fma(g, tl.where(inside, v, 0.0), weighted)
        a, b = down(plain), down(weighted)
        part = s.to(tl.int64) * bound + chunk
        if CHANNELS:
            to = per_channel + part * 2 * groups * depth + channel
            tl.store(to, a, mask=column)
            tl.store(to + groups * depth, b, mask=column)
        if GROUPS:
            if HAS_W:
                gain = tl.load(w + channel, mask=column, other=0.0).to(tl.float32)
                a, b = a * gain, b * gain
            group = block // BLOCKS * (C // D) + tl.arange(0, C // D)
            to = per_group + (part * BLOCKS + block % BLOCKS) * 2 * groups + group
            tl.store(to, over_groups(a, D), mask=group < groups)
            tl.store(to + groups, over_groups(b, D), mask=group < groups)


@triton.jit
def _chunk_tile(
    parts: tl.tensor, s: tl.tensor, column: tl.tensor, width: tl.tensor, ranks: tl.tensor, length: tl.tensor,
    total: tl.tensor, bound: tl.tensor, limit: tl.tensor,
    K: tl.constexpr, BLOCKS: tl.constexpr, P: tl.constexpr, LISTED: tl.constexpr, PER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(sums of a segment's parts, valid positions) for some columns of ``width``."""
    _, count = segment(s, ranks, length, total, LISTED, PER)
    size = chunk_length(count, limit, K)
    i = tl.arange(0, P)
    here = ((i < bound * BLOCKS) & (i // BLOCKS * size < count))[:, None] & (column < width)[None, :]
    at = parts + (s.to(tl.int64) * bound * BLOCKS + i)[:, None] * width + column[None, :]
    return down(tl.load(at, mask=here, other=0.0)), count


@triton.jit(do_not_specialize=["total", "bound"])
def join_means(
    parts, ranks, w, sums, means, length, total, groups, depth, bound, limit,
    K: tl.constexpr, BLOCKS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, LISTED: tl.constexpr, PER: tl.constexpr,
    WEIGH: tl.constexpr,
):  # fmt: skip
    """Sums (segments, 2, groups) of all chunks, and the means that dx takes off; WEIGH says that γ is still missing."""
    tiles = tl.cdiv(2 * groups, G)
    s = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * G + tl.arange(0, G)
    width = 2 * groups
    inside = column < width
    whole, count = _chunk_tile(parts, s, column, width, ranks, length, total, bound, limit, K, BLOCKS, P, LISTED, PER)
    tl.store(sums + s.to(tl.int64) * 2 * groups + column, whole, mask=inside)
    if WEIGH:
        whole = whole * tl.load(w + column % groups, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(whole, tl.maximum(count.to(tl.float32) * depth, 1.0))
    tl.store(means + s.to(tl.int64) * 2 * groups + column, mean, mask=inside)


@triton.jit(do_not_specialize=["segments", "total", "bound"])
def join_channels(
    parts, ranks, sums, segments, length, total, width, bound, limit,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    LISTED: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Sums (width) of the chunks of all segments: each segment's first, then every S-th segment's, R at a time."""
    column = tl.program_id(0) * G + tl.arange(0, G)
    i = tl.arange(0, P * R)
    chunk = i // R
    turn = tl.arange(0, S // R)
    held = tl.zeros([S // R, R, G], tl.float32)
    for start in range(0, segments, R):
        s = start + i % R
        live = (s < segments) & (chunk < bound)
        s = tl.where(live, s, 0)
        _, count = segment(s, ranks, length, total, LISTED, PER)
        live = live & (chunk * chunk_length(count, limit, K) < count)
        at = parts + (s.to(tl.int64) * bound + chunk)[:, None] * width + column[None, :]
        v = halved(tl.load(at, mask=live[:, None] & (column < width)[None, :], other=0.0), R)
        held += tl.where((turn == start // R % (S // R))[:, None, None], v[None, :, :], 0.0)
    tl.store(sums + column, down(tl.reshape(held, [S, G])), mask=column < width)
