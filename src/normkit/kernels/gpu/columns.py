"""Norms across positions, element by element: y from x, and dx from x and dy, with statistics at hand.

A tile is K positions and C channels, either of which may lie side by side: strides say which. Where every sample has
statistics of its own, a tile lies in one sample, so that a channel's statistics are read once a tile.

Triton specialises on how many positions there are: of a number that may be no multiple of 16, p < total may part any
piece of 16 bytes, and with positions side by side a batch norm loaded and stored one element at a time.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.gpu.arithmetic import value_of


@triton.jit
def _place(
    flags: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    channels: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    PER: tl.constexpr,
) -> tl.tensor:
    """(segment, positions, which exist, which count, channels) of a program's tile."""
    tiles = tl.cdiv(channels, C)
    c = tl.program_id(0) % tiles * C + tl.arange(0, C)
    tile = tl.program_id(0) // tiles
    if PER:
        across = tl.cdiv(length, K)
        s = tile // across
        p = tile % across * K + tl.arange(0, K)
        live = p < length
        p += s * length
    else:
        s = tile * 0
        p = tile * K + tl.arange(0, K)
        live = p < total
    valid = live
    if MASKED:
        valid = live & (tl.load(flags + p, mask=live, other=0) != 0)
    return s, p, live, valid, c


@triton.jit
def _offsets(
    p: tl.tensor, c: tl.tensor, length: tl.tensor, sample: tl.tensor, step: tl.tensor, across: tl.tensor
) -> tl.tensor:
    """The offsets of a tile's elements."""
    at = (p // length).to(tl.int64) * sample + (p % length).to(tl.int64) * step
    return at[:, None] + (c.to(tl.int64) * across)[None, :]


@triton.jit
def _read(live: tl.tensor, valid: tl.tensor, RUNS: tl.constexpr) -> tl.tensor:
    """The positions that are read. Where they lie side by side all are: a mask between them would part wide loads."""
    return live if RUNS else valid


@triton.jit
def statistics_at(table: tl.tensor, s: tl.tensor, group: tl.tensor, groups: tl.tensor, live: tl.tensor) -> tl.tensor:
    """(mean, remainder, 1/√, scale) of channels that belong to ``group``."""
    at = table + s.to(tl.int64) * 4 * groups + group
    mean, remainder = tl.load(at, mask=live, other=0.0), tl.load(at + groups, mask=live, other=0.0)
    rstd, scale = tl.load(at + 2 * groups, mask=live, other=0.0), tl.load(at + 3 * groups, mask=live, other=1.0)
    return mean, remainder, rstd, scale


@triton.jit
def apply(
    x, w, b, y, flags, table, length, total, channels, groups, depth, x0, x1, x2, y0, y1, y2,
    K: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PER: tl.constexpr, RUNS: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """Y = x̂·γ + β, rounded once; 0 at positions that do not count, whatever x holds there."""
    s, p, live, valid, c = _place(flags, length, total, channels, K, C, MASKED, PER)
    column = c < channels
    mean, remainder, rstd, scale = statistics_at(table, s, c // depth, groups, column)
    inside = valid[:, None] & column[None, :]
    read = _read(live, valid, RUNS)[:, None] & column[None, :]
    v = tl.load(x + _offsets(p, c, length, x0, x1, x2), mask=read, other=0.0).to(tl.float32)
    v = value_of(v, mean[None, :], remainder[None, :], rstd[None, :], scale[None, :], True)
    gain, shift = mean, mean
    if HAS_W:
        gain = tl.load(w + c, mask=column, other=0.0).to(tl.float32)
    if HAS_B:
        shift = tl.load(b + c, mask=column, other=0.0).to(tl.float32)
    if HAS_W and HAS_B:
        v = tl.fma(v, tl.broadcast_to(gain[None, :], [K, C]), tl.broadcast_to(shift[None, :], [K, C]))
    elif HAS_W:
        v = v * gain[None, :]
    elif HAS_B:
        v = v + shift[None, :]
    v = tl.where(inside, v, 0.0)
    at = y + _offsets(p, c, length, y0, y1, y2)
    tl.store(at, v.to(y.dtype.element_ty), mask=live[:, None] & column[None, :])


@triton.jit
def gradient(
    x, dy, w, dx, flags, table, means, length, total, channels, groups, depth, x0, x1, x2, g0, g1, g2, d0, d1, d2,
    K: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PER: tl.constexpr, RUNS: tl.constexpr,
    HAS_W: tl.constexpr,
):  # fmt: skip
    """Dx = rstd·(dy·γ − a − x̂·b), with a and b the means (segments, 2, groups) of dy·γ and dy·γ·x̂."""
    s, p, live, valid, c = _place(flags, length, total, channels, K, C, MASKED, PER)
    column = c < channels
    mean, remainder, rstd, scale = statistics_at(table, s, c // depth, groups, column)
    at = means + s.to(tl.int64) * 2 * groups + c // depth
    plain, weighted = tl.load(at, mask=column, other=0.0), tl.load(at + groups, mask=column, other=0.0)
    inside = valid[:, None] & column[None, :]
    read = _read(live, valid, RUNS)[:, None] & column[None, :]
    v = tl.load(x + _offsets(p, c, length, x0, x1, x2), mask=read, other=0.0).to(tl.float32)
    g = tl.load(dy + _offsets(p, c, length, g0, g1, g2), mask=read, other=0.0).to(tl.float32)
    v = value_of(v, mean[None, :], remainder[None, :], rstd[None, :], scale[None, :], True)
    if HAS_W:
        g = g * tl.load(w + c, mask=column, other=0.0).to(tl.float32)[None, :]
    d = ((g - plain[None, :]) - v * weighted[None, :]) * rstd[None, :] * scale[None, :]
    d = tl.where(inside, d, 0.0)
    at = dx + _offsets(p, c, length, d0, d1, d2)
    tl.store(at, d.to(dx.dtype.element_ty), mask=live[:, None] & column[None, :])
