"""A row's bits in y and dx depend on that row alone; dw's on the rows in their order, never on who added them."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.kernels.cpu import pool, rows
from rows import randn

KINDS = {"layer": nk.TORCH_LAYER_NORM, "rms": nk.TORCH_RMS_NORM}
WIDTH = 200  # no whole number of 64s, so that the tail counts


@pytest.fixture(autouse=True)
def on_the_kernels() -> Iterator[None]:
    threads = torch.get_num_threads()
    with nk.use("cpu"):
        yield
    torch.set_num_threads(threads)


def both(x: Tensor, dy: Tensor, spec: nk.NormSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = x.shape[-1]
    leaves = [x.detach().requires_grad_(), randn(n, seed=1).requires_grad_(), randn(n, seed=2).requires_grad_()]
    y = nk.normalize(leaves[0], spec, *leaves[1:], eps=1e-6)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


@pytest.mark.parametrize("count", [2, 7, 255, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_any_position(kind: str, count: int):
    alone, upstream = randn(1, WIDTH, seed=3), randn(1, WIDTH, seed=4)
    y, dx, _, _ = both(alone, upstream, KINDS[kind])
    for position in {0, count // 2, count - 1}:
        x, dy = 1e3 * randn(count, WIDTH, seed=5), randn(count, WIDTH, seed=6)
        x[position], dy[position] = alone[0], upstream[0]
        many = both(x, dy, KINDS[kind])
        assert torch.equal(many[0][position], y[0])
        assert torch.equal(many[1][position], dx[0])


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_or_two_and_every_repetition(kind: str, monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []
    run_parallel = pool.run_parallel

    def counting(address: int, block: bytes, threads: int) -> None:
        used.append(threads)
        run_parallel(address, block, threads)

    monkeypatch.setattr(pool, "run_parallel", counting)
    x, dy = randn(2001, WIDTH), randn(2001, WIDTH, seed=1)
    torch.set_num_threads(1)
    expected = both(x, dy, KINDS[kind])
    assert not used
    torch.set_num_threads(2)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(both(x, dy, KINDS[kind]), expected, strict=True))
    assert set(used) <= {2}
    assert bool(used) == (pool._runtime() is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_stores_past_the_cache(kind: str, monkeypatch: pytest.MonkeyPatch):
    n = 208  # rows of whole cache lines
    x, w = randn(700, n), randn(n, seed=1)
    offset = torch.empty(700 * n + 16)
    start = -offset.data_ptr() // 4 % 16
    aligned, shifted = (offset[s : s + 700 * n].view(700, n) for s in (start, start + 1 if start < 15 else start - 1))
    expected = nk.normalize(x, KINDS[kind], w, eps=1e-6)
    for limit in (0, 1 << 40):
        monkeypatch.setattr(rows, "PAST_FROM", limit)
        for out in (aligned, shifted):
            out.fill_(torch.nan)
            assert torch.equal(nk.normalize(x, KINDS[kind], w, eps=1e-6, out=out), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_any_alignment(kind: str, dtype: torch.dtype):
    row = randn(1, WIDTH, dtype=dtype)
    expected = nk.normalize(row, KINDS[kind], eps=1e-6)
    for offset in range(0, 33, 3):
        memory = torch.zeros(WIDTH + 33, dtype=dtype)
        memory[offset : offset + WIDTH] = row
        assert torch.equal(nk.normalize(memory[offset : offset + WIDTH], KINDS[kind], eps=1e-6), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_form_and_the_kept_statistics_change_no_bit(kind: str):
    add = nk.add_layer_norm if kind == "layer" else nk.add_rms_norm
    x, w = randn(9, WIDTH), randn(WIDTH, seed=1)
    y = nk.normalize(x, KINDS[kind], w, eps=1e-6)
    assert torch.equal(add(x, torch.zeros_like(x), w, eps=1e-6)[0], y)
    assert torch.equal(nk.normalize(x.requires_grad_(), KINDS[kind], w, eps=1e-6), y)


OLDER = """
import sys
import llvmlite.binding as llvm
sys.path.insert(0, {tests!r})
from normkit.kernels.cpu import compile, objects, simd, storage

def older():
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu="haswell", features="", opt=3, reloc="pic")

compile.target_machine = objects.target_machine = older
storage.native_bfloat = lambda: False
simd.masked_moves = lambda tag: tag == 'f32'
from kernels.cpu.test_invariance import digest
print(digest())
"""


def digest() -> str:
    """Digest forward and backward bits in every dtype, extreme values included."""
    bits = hashlib.sha256()
    for spec, dtype in ((nk.TORCH_LAYER_NORM, torch.float32), (nk.LLAMA, torch.bfloat16), (nk.GEMMA, torch.float16)):
        x = randn(5, WIDTH)
        x[1:4] *= 1 if dtype == torch.float16 else torch.tensor([[1e-38], [1e4], [1e37]])
        leaves = [x.to(dtype).requires_grad_(), randn(WIDTH, seed=1, dtype=dtype).requires_grad_()]
        with nk.use("cpu"):
            y = nk.normalize(leaves[0], spec, leaves[1], eps=1e-6)
            grads = torch.autograd.grad(y, leaves, randn(5, WIDTH, seed=2, dtype=dtype))
        for t in (y.detach(), *grads):
            bits.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an older x86 processor is what it compiles for")
@pytest.mark.slow
def test_an_older_processor_gives_the_same_bits(tmp_path: Path):
    """Half the vector width, no bfloat16 instruction: the same sums in the same order, and the same roundings.

    It moves chosen lanes of 32 bits only.
    """
    code = OLDER.format(tests=str(Path(__file__).parents[2]))
    env = {**os.environ, "NORMKIT_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest()
