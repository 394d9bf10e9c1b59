"""The last vector of a row: the elements asked for and not a byte beyond, with masked moves and without them."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from normkit.kernels.cpu import objects, rows, simd
from normkit.kernels.cpu.compile import compile_kernel
from normkit.kernels.cpu.simd import load_some, store, store_some, word
from normkit.kernels.cpu.tags import Tag
from rows import FLOATS, randn

PAGE = mmap.PAGESIZE


class Fenced:
    """A page that ends where memory that may not be touched begins: reading beyond it ends the process."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 2 * PAGE)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(self.bytes.data_ptr() + PAGE), ctypes.c_size_t(PAGE)
        assert libc.mprotect(address, length, 0) == 0  # PROT_NONE

    def last(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.bytes[: PAGE].view(dtype)[PAGE // dtype.itemsize - count :]


def copier(tag: Tag) -> Callable[[int, int, int, int], None]:
    """Return copy(from, to, count), compiled as the kernels are."""

    def kernel(q):  # type: ignore[no-untyped-def]
        value = load_some(word(q, 0), word(q, 2), tag)
        store_some(word(q, 1), value, word(q, 2), tag)
        store(word(q, 3), value, tag)

    address = objects._load(compile_kernel(kernel), f"copy {tag.name} {simd.masked_moves(tag.name)} {id(kernel)}")
    run: Any = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)

    def copy(source: int, target: int, count: int, whole: int) -> None:
        run(struct.pack("4q", source, target, count, whole))

    return copy


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_the_elements_asked_for_are_moved(dtype: torch.dtype, masks: bool, monkeypatch: pytest.MonkeyPatch):
    if not masks:
        monkeypatch.setattr(simd, "masked_moves", lambda tag: False)
    copy = copier(Tag(rows.NAMES[dtype]))
    source, target = Fenced(), Fenced()
    for count in range(16):
        x, y = source.last(count, dtype), target.last(count, dtype)
        values, around = randn(count, seed=count, dtype=dtype), torch.full((64,), 7, dtype=torch.uint8)
        x.copy_(values)
        before = target.bytes[PAGE - count * dtype.itemsize - 64 : PAGE - count * dtype.itemsize]
        before.copy_(around)
        open_end, whole = torch.full((16,), 3, dtype=dtype), torch.full((16,), 3, dtype=dtype)
        copy(x.data_ptr(), y.data_ptr(), count, whole.data_ptr())
        assert torch.equal(y, values)
        assert torch.equal(before, around)
        assert torch.equal(whole[:count], values)
        assert not whole[count:].any()
        copy(x.data_ptr(), open_end.data_ptr(), count, whole.data_ptr())
        assert torch.equal(open_end[:count], values)
        assert bool((open_end[count:] == 3).all())
