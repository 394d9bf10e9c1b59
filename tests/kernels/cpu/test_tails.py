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
from normkit.kernels.cpu.tags import Tag, size
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
        return self.bytes[:PAGE].view(dtype)[PAGE // dtype.itemsize - count :]


def copier(tag: Tag) -> Callable[[int, int, int, int], None]:
    """Return copy(from, to, count, all sixteen to), compiled as the kernels are."""

    def kernel(q):  # type: ignore[no-untyped-def]
        n, c = word(q, 2), 15
        while c >= n:  # ever shorter, with one end: what a longer one left must not show
            value = load_some(word(q, 0) - (c - n) * size(tag), c, tag)
            store_some(word(q, 1) - (c - n) * size(tag), value, c, tag)
            store(word(q, 3), value, tag)
            c -= 1

    address, _ = objects._load(compile_kernel(kernel), f"copy {tag.name} {simd.masked_moves(tag.name)} {id(kernel)}")
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
    for count in range(1, 16):
        x, y = source.last(count, dtype), target.last(count, dtype)
        values = randn(count, seed=count, dtype=dtype)
        source.last(16, dtype).fill_(9)
        x.copy_(values)
        room, whole = torch.full((32,), 3, dtype=dtype), torch.full((16,), 3, dtype=dtype)
        copy(x.data_ptr(), y.data_ptr(), count, whole.data_ptr())
        assert torch.equal(y, values)
        assert torch.equal(whole[:count], values)
        assert not whole[count:].any()
        copy(x.data_ptr(), room[15 - count :].data_ptr(), count, whole.data_ptr())
        assert torch.equal(room[15 - count : 15], values)
        assert bool((room[15:] == 3).all())
