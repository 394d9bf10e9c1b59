"""What the kernels compile to on this processor: its widest vectors, fused multiply-add, no loop over elements."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

import normkit as nk
from kernels.cpu import assembly
from normkit.kernels.cpu import rows, simd
from normkit.kernels.cpu.compile import assembly_of
from normkit.kernels.cpu.simd import load, move, splat, store, sum_lanes, word
from normkit.kernels.cpu.sums import jit
from normkit.kernels.cpu.tags import Tag

F32, BF16 = torch.float32, torch.bfloat16
SPECS = {"rms": nk.TORCH_RMS_NORM, "layer": nk.TORCH_LAYER_NORM, "add": nk.TORCH_RMS_NORM}
KERNELS = [f"{name} {side}" for name in SPECS for side in ("forward", "backward")]


def register() -> str:
    """Return how this processor's widest vector of float32 is written."""
    if platform.machine() in ("aarch64", "arm64"):
        return ".4s"
    features = llvm.get_host_cpu_features()
    return "%zmm" if features.get("avx512f", False) else "%ymm" if features.get("avx2", False) else "%xmm"


class Found(Exception):
    """Carries a kernel's source out of the lookup of its machine code."""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, torch.dtype], Any]:
    """Return what gives the Python function behind a kernel with weight, as a training step uses it."""

    def carry(name: str, make: Callable[[], Any]) -> int:
        raise Found(make())

    monkeypatch.setattr(rows, "addresses_of", carry)
    monkeypatch.setattr(rows, "_codes", {})

    def get(kernel: str, dtype: torch.dtype) -> Any:
        name, side = kernel.split()
        spec, residual = SPECS[name], dtype if name == "add" else None
        kinds = rows.Kinds(dtype, dtype, None, dtype, dtype, residual if side == "forward" else None)
        try:
            if side == "forward":
                rows.forward_code(spec, kinds)
            else:
                rows.backward_code(spec, kinds, dtype, dtype, residual, (True, True, True))
        except Found as found:
            return found.args[0]
        raise AssertionError("machine code was found before it was looked up")

    return get


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, BF16) for kernel in KERNELS[:2]),
        # The same parts in another order, or with four-byte loads and stores.
        *(pytest.param(kernel, F32, marks=pytest.mark.slow) for kernel in KERNELS),
        *(pytest.param(kernel, BF16, marks=pytest.mark.slow) for kernel in KERNELS[2:]),
    ],
)
def test_hot_loops_use_full_vectors_alone(kernel: str, dtype: torch.dtype, source: Callable[..., Any]):
    text = assembly_of(source(kernel, dtype))
    assert assembly.faults(text, register()) == []
    loops = assembly.hot_loops(text)
    # Statistics, peak of an extreme row (forward) and the result; sums and the result (backward).
    assert len(loops) >= (3 if kernel.endswith("forward") else 2)
    fused = [assembly.operations(loop, assembly.FUSED) for loop in loops]
    assert any(fused)
    assert all(register() in line for lines in fused for line in lines)
    if register() == "%zmm":
        for move_by_mask in (
            r"vmov(ups|dqu16)\s+\S*\(.*\{%k\d\} \{z\}",
            r"vmov(ups|dqu16)\s+%[yz]mm\d+, \S*\(.*\{%k\d\}$",
        ):
            assert re.search(move_by_mask, text, re.MULTILINE), "the last vector of a row is taken apart"


F = Tag("f32")


def copied(q):  # type: ignore[no-untyped-def]
    x, y, n, total = word(q, 0), word(q, 1), word(q, 2), splat(np.float32(0))
    j = 0
    while j < n // 16 * 16:
        v = load(x + j * 4, F)
        total = simd.fma(v, v, total)
        store(y + j * 4, simd.mul(v, v), F)
        j += 16
    simd.put_f32(y, sum_lanes(total))


def scalar_tail(q):  # type: ignore[no-untyped-def]
    copied_inline(q)
    x, y, n = word(q, 0), word(q, 1), word(q, 2)
    j = n // 16 * 16
    total = np.float32(0)
    while j < n:
        total += simd.f32_at(x + j * 4) * simd.f32_at(x + j * 4)
        j += 1
    simd.put_f32(y, total)


def scalar_copy(q):  # type: ignore[no-untyped-def]
    copied_inline(q)
    step = word(q, 3)
    for j in range(word(q, 2)):
        move(word(q, 1) + j * 4, word(q, 0) + j * step, F)


def narrow(q):  # type: ignore[no-untyped-def]
    copied_inline(q)
    x, y, n, j = word(q, 0), word(q, 1), word(q, 2), 0
    while j < n:  # adjacent elements without an order to keep: the compiler may take vectors, narrow ones
        for k in range(4):
            simd.put_f32(y + (j + k) * 4, simd.f32_at(y + (j + k) * 4) * simd.f32_at(x + j * 4))
        j += 4


copied_inline = jit(copied)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [(copied, None), (scalar_tail, "single numbers"), (scalar_copy, "single elements"), (narrow, "")],
)
def test_the_reader_sees_what_must_not_be(kernel: Callable[[Any], None], fault: str | None):
    found = assembly.faults(assembly_of(kernel), register())
    assert not found if fault is None else any(fault in line for line in found), found


def test_the_reader_sees_a_call_and_a_mask_taken_apart():
    text = assembly_of(copied)
    loop = next(line for line in text.splitlines() if assembly.FUSED.match(line.strip()))
    for inserted, fault in (("\tcallq expf@PLT\n", "calls"), ("\tvpinsrw $1, %eax, %xmm1, %xmm1\n", "lane by lane")):
        assert any(fault in line for line in assembly.faults(text.replace(loop, inserted + loop, 1), register()))
