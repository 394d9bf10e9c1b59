"""Entering a kernel through the interpreter's own call is entering it."""

from __future__ import annotations

import sys

import pytest
import torch

import normkit as nk
from normkit.kernels.cpu import rows, trampoline
from normkit.kernels.cpu.rows import Kinds, forward_code
from rows import randn

WORDS = "qqdddqqqqqqq"


def enter(call: trampoline.Call, x: torch.Tensor, y: torch.Tensor) -> None:
    code = forward_code(nk.TORCH_RMS_NORM, Kinds(x.dtype, None, None, x.dtype))
    call(code.short, *x.shape, 1e-6, 1.0, 1.0, 0, x.data_ptr(), 0, 0, y.data_ptr(), 0, 0)


@pytest.mark.parametrize("call", [trampoline.trampoline(WORDS), trampoline._through_ctypes(WORDS)])
def test_both_ways_in_lead_to_the_kernel(call: trampoline.Call):
    x = randn(3, 37)
    y = torch.full_like(x, float("nan"))
    enter(call, x, y)
    assert torch.equal(y, nk.rms_norm(x, axis=(-1,)))


def test_a_wrong_number_of_words_enters_nothing():
    with pytest.raises(SystemError):
        trampoline.trampoline(WORDS)(0, 1, 2)


def test_none_is_returned_and_its_count_kept():
    x, y, call = randn(1, 16), torch.empty(1, 16), trampoline.trampoline(WORDS)
    before = sys.getrefcount(None)
    for _ in range(10_000):
        enter(call, x, y)
    assert call(rows.forward_code(nk.TORCH_RMS_NORM, Kinds(x.dtype, None, None, x.dtype)).short, 0, *[0] * 11) is None
    assert abs(sys.getrefcount(None) - before) < 1000
