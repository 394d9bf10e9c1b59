"""The last, incomplete vector of a row where the processor cannot move part of a vector by a mask.

AVX-512 moves any lanes of any width, AVX2 those of 32 bits. Elsewhere LLVM turns a masked move into sixteen branches
with one element each; here it is at most four moves of 8, 4, 2 and 1 elements, through sixteen lanes on the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from normkit.kernels.cpu.storage import BYTES, LANES, STORED

I64 = ir.IntType(64)


def masked_moves(tag: str) -> bool:
    """Say whether this processor loads and stores chosen lanes of a storage type in one instruction."""
    features = binding.get_host_cpu_features()
    if features.get("avx512bw", False) and features.get("avx512vl", False):
        return True
    return BYTES[tag] == 4 and bool(features.get("avx2", False))


def load_pieces(builder: Any, address: Any, count: Any, tag: str) -> Any:
    """Return a vector of the first ``count`` < 16 elements and zeros; nothing beyond is touched."""
    kind = ir.VectorType(STORED[tag], LANES)
    room = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), room)
    for piece, offset in _pieces(builder, count, tag):
        value = builder.load(_at(builder, address, offset, piece))
        value.align = BYTES[tag]
        builder.store(value, _at(builder, builder.ptrtoint(room, I64), offset, piece)).align = BYTES[tag]
    return builder.load(room)


def store_pieces(builder: Any, address: Any, value: Any, count: Any, tag: str) -> None:
    """Store the first ``count`` < 16 elements of a vector as it lies in memory; nothing beyond is touched."""
    room = cgutils.alloca_once(builder, ir.VectorType(STORED[tag], LANES))
    builder.store(value, room)
    for piece, offset in _pieces(builder, count, tag):
        part = builder.load(_at(builder, builder.ptrtoint(room, I64), offset, piece))
        part.align = BYTES[tag]
        builder.store(part, _at(builder, address, offset, piece)).align = BYTES[tag]


def _pieces(builder: Any, count: Any, tag: str) -> Iterator[tuple[Any, Any]]:
    """Yield the integer type of each piece and its offset in bytes, inside a branch for counts that have the piece."""
    for elements in (8, 4, 2, 1):
        wanted = builder.icmp_unsigned("!=", builder.and_(count, I64(elements)), I64(0))
        with builder.if_then(wanted):
            before = builder.and_(count, I64(LANES - 2 * elements))  # the elements of the larger pieces
            yield ir.IntType(8 * elements * BYTES[tag]), builder.mul(before, I64(BYTES[tag]))


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, offset), ir.PointerType(kind))
