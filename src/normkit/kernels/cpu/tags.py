"""Compile-time values: a tag is passed like an argument, costs nothing at run time, and picks the code generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import extending
from numba.core import types
from numba.core.imputils import lower_constant
from numba.extending import models, register_model, typeof_impl

from normkit.kernels.cpu.storage import BYTES


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator, with a type: what it returns is called with other arguments than it is written with."""
    return extending.intrinsic(function)


class Tag:
    """A named constant for kernels, e.g. a storage type or a switch. Two tags of one name are one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[type[Tag], tuple[str]]:
        return Tag, (self.name,)

    def __repr__(self) -> str:
        return f"Tag({self.name})"


class TagType(types.Type):
    """Numba's type of a `Tag`: one type a name, so that code is generated per name."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        super().__init__(name=f"Tag({tag})")


register_model(TagType)(models.OpaqueModel)


@typeof_impl.register(Tag)
def _typeof(value: Tag, context: Any) -> TagType:
    return TagType(value.name)


@lower_constant(TagType)
def _constant(context: Any, builder: Any, kind: TagType, value: Tag) -> Any:
    return context.get_dummy_value()


@intrinsic
def on(typing: Any, tag: Any) -> Any:
    """True at compile time for the tag ``yes``: LLVM deletes the other branch."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(tag.tag == "yes"))

    return types.boolean(tag), generate


@intrinsic
def size(typing: Any, tag: Any) -> Any:
    """Bytes of one element of a storage tag, a compile-time constant."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), BYTES[tag.tag])

    return types.intp(tag), generate
