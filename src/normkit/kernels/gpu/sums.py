"""Sums whose order is written down: of a tile's rows, of its columns, of one vector.

`tl.sum` over many elements adds in an order that follows the compiler's layout of the tile, and that layout follows the
addresses: rows that start at odd places or lie apart are loaded otherwise, and another order is other bits. Here every
reduction is over an axis of two. One addition has no order, so the bits are those of the tree below under every layout,
dtype and version of the compiler, and in the interpreter.

Columns far apart are added first: at the settings of `settings.py` one thread holds those. Then neighbours. A term
passes through log2(columns) additions. Compiled, that takes as many shuffles and additions as `tl.sum` where a tile is
read in pieces of 16 bytes, and a barrier more for each doubling of the warps.
"""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def across(v: tl.tensor) -> tl.tensor:
    """Σ along each row of a tile [rows, columns], both powers of two: [rows]."""
    return _across(v, max(1024, v.shape[1] // 4))


@triton.jit
def _across(v: tl.tensor, APART: tl.constexpr) -> tl.tensor:
    """Halves of more than APART columns are added to each other, then neighbours."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    HALF: tl.constexpr = v.shape[1] // 2
    if C == 1:
        total = tl.reshape(v, [R])
    elif C > APART:
        total = _across(tl.sum(tl.reshape(v, [R, 2, HALF]), 1), APART)
    else:
        total = _across(tl.sum(tl.reshape(v, [R, HALF, 2]), 2), APART)
    return total


@triton.jit
def down(v: tl.tensor) -> tl.tensor:
    """Σ along each column of a tile [rows, columns], the rows a power of two: [columns]."""
    C: tl.constexpr = v.shape[1]
    HALF: tl.constexpr = v.shape[0] // 2
    return tl.reshape(v, [C]) if HALF == 0 else down(tl.sum(tl.reshape(v, [2, HALF, C]), 0))


@triton.jit
def whole(v: tl.tensor) -> tl.tensor:
    """Σ of a vector, its length a power of two."""
    C: tl.constexpr = v.shape[0]
    return tl.sum(across(tl.reshape(v, [1, C])), 0)


@triton.jit
def halved(v: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """The sums of a tile [rows, columns] over every LEFT-th row."""
    for _ in tl.static_range(16):
        if v.shape[0] > LEFT:
            v = tl.sum(tl.reshape(v, [2, v.shape[0] // 2, v.shape[1]]), 0)
    return v


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
