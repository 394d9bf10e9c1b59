"""Sums within a tile in an order that is written down: halves are added to each other until one is left.

`tl.sum` adds in the order in which the compiler spread a tile over threads, and that follows from what it knows of the
addresses: a list of positions, a gap between rows or an odd base would change the last bit. A sum of two is the same in
any order. Zeros at the end change no bit, so a tile may be longer than what it holds.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halved(v: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """The sums of a tile [rows, columns] over every LEFT-th row."""
    for _ in tl.static_range(16):
        if v.shape[0] > LEFT:
            v = tl.sum(tl.reshape(v, [2, v.shape[0] // 2, v.shape[1]]), 0)
    return v


@triton.jit
def over_positions(v: tl.tensor) -> tl.tensor:
    """The sums of a tile [positions, channels] over its positions."""
    return tl.reshape(halved(v, 1), [v.shape[1]])


@triton.jit
def over_groups(v: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The sums of every D neighbours of a vector."""
    w = tl.reshape(v, [v.shape[0] // D, D])
    for _ in tl.static_range(16):
        if w.shape[1] > 1:
            w = tl.sum(tl.reshape(w, [w.shape[0], 2, w.shape[1] // 2]), 1)
    return tl.reshape(w, [w.shape[0]])


@triton.jit
def spread(g: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """A vector with every element repeated D times: what `over_groups` collects."""
    return tl.reshape(tl.broadcast_to(g[:, None], [g.shape[0], D]), [g.shape[0] * D])
