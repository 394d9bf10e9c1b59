"""Sixteen float32 lanes as one value, with loads and stores that convert bfloat16 and float16.

Explicit vectors instead of auto-vectorised loops: full width on every instruction set without any fast-math flag, so
the order of every sum is the one written here.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import models, register_model

from normkit.kernels.cpu.storage import (
    BYTES,
    F32,
    I32,
    LANES,
    STORED,
    SUFFIX,
    VI,
    V,
    bfloat_to_float,
    constant,
    narrow,
    widen,
)
from normkit.kernels.cpu.tags import intrinsic
from normkit.kernels.cpu.tails import load_pieces, masked_moves, store_pieces


class Lanes(types.Type):
    """Numba's type of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = Lanes()


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, V)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind))


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _mask(builder: Any, count: Any) -> Any:
    """Lanes below ``count`` (an i64)."""
    number = builder.trunc(count, I32)
    vector = builder.insert_element(ir.Constant(VI, ir.Undefined), number, I32(0))
    vector = builder.shuffle_vector(vector, ir.Constant(VI, ir.Undefined), constant(VI, 0))
    return builder.icmp_unsigned("<", ir.Constant(VI, list(range(LANES))), vector)


@intrinsic
def load(typing: Any, address: Any, tag: Any) -> Any:
    """Sixteen values of type ``tag`` at ``address``, widened."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_pointer(builder, args[0], ir.VectorType(STORED[name], LANES)))
        value.align = BYTES[name]
        return widen(builder, value, name)

    return lanes(types.intp, tag), generate


@intrinsic
def load_some(typing: Any, address: Any, count: Any, tag: Any) -> Any:
    """The first ``count`` < 16 values at ``address``, widened; zeros beyond, and nothing beyond is touched."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = ir.VectorType(STORED[name], LANES)
        if not masked_moves(name):
            return widen(builder, load_pieces(builder, args[0], args[1], name), name)
        pointer, mask = _pointer(builder, args[0], memory), _mask(builder, args[1])
        arguments = [pointer, I32(BYTES[name]), mask, ir.Constant(memory, None)]
        return widen(builder, _call(builder, f"llvm.masked.load.{SUFFIX[name]}.p0", memory, arguments), name)

    return lanes(types.intp, types.intp, tag), generate


@intrinsic
def store(typing: Any, address: Any, value: Any, tag: Any) -> Any:
    """Round to ``tag`` (nearest even) and store sixteen values."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(STORED[name], LANES)
        builder.store(narrow(builder, args[1], name), _pointer(builder, args[0], kind)).align = BYTES[name]
        return context.get_dummy_value()

    return types.void(types.intp, lanes, tag), generate


@intrinsic
def store_past(typing: Any, address: Any, value: Any, tag: Any) -> Any:
    """As `store`, past the cache; the address must be aligned to the vector."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(STORED[name], LANES)
        instruction = builder.store(narrow(builder, args[1], name), _pointer(builder, args[0], kind))
        instruction.align = BYTES[name] * LANES
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(types.intp, lanes, tag), generate


@intrinsic
def store_some(typing: Any, address: Any, value: Any, count: Any, tag: Any) -> Any:
    """Round to ``tag`` and store the first ``count`` < 16 values; nothing beyond is touched."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = narrow(builder, args[1], name)
        if not masked_moves(name):
            store_pieces(builder, args[0], value, args[2], name)
            return context.get_dummy_value()
        pointer, mask = _pointer(builder, args[0], ir.VectorType(STORED[name], LANES)), _mask(builder, args[2])
        arguments = [value, pointer, I32(BYTES[name]), mask]
        _call(builder, f"llvm.masked.store.{SUFFIX[name]}.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(types.intp, lanes, types.intp, tag), generate


@intrinsic
def rounded(typing: Any, value: Any, tag: Any) -> Any:
    """Round to ``tag`` and back."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if name == "f32":
            return args[0]
        short = narrow(builder, args[0], name)
        if name == "f16":
            return builder.fpext(short, V)
        return bfloat_to_float(builder, short)

    return lanes(lanes, tag), generate


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    """One float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(V, ir.Undefined)
        vector = builder.insert_element(undefined, args[0], I32(0))
        return builder.shuffle_vector(vector, undefined, constant(VI, 0))

    return lanes(types.float32), generate


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x·y + z with one rounding, on every instruction set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", V, list(args))

    return lanes(lanes, lanes, lanes), generate


def _binary(operation: str) -> Any:
    @intrinsic
    def operate(typing: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, operation)(*args)

        return lanes(lanes, lanes), generate

    return operate


add, sub, mul, div = _binary("fadd"), _binary("fsub"), _binary("fmul"), _binary("fdiv")


@intrinsic
def not_negative(typing: Any, x: Any) -> Any:
    """Lane-wise max(x, 0); NaN stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(V, None)
        return builder.select(builder.fcmp_ordered("<", args[0], zero), zero, args[0])

    return lanes(lanes), generate


