"""Launching the row kernels: what a request compiles to, and the argument block of a call.

A block is a `bytes` of 64-bit words laid out as forward.py and backward.py read it; packing one costs half a
microsecond where a ctypes array costs two. The kernel writes nothing into it, so one block serves every thread.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import layout
from normkit.kernels.cpu import pool
from normkit.kernels.cpu.objects import addresses_of
from normkit.kernels.rounding import product_dtype, rounds_first
from normkit.spec import NormSpec

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_FORWARD = struct.Struct("4q3d4q2q30q")
_BACKWARD = struct.Struct("4qd3q3q2q25q")
_SLOTS = 6  # rows of scratch a thread, as forward.py counts them


@dataclass(frozen=True)
class Code:
    """A compiled kernel: where it takes a full block, a callable for the calling thread, where it takes a short one."""

    address: int
    call: Callable[[bytes], None]
    short: int

    def run(self, block: Callable[[int, int], bytes], threads: int, rows: int, piece: int = 0) -> None:
        """Run over all rows on so many threads. ``block(counter, piece)`` packs the arguments."""
        if threads == 1:
            self.call(block(0, piece or rows))
            return
        table = pool.new_shares(threads)
        # Four pieces a thread even out what the cores are otherwise busy with.
        step = piece or -(-rows // (4 * threads))
        pool.run_parallel(self.address, block(ctypes.addressof(table), step), threads)


_codes: dict[Any, Code] = {}


def code_of(name: str, make: Callable[[], Callable[[Any], None]]) -> Code:
    """Return the kernel called ``name``, loaded or compiled from ``make()``."""
    address, short = addresses_of(name, make)
    return Code(address, ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address), short)


def flag(value: bool) -> str:
    """Return the tag of a switch."""
    return "yes" if value else "no"


@dataclass(frozen=True)
class Kinds:
    """The dtypes of a call and whether rows must be packed, which with the spec decide the code."""

    x: torch.dtype
    w: torch.dtype | None
    b: torch.dtype | None
    y: torch.dtype
    branch: torch.dtype | None = None
    residual: torch.dtype | None = None
    packed: bool = False


def forward_code(spec: NormSpec, kinds: Kinds) -> Code:
    """Return the forward kernel for a spec and dtypes, compiling it where this machine has not."""
    key = ("forward", spec, kinds)
    code = _codes.get(key)
    if code is None:
        code = _codes[key] = _make_forward(spec, kinds)
    return code


def _make_forward(spec: NormSpec, kinds: Kinds) -> Code:
    first = rounds_first(spec, kinds.branch or kinds.x, kinds.w)
    tags = _common_tags(spec, kinds) | {
        "A": NAMES[kinds.branch or kinds.x],
        "Q": NAMES[kinds.residual or kinds.x],
        "P": NAMES[product_dtype(spec, first or kinds.x, kinds.w)],
        "B": NAMES[kinds.b or torch.float32],
        "Y": NAMES[kinds.y],
        "added": flag(kinds.residual is not None),
        "has_b": flag(kinds.b is not None),
        "past": flag(kinds.y == torch.float32 and not kinds.packed),
    }

    def make(tag: Any) -> Callable[[Any], None]:
        from normkit.kernels.cpu.forward import RowTags, forward_kernel

        return forward_kernel(RowTags(**{name: tag(value) for name, value in tags.items()}))

    return tagged("forward", tags, make)


def backward_code(
    spec: NormSpec,
    kinds: Kinds,
    dy: torch.dtype,
    dx: torch.dtype,
    extra: torch.dtype | None,
    wanted: tuple[bool, bool, bool],
) -> Code:
    """Return the backward kernel; ``wanted`` says which of dx, dw, db are needed."""
    key = ("backward", spec, kinds, dy, dx, extra, wanted)
    code = _codes.get(key)
    if code is None:
        tags = _common_tags(spec, kinds) | {
            "G": NAMES[dy],
            "D": NAMES[dx],
            "E": NAMES[extra or kinds.x],
            "added": flag(extra is not None),
            "want_x": flag(wanted[0]),
            "want_w": flag(wanted[1]),
            "want_b": flag(wanted[2]),
        }

        def make(tag: Any) -> Callable[[Any], None]:
            from normkit.kernels.cpu.backward import GradTags, backward_kernel

            return backward_kernel(GradTags(**{name: tag(value) for name, value in tags.items()}))

        code = _codes[key] = tagged("backward", tags, make)
    return code


def _common_tags(spec: NormSpec, kinds: Kinds) -> dict[str, str]:
    """Return what a forward and its backward are both compiled for."""
    first = rounds_first(spec, kinds.branch or kinds.x, kinds.w)
    return {
        "X": NAMES[kinds.x],
        "R": NAMES[first or kinds.x],
        "W": NAMES[kinds.w or torch.float32],
        "centered": flag(spec.centered),
        "sum": flag(spec.statistic == "sum"),
        "has_w": flag(kinds.w is not None),
        "plus": flag(spec.weight == "one_plus"),
        "plus_rounded": flag(spec.weight == "one_plus_rounded"),
        "first": flag(first is not None),
        "packed": flag(kinds.packed),
    }


def tagged(kind: str, tags: dict[str, str], make: Callable[[Any], Callable[[Any], None]]) -> Code:
    """Return the code of a kind and its tags; ``make`` is given the tag class, which only compiling needs."""

    def kernel() -> Callable[[Any], None]:
        from normkit.kernels.cpu.tags import Tag

        return make(Tag)

    return code_of(f"{kind} " + " ".join(f"{k}={v}" for k, v in tags.items()), kernel)


# Beyond this many bytes read and written, y leaves the cache before anybody reads it, and writing past the cache saves
# the read of each line that is overwritten: 1.4–1.5 times as fast at 128–256 MiB into a given output. Within it the
# same stores cost 1.4 times as much (59 against 43 µs at 512 × 768), and so they do into fresh memory of any size,
# whose pages the system has just zeroed through the cache (`python benchmarks/past.py`).
PAST_FROM = 1 << 26


@dataclass(frozen=True)
class Rows:
    """How the rows of a call lie: their number and width, three outer sizes, and per tensor three byte strides."""

    count: int
    width: int
    sizes: Sequence[int]
    steps: Sequence[Sequence[int]]  # (outer, outer, outer, along the row), in bytes
    packed: bool  # some row's elements lie apart

    def threads(self) -> int:
        """Return how many threads the work is worth."""
        return min(pool.threads_for(self.count * self.width), self.count)

    def scratch(self, threads: int) -> Tensor | None:
        """Return room to pack rows into: six rows of four-byte elements for every thread."""
        return torch.empty(threads * _SLOTS * self.slot, dtype=torch.float32) if self.packed else None

    @property
    def slot(self) -> int:
        """Return a row of scratch in elements: the width rounded up to whole vectors."""
        return -(-self.width // 16) * 16


def lay_out(axes: Sequence[int], tensors: Sequence[Tensor | None], shape: Sequence[int]) -> Rows | None:
    """Fold the outer axes of tensors that share (or broadcast to) ``shape``; None where they cannot be folded to three.

    A tensor that broadcasts along an axis has stride 0 there. Rows whose elements lie apart are packed by the kernel.
    """
    found = layout.lay(axes, tensors, shape)
    if found is None:
        return None
    sizes, steps = found
    in_bytes = [
        (0, 0, 0, 0) if t is None else tuple(s * t.element_size() for s in step)
        for t, step in zip(tensors, steps, strict=True)
    ]
    packed = any(step[3] != 1 for step in steps)
    return Rows(math.prod(sizes), math.prod([shape[a] for a in axes]), sizes, in_bytes, packed)


def contiguous_rows(x: Tensor, tensors: Sequence[Tensor | None]) -> Rows:
    """As `lay_out`, where every tensor is contiguous and one of x's shape or of a single row."""
    width = x.shape[-1]
    count = x.numel() // width
    steps = [
        (0, 0, 0, 0)
        if t is None
        else (0, 0, width * t.element_size() if t.numel() == x.numel() else 0, t.element_size())
        for t in tensors
    ]
    return Rows(count, width, (1, 1, count), steps, packed=False)


