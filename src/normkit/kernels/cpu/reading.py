"""What the column kernels read beside the tensors: position masks, and whether statistics left their range."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from normkit.kernels.cpu.simd import lanes
from normkit.kernels.cpu.storage import I32, LANES, VI, V, constant
from normkit.kernels.cpu.tags import intrinsic

I8 = ir.IntType(8)
BYTES16 = ir.VectorType(I8, LANES)
BITS = ir.IntType(LANES)


def _declared(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    from numba.core import cgutils

    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _below(builder: Any, count: Any) -> Any:
    """Lanes below ``count``."""
    undefined = ir.Constant(VI, ir.Undefined)
    number = builder.insert_element(undefined, builder.trunc(count, I32), I32(0))
    return builder.icmp_signed(
        "<", ir.Constant(VI, list(range(LANES))), builder.shuffle_vector(number, undefined, constant(VI, 0))
    )


@intrinsic
def byte_at(typing: Any, address: Any) -> Any:
    """The byte at ``address``, as an integer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[0], ir.PointerType(I8)))
        return builder.zext(value, ir.IntType(64))

    return types.int64(types.intp), generate


@intrinsic
def chosen(typing: Any, value: Any, mask: Any, count: Any) -> Any:
    """The lanes of ``value`` whose byte at ``mask`` is not 0, zeros elsewhere; only ``count`` bytes are touched."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[1], ir.PointerType(BYTES16))
        none = ir.Constant(BYTES16, None)
        loaded = _declared(
            builder, "llvm.masked.load.v16i8.p0", BYTES16, [pointer, I32(1), _below(builder, args[2]), none]
        )
        return builder.select(builder.icmp_unsigned("!=", loaded, none), args[0], ir.Constant(V, None))

    return lanes(lanes, types.intp, types.intp), generate


@intrinsic
def outside(typing: Any, x: Any, low: Any, high: Any, count: Any) -> Any:
    """True if one of the first ``count`` lanes is not strictly between ``low`` and ``high``, as NaN is not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(V, ir.Undefined)

        def splat(number: Any) -> Any:
            return builder.shuffle_vector(builder.insert_element(undefined, number, I32(0)), undefined, constant(VI, 0))

        wrong = builder.or_(
            builder.fcmp_unordered("<=", args[0], splat(args[1])), builder.fcmp_unordered(">=", args[0], splat(args[2]))
        )
        bits = builder.bitcast(builder.and_(wrong, _below(builder, args[3])), BITS)
        return builder.icmp_unsigned("!=", bits, BITS(0))

    return types.boolean(lanes, types.float32, types.float32, types.intp), generate


@intrinsic
def inverse_roots(typing: Any, x: Any) -> Any:
    """1/√x in every lane, by two IEEE operations."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        root = _declared(builder, "llvm.sqrt.v16f32", V, [args[0]])
        return builder.fdiv(constant(V, 1.0), root)

    return lanes(lanes), generate
