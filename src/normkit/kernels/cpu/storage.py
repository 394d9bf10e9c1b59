"""How numbers lie in memory: float32, bfloat16 and float16, widened to and rounded from sixteen float32 lanes."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

LANES = 16
F32, I16, I32, I1 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(1)
V = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VM = ir.VectorType(I1, LANES)


class _Named(ir.Type):
    """An LLVM type that llvmlite has no class for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _to_string(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


BFLOAT, HALF = _Named("bfloat"), _Named("half")
# bfloat16 lies in memory as integers: only its truncation is an LLVM operation.
STORED = {"f32": F32, "bf16": I16, "f16": HALF}
SUFFIX = {"f32": "v16f32", "bf16": "v16i16", "f16": "v16f16"}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def constant(vector: ir.VectorType, value: Any) -> ir.Constant:
    """Sixteen times one value."""
    return ir.Constant(vector, [value] * LANES)


def bfloat_to_float(builder: Any, raw: Any) -> Any:
    """Widen bfloat16 bits, exactly."""
    wide = builder.zext(raw, VI)
    return builder.bitcast(builder.shl(wide, constant(VI, 16)), V)


def widen(builder: Any, raw: Any, tag: str) -> Any:
    """Widen what was read from memory."""
    if tag == "f32":
        return raw
    return bfloat_to_float(builder, raw) if tag == "bf16" else builder.fpext(raw, V)


def native_bfloat() -> bool:
    """Say whether this processor rounds sixteen float32 to bfloat16 in one instruction.

    Elsewhere LLVM would call a library function per element that few processes contain.
    """
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


def narrow(builder: Any, value: Any, tag: str) -> Any:
    """Round sixteen float32 to what is written to memory, ties to even."""
    if tag == "f32":
        return value
    if tag == "f16":
        return builder.fptrunc(value, ir.VectorType(HALF, LANES))
    if native_bfloat():
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(BFLOAT, LANES)), ir.VectorType(I16, LANES))
    return _bfloat_by_integers(builder, value)


def _bfloat_by_integers(builder: Any, value: Any) -> Any:
    """Nearest even on the bits, with the instruction's own ways: subnormals become zeros, NaN stay NaN."""
    bits = builder.bitcast(value, VI)
    tie = builder.and_(builder.lshr(bits, constant(VI, 16)), constant(VI, 1))
    nearest = builder.add(builder.add(bits, constant(VI, 0x7FFF)), tie)
    quiet = builder.or_(bits, constant(VI, 0x400000))
    nearest = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
    exponent = builder.and_(bits, constant(VI, 0x7F800000))
    zero = builder.and_(bits, constant(VI, -(1 << 31)))
    kept = builder.select(builder.icmp_unsigned("==", exponent, constant(VI, 0)), zero, nearest)
    return builder.trunc(builder.lshr(kept, constant(VI, 16)), ir.VectorType(I16, LANES))
