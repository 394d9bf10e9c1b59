"""Whether a kernel may write straight into the caller's ``out=``."""

from __future__ import annotations

import torch
from torch import Tensor


def may_write(out: Tensor, x: Tensor, *parameters: Tensor | None) -> bool:
    """Say whether a kernel may write rows into ``out`` while it reads its inputs.

    Over x itself it may, element for element; over anything else it would read what it has just written.
    """
    return _writable(out) and _apart(out, (x,), parameters)


def may_write_both(y: Tensor, s: Tensor, rows: tuple[Tensor, ...], *parameters: Tensor | None) -> bool:
    """As `may_write`, of a norm and a sum that share no memory: each may be one of ``rows``, element for element."""
    return all(_writable(t) and _apart(t, rows, parameters) for t in (y, s))


def _writable(out: Tensor) -> bool:
    """Say whether every element has memory of its own."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("out= is an inference tensor, which may be written under torch.inference_mode() only")
    return not shares_itself(out)  # copy_ refuses it


def shares_itself(t: Tensor) -> bool:
    """Say whether two elements of an expanded tensor share their memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _apart(out: Tensor, rows: tuple[Tensor, ...], parameters: tuple[Tensor | None, ...] = ()) -> bool:
    """Say whether ``out`` meets none of the others, other than being one of ``rows``."""
    others = [t for t in rows if (t.data_ptr(), t.stride(), t.dtype) != (out.data_ptr(), out.stride(), out.dtype)]
    return not any(t is not None and overlap(out, t) for t in (*others, *parameters))


def may_fill(out: Tensor, x: Tensor, other: Tensor | None, another: Tensor | None) -> bool:
    """As `may_write`, of contiguous tensors, in a third of the time; no where the answer takes longer to find."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return False
    low = out.data_ptr()
    high = low + out.nbytes
    if x.data_ptr() == low:
        if x.dtype != out.dtype:
            return False
    elif _meets(x, low, high):
        return False
    return not (_meets(other, low, high) or _meets(another, low, high))


def may_fill_both(
    y: Tensor, s: Tensor, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """As `may_write_both`, of contiguous tensors; that y and s share no memory is found here."""
    return all(may_fill(a, x, b, weight) and may_fill(a, residual, b, bias) for a, b in ((y, s), (s, y)))


def _meets(t: Tensor | None, low: int, high: int) -> bool:
    return t is not None and t.data_ptr() < high and low < t.data_ptr() + t.nbytes


def overlap(a: Tensor, b: Tensor) -> bool:
    """Say whether the memory from first to last element of each meets; views of one NumPy array are seen, too."""
    low_a, high_a = _span(a)
    low_b, high_b = _span(b)
    return low_a < high_b and low_b < high_a


def _span(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
