"""Moments of chunks of valid positions, and the statistics that they join to.

A chunk's moments are (mean, remainder, M, scale): of its elements times a power of two, 1 unless their squares leave
float32's range, mean + remainder is the mean and M the sum of squared deviations from it. Tiles are summed by the
corrected two-pass and join by Chan's update for two sets; chunks join by that for many sets at once, a corrected
two-pass over their means: M = ΣM_i + Σn_i·(μ_i − μ)², where nothing large is subtracted from anything large.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.arithmetic import LARGE, SMALL, eps_scaled, inverse_root, scale_for
from normkit.kernels.gpu.chunks import channels_of, chunk_length, positions_at, segment
from normkit.kernels.gpu.sums import down, over_groups, spread


@triton.jit
def _not_negative(v: tl.tensor) -> tl.tensor:
    """0 for what rounding left below it; NaN stays."""
    return tl.where(v < 0.0, 0.0, v)


@triton.jit
def _of_tile(v: tl.tensor, inside: tl.tensor, count: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """(mean, remainder, M) of every D columns of a tile that is 0 where it is not inside."""
    mean = tl.div_rn(over_groups(down(v), D), count)
    d = tl.where(inside, v - spread(mean, D)[None, :], 0.0)
    first = over_groups(down(d), D)
    remainder = tl.div_rn(first, count)
    return mean, remainder, _not_negative(over_groups(down(d * d), D) - first * remainder)


@triton.jit
def _of_chunk(
    x: tl.tensor, listed: tl.tensor, first: tl.tensor, count: tl.tensor, columns: tl.tensor, width: tl.tensor,
    scale: tl.tensor, length: tl.tensor, sample: tl.tensor, step: tl.tensor,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, LISTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(mean, remainder, M) of a chunk's elements times ``scale``, one tile at a time; x points at its channels."""
    mean = tl.zeros([C // D], tl.float32)
    remainder, square, seen = mean, mean, mean
    factor = spread(scale, D)[None, :]
    for start in range(0, count, K):
        i = start + tl.arange(0, K)
        live = i < count
        inside = live[:, None] & columns[None, :]
        at = positions_at(listed, first + i, live, length, sample, step, LISTED)
        v = tl.load(x + at[:, None], mask=inside, other=0.0).to(tl.float32) * factor
        size = (tl.minimum(count - start, K) * width).to(tl.float32)
        its_mean, its_remainder, its_square = _of_tile(v, inside, tl.maximum(size, 1.0), D)
        whole = tl.maximum(seen + size, 1.0)
        share = tl.div_rn(size, whole)
        gap = (its_mean - mean) + (its_remainder - remainder)
        stride = gap * share
        moved = mean + stride
        fresh = start == 0
        square = tl.where(fresh, its_square, square + its_square + gap * gap * share * seen)
        remainder = tl.where(fresh, its_remainder, ((mean - moved) + stride) + remainder)
        mean = tl.where(fresh, its_mean, moved)
        seen += size
    return mean, remainder, square


@triton.jit
def _peak(
    x: tl.tensor, listed: tl.tensor, first: tl.tensor, count: tl.tensor, columns: tl.tensor,
    length: tl.tensor, sample: tl.tensor, step: tl.tensor,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, LISTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Max |x| of a chunk, NaN passed over."""
    top = tl.zeros([K, C], tl.float32)
    for start in range(0, count, K):
        i = start + tl.arange(0, K)
        live = i < count
        at = positions_at(listed, first + i, live, length, sample, step, LISTED)
        v = tl.load(x + at[:, None], mask=live[:, None] & columns[None, :], other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.where(v == v, tl.abs(v), 0.0))
    return tl.max(tl.reshape(tl.max(top, 0), [C // D, D]), 1)


@triton.jit(do_not_specialize=["bound"])
def chunk_moments(
    x, listed, ranks, parts, length, total, groups, depth, bound, limit, eps, root_eps, x0, x1, x2,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """The moments of one chunk and C columns, to parts (segments, bound, BLOCKS, 4, groups)."""
    blocks = tl.cdiv(groups, C // D) * BLOCKS
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % bound
    s = tl.program_id(0) // blocks // bound
    first, count = segment(s, ranks, length, total, LISTED, PER)
    size = chunk_length(count, limit, K)
    first += chunk * size
    count = tl.minimum(count - chunk * size, size)
    if count > 0:
        channel, _, columns = channels_of(block, groups, depth, C, D, BLOCKS, WHOLE)
        at = x + channel.to(tl.int64)[None, :] * x2
        width = tl.minimum(depth - block % BLOCKS * D, D)
        scale = tl.full([C // D], 1.0, tl.float32)
        mean, remainder, square = _of_chunk(
            at, listed, first, count, columns, width, scale, length, x0, x1, K, C, D, LISTED
        )
        radicand = tl.div_rn(square, (count * width).to(tl.float32)) + eps
        extreme = ((square < LARGE) & (radicand > SMALL) & (radicand < LARGE)) == 0  # where NaN lands, too
        if tl.max(extreme.to(tl.int32), 0) > 0:
            peak = _peak(at, listed, first, count, columns, length, x0, x1, K, C, D, LISTED)
            scale = tl.where(extreme, scale_for(peak, root_eps), 1.0)
            mean, remainder, square = _of_chunk(
                at, listed, first, count, columns, width, scale, length, x0, x1, K, C, D, LISTED
            )
        group = block // BLOCKS * (C // D) + tl.arange(0, C // D)
        part = (s.to(tl.int64) * bound + chunk) * BLOCKS + block % BLOCKS
        to = parts + part * 4 * groups + group
        tl.store(to, mean, mask=group < groups)
        tl.store(to + groups, remainder, mask=group < groups)
        tl.store(to + 2 * groups, square, mask=group < groups)
        tl.store(to + 3 * groups, scale, mask=group < groups)


@triton.jit
def _joined(
    mean: tl.tensor, remainder: tl.tensor, square: tl.tensor, factor: tl.tensor, n: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """(mean, remainder, M) of the parts [P, groups] of n elements each, times ``factor``."""
    mean, remainder, square = mean * factor, remainder * factor, square * factor * factor
    middle = down(mean * tl.div_rn(n, total)[:, None])
    gap = (mean - middle[None, :]) + remainder
    weighted = tl.where(n[:, None] > 0.0, gap * n[:, None], 0.0)
    first = down(weighted)
    rest = tl.div_rn(first, total)
    return middle, rest, _not_negative(down(weighted * gap + square) - first * rest)


@triton.jit(do_not_specialize=["total", "bound"])
def join_moments(
    parts, ranks, table, squares, length, total, groups, depth, bound, limit, eps, root_eps,
    K: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    LISTED: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """A segment's (mean, remainder, 1/√(M/n + ε), scale) and M for G groups, to (segments, 4 and 1, groups)."""
    tiles = tl.cdiv(groups, G)
    s = tl.program_id(0) // tiles
    group = tl.program_id(0) % tiles * G + tl.arange(0, G)
    _, count = segment(s, ranks, length, total, LISTED, PER)
    size = chunk_length(count, limit, K)
    i = tl.arange(0, P)
    n = tl.minimum(count - i // BLOCKS * size, size) * tl.minimum(depth - i % BLOCKS * D, D)
    n = tl.where(i < bound * BLOCKS, tl.maximum(n, 0), 0).to(tl.float32)
    here = (n > 0.0)[:, None] & (group < groups)[None, :]
    at = parts + (s.to(tl.int64) * bound * BLOCKS + i)[:, None] * (4 * groups) + group[None, :]
    mean = tl.load(at, mask=here, other=0.0)
    remainder = tl.load(at + groups, mask=here, other=0.0)
    square = tl.load(at + 2 * groups, mask=here, other=0.0)
    back = tl.div_rn(1.0, tl.load(at + 3 * groups, mask=here, other=1.0))
    whole = tl.maximum(count.to(tl.float32) * depth, 1.0)
    middle, rest, total_square = _joined(mean, remainder, square, back, n, whole)
    scale = tl.full([G], 1.0, tl.float32)
    radicand = tl.div_rn(total_square, whole) + eps
    extreme = (((total_square < LARGE) & (radicand > SMALL) & (radicand < LARGE)) == 0) & (count > 0)
    if tl.max(extreme.to(tl.int32), 0) > 0:
        # No element of a part is larger than this; beyond 2^127 its own power of two is far enough.
        peak = tl.minimum((tl.abs(mean + remainder) + tl.sqrt_rn(square)) * back, 1.7014118346046923e38)
        peak = tl.where(here & (peak == peak), peak, 0.0)
        scale = tl.where(extreme, scale_for(tl.max(peak, 0), root_eps), 1.0)
        middle, rest, total_square = _joined(mean, remainder, square, back * scale[None, :], n, whole)
        radicand = tl.div_rn(total_square, whole) + eps_scaled(eps, root_eps, scale)
    live = group < groups
    to = table + s.to(tl.int64) * 4 * groups + group
    tl.store(to, middle, mask=live)
    tl.store(to + groups, rest, mask=live)
    tl.store(to + 2 * groups, inverse_root(radicand), mask=live)
    tl.store(to + 3 * groups, scale, mask=live)
    tl.store(squares + s.to(tl.int64) * groups + group, total_square, mask=live)
