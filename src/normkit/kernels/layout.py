"""How rows lie in memory: any number of outer axes folded to at most three, one stride a tensor and axis."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Fold = tuple[list[int], list[list[int]]]


def fold(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> Fold | None:
    """Merge neighbouring axes wherever every tensor allows it; None if more than three remain.

    Args:
        sizes: of the outer axes.
        strides: per tensor, in elements, one an axis.

    Returns:
        Three sizes, and per tensor three strides; missing axes have size 1 and stride 0.
    """
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(sizes):
        if length == 1:
            continue
        if kept and all(s[-1] == t[axis] * length for s, t in zip(steps, strides, strict=True)):
            kept[-1] *= length
            for s, t in zip(steps, strides, strict=True):
                s[-1] = t[axis]
            continue
        kept.append(length)
        for s, t in zip(steps, strides, strict=True):
            s.append(t[axis])
    if len(kept) > 3:
        return None
    missing = 3 - len(kept)
    return [1] * missing + kept, [[0] * missing + s for s in steps]


def row_stride(x: Tensor, axes: Sequence[int]) -> int | None:
    """Return the element stride along the row that ``axes`` form in ``x``, or None if they form no single row."""
    stride: int | None = None
    expected = 0
    for axis in reversed(axes):
        if x.shape[axis] == 1:
            continue
        if stride is None:
            stride = x.stride(axis)
            expected = stride * x.shape[axis]
        elif x.stride(axis) == expected:
            expected *= x.shape[axis]
        else:
            return None
    return 1 if stride is None else stride
