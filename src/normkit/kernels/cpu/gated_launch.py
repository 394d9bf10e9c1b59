"""Launching the gated kernels: tensors in, tensors out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.cpu.rows import NAMES, Code, Rows, at, flag, folded, lay_out, tagged
from normkit.kernels.rounding import product_dtype, result_dtype, rounds_first
from normkit.spec import NormSpec

_FORWARD = struct.Struct("4qd8q20q")
_BACKWARD = struct.Struct("13q30q")
_FORWARD_SLOTS, _BACKWARD_SLOTS = 6, 9  # rows of scratch a thread; gated.py and gated_backward.py say what for
_PIECE = 32  # positions a partial is made of, at least, and _PARTS partials at most
_PARTS = 64


@dataclass(frozen=True)
class Kinds:
    """The dtypes of a call and whether rows must be packed, which with the spec decide the code."""

    x: torch.dtype
    gate: torch.dtype
    w: torch.dtype | None
    packed: bool


_codes: dict[Any, Code] = {}


def _common_tags(spec: NormSpec, kinds: Kinds) -> dict[str, str]:
    """Return what a forward and its backward are both compiled for."""
    first = rounds_first(spec, kinds.x, kinds.w)
    before = spec.gate == "before"
    return {
        "X": NAMES[torch.float32 if before else kinds.x],
        "A": NAMES[kinds.x],
        "G": NAMES[kinds.gate],
        "R": NAMES[first or kinds.x],
        "P": NAMES[product_dtype(spec, first or kinds.x, kinds.w)],
        "W": NAMES[kinds.w or torch.float32],
        "before": flag(before),
        "silu": flag(spec.activation == "silu"),
        "has_w": flag(kinds.w is not None),
        "plus": flag(spec.weight == "one_plus"),
        "plus_rounded": flag(spec.weight == "one_plus_rounded"),
        "first": flag(first is not None),
        "packed": flag(kinds.packed),
    }


def _forward_code(spec: NormSpec, kinds: Kinds, y: torch.dtype) -> Code:
    key = ("forward", spec, kinds, y)
    code = _codes.get(key)
    if code is None:
        tags = _common_tags(spec, kinds) | {"Y": NAMES[y]}

        def make(tag: Any) -> Callable[[Any], None]:
            from normkit.kernels.cpu.gated import GatedTags, gated_kernel

            return gated_kernel(GatedTags(**{name: tag(value) for name, value in tags.items()}))

        code = _codes[key] = tagged("gated", tags, make)
    return code


def _backward_code(spec: NormSpec, kinds: Kinds, dy: torch.dtype, wanted: tuple[bool, bool, bool]) -> Code:
    key = ("backward", spec, kinds, dy, wanted)
    code = _codes.get(key)
    if code is None:
        tags = _common_tags(spec, kinds) | {
            "U": NAMES[dy],
            "D": NAMES[kinds.x],
            "E": NAMES[kinds.gate],
            "want_x": flag(wanted[0]),
            "want_g": flag(wanted[1]),
            "want_w": flag(wanted[2]),
        }

        def make(tag: Any) -> Callable[[Any], None]:
            from normkit.kernels.cpu.gated_backward import GatedGradTags, gated_backward_kernel

            return gated_backward_kernel(GatedGradTags(**{name: tag(value) for name, value in tags.items()}))

        code = _codes[key] = tagged("gated backward", tags, make)
    return code


def forward(
    x: Tensor,
    gate: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return y and, if ``keep``, the row statistics the backward wants: (rstd, scale), gate first also the shrink."""
    w = None if weight is None else weight.dtype
    y = torch.empty(x.shape, dtype=result_dtype(spec, x.dtype, w, None))
    rows = lay_out(axes, (x, weight, gate, y), x.shape)
    assert rows is not None, "refuses() let through what cannot be laid out"
    code = _forward_code(spec, Kinds(x.dtype, gate.dtype, w, rows.packed), y.dtype)
    before = spec.gate == "before"
    stats = torch.empty(rows.count, 3 if before else 2, dtype=torch.float32) if keep else None
    threads = rows.threads()
    scratch = _scratch(rows, threads, _FORWARD_SLOTS) if before or rows.packed else None
    words = _words((x, weight, gate, y), rows)

    def block(counter: int, piece: int) -> bytes:
        head = (counter, rows.count, piece, rows.width, eps, 0, 0, 0, at(stats), *rows.sizes[1:])
        return _FORWARD.pack(*head, at(scratch), 4 * rows.slot, *words)

    code.run(block, threads, rows.count)
    return y, stats


def backward(
    x: Tensor,
    gate: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    dy: Tensor,
    stats: Tensor,
    *,
    axes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dgate, dw), None where not wanted."""
    dx = torch.empty(x.shape, dtype=x.dtype) if wanted[0] else None
    dgate = torch.empty(x.shape, dtype=gate.dtype) if wanted[1] else None
    rows = lay_out(axes, (x, weight, dy, gate, dx, dgate), x.shape)
    if rows is None:  # an upstream gradient whose outer axes do not fold with x's to three
        dy = dy.contiguous()
        rows = lay_out(axes, (x, weight, dy, gate, dx, dgate), x.shape)
    assert rows is not None, "refuses() let through what cannot be laid out"
    kinds = Kinds(x.dtype, gate.dtype, None if weight is None else weight.dtype, rows.packed)
    code = _backward_code(spec, kinds, dy.dtype, wanted)
    # A partial covers whole positions, so that every group meets its own columns. Positions are counted, never threads:
    # the same bits every run.
    groups = x.shape[-2]
    positions = rows.count // groups
    piece = max(_PIECE, -(-positions // _PARTS))
    parts = torch.zeros(-(-positions // piece), groups * rows.width, dtype=torch.float32) if wanted[2] else None
    threads = rows.threads()
    scratch = _scratch(rows, threads, _BACKWARD_SLOTS)
    words = _words((x, weight, dy, gate, dx, dgate), rows)

    def block(counter: int, piece: int) -> bytes:
        head = (counter, rows.count, piece, rows.width, 0, at(parts), groups, 0, stats.data_ptr())
        return _BACKWARD.pack(*head, *rows.sizes[1:], scratch.data_ptr(), 4 * rows.slot, *words)

    code.run(block, threads, rows.count, piece * groups)
    shape = (*[1] * (x.dim() - 2), groups, rows.width)
    dw = None if parts is None or weight is None else folded(parts, weight, shape)
    return dx, dgate, dw


def _scratch(rows: Rows, threads: int, slots: int) -> Tensor:
    return torch.empty(threads * slots * rows.slot, dtype=torch.float32)


def _words(tensors: tuple[Tensor | None, ...], rows: Rows) -> list[int]:
    return [w for t, step in zip(tensors, rows.steps, strict=True) for w in (at(t), *step)]
