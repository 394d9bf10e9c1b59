"""Thirty-two values as two vectors, in whichever order costs least: for sums, which fix an order but need not this one.

Sixteen bfloat16 are widened by two instructions, a zero-extension and a shift. Of thirty-two read as words, a shift
makes one half, the even ones, and a mask the other: one instruction each. LayerNorm of 128 × 768 takes 5 % less time
(`normkit bench --op layer --shape 128x768 --dtype bfloat16 --threads 1`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from normkit.kernels.cpu.simd import lanes
from normkit.kernels.cpu.storage import BYTES, LANES, STORED, VI, V, constant, widen
from normkit.kernels.cpu.tags import intrinsic


def _half(second: bool) -> Any:
    @intrinsic
    def half(typing: Any, address: Any, tag: Any) -> Any:
        name = tag.tag

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            start = args[0]
            if name == "bf16":
                words = builder.load(builder.inttoptr(start, ir.PointerType(VI)))
                words.align = BYTES[name]
                if second:
                    return builder.bitcast(builder.and_(words, constant(VI, -(1 << 16))), V)
                return builder.bitcast(builder.shl(words, constant(VI, 16)), V)
            if second:
                start = builder.add(start, ir.IntType(64)(LANES * BYTES[name]))
            value = builder.load(builder.inttoptr(start, ir.PointerType(ir.VectorType(STORED[name], LANES))))
            value.align = BYTES[name]
            return widen(builder, value, name)

        return lanes(types.intp, tag), generate

    return half


first_of_two, second_of_two = _half(False), _half(True)
