"""Entering a kernel from Python in a tenth of a microsecond: a C function for the interpreter, made of twenty lines.

Packing a full block and handing it over through ctypes takes 2 µs more than this, as much as the rest of a call at
1 × 4096 (`python benchmarks/launch.py`). A trampoline is called with the kernel's address and the words themselves,
lays them out on its stack and jumps. It holds the interpreter's lock meanwhile: it is for calls of some microseconds.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from normkit.kernels.cpu.objects import link

Call = Callable[..., None]
_FASTCALL = 0x80  # METH_FASTCALL: (self, address of the arguments, their number)


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef, stable since 3.7."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_keep: list[_MethodDef] = []  # the interpreter refers to the definition as long as the function lives


@lru_cache
def trampoline(words: str) -> Call:
    """Return a function of (address, word, word, …) that enters a kernel with a block of these words.

    Args:
        words: one letter a word, as in `struct`: ``q`` for an int, ``d`` for a float. The caller answers for the types
            of what it passes; only the number is checked.
    """
    address = link(f"trampoline {words}", _code(words), _ENTRY)
    try:
        make = ctypes.pythonapi.PyCFunction_NewEx
    except AttributeError:  # another interpreter than CPython
        return _through_ctypes(words)
    definition = _MethodDef(b"normkit_kernel", address, _FASTCALL, None)
    _keep.append(definition)
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p), ctypes.py_object
    function: Any = make(ctypes.addressof(definition), None, None)
    return function  # type: ignore[no-any-return]


def _through_ctypes(words: str) -> Call:
    pack, entry = struct.Struct(words).pack, ctypes.CFUNCTYPE(None, ctypes.c_char_p)

    def call(address: int, *values: Any) -> None:
        entry(address)(pack(*values))

    return call


_ENTRY = "normkit_trampoline"


def _code(words: str) -> str:
    read = {"q": ("i64", "PyLong_AsLongLong"), "d": ("double", "PyFloat_AsDouble")}
    lines = [
        "declare i64 @PyLong_AsLongLong(ptr)",
        "declare double @PyFloat_AsDouble(ptr)",
        "declare void @Py_IncRef(ptr)",
        f"define ptr @{_ENTRY}(ptr %none, ptr %values, i64 %count) {{",
        f"  %block = alloca [{len(words)} x i64]",
        f"  %right = icmp eq i64 %count, {len(words) + 1}",
        "  br i1 %right, label %enter, label %refuse",
        "refuse:",
        "  ret ptr null",
        "enter:",
        "  %first = load ptr, ptr %values",
        "  %address = call i64 @PyLong_AsLongLong(ptr %first)",
    ]
    for i, letter in enumerate(words):
        kind, function = read[letter]
        lines += [
            f"  %from{i} = getelementptr ptr, ptr %values, i64 {i + 1}",
            f"  %object{i} = load ptr, ptr %from{i}",
            f"  %word{i} = call {kind} @{function}(ptr %object{i})",
            f"  %to{i} = getelementptr i64, ptr %block, i64 {i}",
            f"  store {kind} %word{i}, ptr %to{i}",
        ]
    lines += [
        "  %kernel = inttoptr i64 %address to ptr",
        "  %at = ptrtoint ptr %block to i64",
        "  call void %kernel(i64 %at)",
        "  call void @Py_IncRef(ptr %none)",
        "  ret ptr %none",
        "}",
    ]
    return "\n".join(lines)
