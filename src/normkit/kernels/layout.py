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
    return stride_along(x.shape, x.stride(), axes)


def stride_along(sizes: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> int | None:
    """As `row_stride`, of what has these sizes and strides."""
    stride: int | None = None
    expected = 0
    for axis in reversed(axes):
        if sizes[axis] == 1:
            continue
        if stride is None:
            stride = strides[axis]
            expected = stride * sizes[axis]
        elif strides[axis] == expected:
            expected *= sizes[axis]
        else:
            return None
    return 1 if stride is None else stride


def lay(axes: Sequence[int], tensors: Sequence[Tensor | None], shape: Sequence[int]) -> Fold | None:
    """Fold the outer axes of tensors that share (or broadcast to) ``shape``; None where three do not suffice.

    Returns:
        Three sizes, and per tensor four strides in elements: three outer ones and that along the row. A tensor that
        broadcasts along an axis has stride 0 there; one that is missing has 0 everywhere, and 1 along the row.
    """
    outer = [a for a in range(len(shape)) if a not in axes]
    views = [t if t is None or tuple(t.shape) == tuple(shape) else t.expand(shape) for t in tensors]
    within = [1 if t is None else row_stride(t, axes) for t in views]
    folded = fold(
        [shape[a] for a in outer], [[0] * len(outer) if t is None else [t.stride(a) for a in outer] for t in views]
    )
    if folded is None:
        return None
    sizes, steps = folded
    every = [[*step, stride] for step, stride in zip(steps, within, strict=True) if stride is not None]
    return (sizes, every) if len(every) == len(within) else None