@intrinsic
def only(typing: Any, x: Any, count: Any) -> Any:
    """X in the first ``count`` lanes, zeros beyond."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(_mask(builder, args[1]), args[0], ir.Constant(V, None))

    return lanes(lanes, types.intp), generate


@intrinsic
def maximum_magnitude(typing: Any, x: Any, y: Any) -> Any:
    """Lane-wise max(x, |y|); NaN in y is passed over."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude = _call(builder, "llvm.fabs.v16f32", V, [args[1]])
        return builder.select(builder.fcmp_ordered(">", magnitude, args[0]), magnitude, args[0])

    return lanes(lanes, lanes), generate


def _fold(operation: str) -> Any:
    @intrinsic
    def fold(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], LANES
            while width > 1:
                width //= 2
                undefined = ir.Constant(value.type, ir.Undefined)
                kind = ir.VectorType(I32, width)
                low = builder.shuffle_vector(value, undefined, ir.Constant(kind, list(range(width))))
                high = builder.shuffle_vector(value, undefined, ir.Constant(kind, list(range(width, 2 * width))))
                if operation == "sum":
                    value = builder.fadd(low, high)
                else:
                    value = builder.select(builder.fcmp_ordered(">", high, low), high, low)
            return builder.extract_element(value, I32(0))

        return types.float32(lanes), generate

    return fold


sum_lanes, max_lanes = _fold("sum"), _fold("max")


@intrinsic
def f32_at(typing: Any, address: Any) -> Any:
    """The float32 at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], F32))

    return types.float32(types.intp), generate


@intrinsic
def put_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store a float32 at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], F32))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@intrinsic
def word(typing: Any, address: Any, index: Any) -> Any:
    """The ``index``-th int64 at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.IntType(64))
        return builder.load(builder.gep(pointer, [args[1]]))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def put_word(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def strided(typing: Any, address: Any, index: Any, i: Any, j: Any, k: Any) -> Any:
    """Word ``index`` plus i, j, k times the three words after it: an address from a base and its strides."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.gep(_pointer(builder, args[0], ir.IntType(64)), [args[1]])
        total = builder.load(first)
        for n, count in enumerate(args[2:], start=1):
            stride = builder.load(builder.gep(first, [I32(n)]))
            total = builder.add(total, builder.mul(count, stride))
        return total

    return types.int64(types.intp, types.intp, types.int64, types.int64, types.int64), generate


@intrinsic
def f64_word(typing: Any, address: Any, index: Any) -> Any:
    """The ``index``-th word at ``address``, read as a float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.DoubleType())
        return builder.load(builder.gep(pointer, [args[1]]))

    return types.float64(types.intp, types.intp), generate


@intrinsic
def take(typing: Any, address: Any) -> Any:
    """Atomically return the int64 at ``address`` and add one to it: how threads draw their next piece of work."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], ir.IntType(64)), ir.IntType(64)(1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic
def thread_number(typing: Any, address: Any) -> Any:
    """What the function at ``address`` returns: the OpenMP runtime's answer to which thread of its team this is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), ()).as_pointer())
        return builder.sext(builder.call(function, ()), ir.IntType(64))

    return types.int64(types.intp), generate


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """A float32's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def f32_from_bits(typing: Any, x: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), generate


@intrinsic
def inverse_root(typing: Any, x: Any) -> Any:
    """1/√x of a float32 by two IEEE operations."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        root = _call(builder, "llvm.sqrt.f32", F32, [args[0]])
        return builder.fdiv(F32(1.0), root)

    return types.float32(types.float32), generate


@intrinsic
def move(typing: Any, to: Any, source: Any, tag: Any) -> Any:
    """Copy one element of a storage type."""
    name = tag.tag

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(8 * BYTES[name])
        value = builder.load(_pointer(builder, args[1], kind))
        builder.store(value, _pointer(builder, args[0], kind))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, tag), generate