def at(t: Tensor | None) -> int:
    """Return the address of a tensor, 0 of none."""
    return 0 if t is None else t.data_ptr()


def forward_contiguous(
    code: Code,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    stats: Tensor | None,
    given: bool = False,
) -> None:
    """Run over a contiguous x whose last axis is the row, with parameters of one row: nothing to fold.

    ``given`` says that y is the caller's; a fresh y is never written past the cache (see `PAST_FROM`).
    """
    width = x.shape[-1]
    rows = x.numel() // width
    step, out = width * x.element_size(), width * y.element_size()
    past = int(given and rows * (step + out) >= PAST_FROM and out % 64 == 0 and y.data_ptr() % 64 == 0)

    def block(counter: int, piece: int) -> bytes:
        return _FORWARD.pack(
            counter, rows, piece, width, eps, 1.0, 1.0, past, at(stats), 1, rows, 0, 0,
            x.data_ptr(), 0, 0, step, 0, at(weight), 0, 0, 0, 0, at(bias), 0, 0, 0, 0, y.data_ptr(), 0, 0, out, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    code.run(block, min(pool.threads_for(rows * width), rows), rows)


def forward(
    code: Code,
    rows: Rows,
    eps: float,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    stats: Tensor | None,
    branch: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    given: bool = False,
) -> None:
    """Run over rows as laid out for (x, weight, bias, y, branch, residual); x receives the sum where there is one."""
    tensors = (x, weight, bias, y, branch, residual)
    words = [w for t, step in zip(tensors, rows.steps, strict=True) for w in (at(t), *step)]
    out = rows.width * y.element_size()
    size = rows.count * (out + rows.width * x.element_size())
    aligned = y.data_ptr() % 64 == 0 and all(s % 64 == 0 for s in rows.steps[3])
    past = int(given and size >= PAST_FROM and aligned and out % 64 == 0 and not rows.packed)
    threads = rows.threads()
    scratch = rows.scratch(threads)

    def block(counter: int, piece: int) -> bytes:
        head = (counter, rows.count, piece, rows.width, eps, alpha, beta, past, at(stats), *rows.sizes[1:])
        head = (*head, at(scratch), 4 * rows.slot)
        return _FORWARD.pack(*head, *words)

    code.run(block, threads, rows.count)


def backward(
    code: Code,
    rows: Rows,
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    dx: Tensor | None,
    extra: Tensor | None,
    stats: Tensor,
    want_w: bool,
    want_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Run over rows as laid out for (x, weight, dy, dx, extra); return the float32 partials for weight and bias."""
    piece, parts = pieces(rows.count)
    dw = torch.zeros(parts, rows.width, dtype=torch.float32) if want_w else None
    db = torch.zeros(parts, rows.width, dtype=torch.float32) if want_b else None
    threads = rows.threads()
    scratch = rows.scratch(threads)
    words = [w for t, step in zip((x, weight, dy, dx, extra), rows.steps, strict=True) for w in (at(t), *step)]

    def block(counter: int, _: int) -> bytes:
        head = (counter, rows.count, piece, rows.width, 0.0, at(dw), at(db), 0, stats.data_ptr(), *rows.sizes[1:])
        head = (*head, at(scratch), 4 * rows.slot)
        return _BACKWARD.pack(*head, *words)

    code.run(block, threads, rows.count, piece)
    return dw, db


def pieces(rows: int) -> tuple[int, int]:
    """Return how many rows share a partial, and how many partials there are.

    The number of rows alone decides, never the threads: the same bits every run.
    """
    piece = max(32, -(-rows // 64))
    return piece, -(-rows // piece)


def fold(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the partials first to last, an order that no thread count changes, and round the sum once."""
    count, width = parts.shape
    if count == 1 and dtype == torch.float32:
        return parts[0]
    total = torch.empty(width, dtype=dtype)
    code = _codes.get(("fold", dtype))
    if code is None:

        def make() -> Callable[[Any], None]:
            from normkit.kernels.cpu.backward import fold_kernel
            from normkit.kernels.cpu.tags import Tag

            return fold_kernel(Tag(NAMES[dtype]))

        code = _codes["fold", dtype] = code_of(f"fold {NAMES[dtype]}", make)
    code.call(struct.pack("4q", parts.data_ptr(), total.data_ptr(), count, width))
    return total


def folded(parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of ``p`` from partials over the elements of ``shape``, to which p broadcasts."""
    if p.numel() == parts.shape[1]:
        return fold(parts, p.dtype).view(p.shape)
    # A parameter that broadcasts along the row (a scalar gain) collects the row's sum.
    return fold(parts, torch.float32).view(tuple(shape)).sum_to_size(p.shape).to(p.dtype)


def kept_of_row(spec: NormSpec) -> int:
    """Return how many float32 a backward needs of a row: (rstd, scale), centred (mean, remainder, rstd, scale)."""
    return 4 if spec.centered else 2


def new_statistics(spec: NormSpec, count: int) -> Tensor:
    """Return room for what the backward needs of each row."""
    return torch.empty(count, kept_of_row(spec), dtype=torch.float32)
