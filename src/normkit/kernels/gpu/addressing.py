"""Where rows lie: three outer axes with a stride each and one along the row, all in elements and 64 bits wide."""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_at(i: tl.tensor, d1: tl.tensor, d2: tl.tensor, s0: tl.tensor, s1: tl.tensor, s2: tl.tensor) -> tl.tensor:
    """The offset of row i of a tensor whose rows are numbered over (·, d1, d2)."""
    i2 = i % d2
    i1 = (i // d2) % d1
    i0 = (i // d2) // d1
    return i0.to(tl.int64) * s0 + i1.to(tl.int64) * s1 + i2.to(tl.int64) * s2


@triton.jit
def rows_at(
    i: tl.tensor,
    n: tl.tensor,
    d1: tl.tensor,
    d2: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """As `row_at`, of the rows i; PLAIN rows follow one another without gaps, which spares the divisions."""
    return i.to(tl.int64) * n if PLAIN else row_at(i, d1, d2, s0, s1, s2)


@triton.jit
def parameter_at(
    i: tl.tensor, d1: tl.tensor, d2: tl.tensor, s0: tl.tensor, s1: tl.tensor, s2: tl.tensor, PLAIN: tl.constexpr
) -> tl.tensor:
    """As `rows_at`, of a parameter: PLAIN says that every row has the same."""
    return i.to(tl.int64) * 0 if PLAIN else row_at(i, d1, d2, s0, s1, s2)


@triton.jit
def along(cols: tl.tensor, step: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """The offsets of columns within a row."""
    return cols.to(tl.int64) if PLAIN else cols.to(tl.int64) * step


@triton.jit
def tile_at(
    i: tl.tensor,
    cols: tl.tensor,
    n: tl.tensor,
    d1: tl.tensor,
    d2: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """The offsets of a tile: the rows i, and of each the columns."""
    return rows_at(i, n, d1, d2, s0, s1, s2, PLAIN)[:, None] + along(cols, s3, PLAIN)[None, :]


@triton.jit
def parameter_tile(
    p: tl.tensor,
    i: tl.tensor,
    cols: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    d1: tl.tensor,
    d2: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """A parameter of the rows i as float32: one row for all where PLAIN, else a tile."""
    if PLAIN:
        found = tl.load(p + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    else:
        at = tile_at(i, cols, n, d1, d2, s0, s1, s2, s3, PLAIN)
        found = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    return found
