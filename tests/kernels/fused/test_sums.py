"""Sums are the tree that is written down, to the bit; no kernel adds in an order that the compiler chooses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import normkit
from fused import INTERPRETED
from rows import randn

KERNELS = Path(normkit.__file__).parent / "kernels" / "gpu"


def tree(v: Tensor, apart: int) -> Tensor:
    """Add halves of more than ``apart`` columns to each other, then neighbours."""
    while v.shape[1] > 1:
        half = v.shape[1] // 2
        v = v[:, :half] + v[:, half:] if v.shape[1] > apart else v[:, ::2] + v[:, 1::2]
    return v[:, 0]


@pytest.mark.skipif(not INTERPRETED, reason="runs Triton")
@pytest.mark.parametrize(("rows", "columns"), [(4, 16), (1, 1), (2, 1024), (1, 4096), (8, 16384)])
def test_the_order_is_the_written_one(rows: int, columns: int):
    import triton
    import triton.language as tl

    from normkit.kernels.gpu.sums import across, down, whole

    @triton.jit
    def kernel(x, a, d, w, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
        v = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
        tl.store(a + tl.arange(0, R), across(v))
        tl.store(d + tl.arange(0, C), down(v))
        tl.store(w, whole(tl.load(x + tl.arange(0, C))))

    kernel.fn.__globals__.update(triton=triton, tl=tl, across=across, down=down, whole=whole)
    x = randn(rows, columns)
    a, d, w = torch.empty(rows), torch.empty(columns), torch.empty(1)
    kernel[(1,)](x, a, d, w, rows, columns)
    apart = max(1024, columns // 4)
    assert torch.equal(a, tree(x, apart))
    assert torch.equal(w, tree(x[:1], apart))
    v = x
    while v.shape[0] > 1:
        v = v[: v.shape[0] // 2] + v[v.shape[0] // 2 :]
    assert torch.equal(d, v[0])
    if columns == 16384:
        assert not torch.equal(a, tree(x, 1)), "another order would show"


def test_no_kernel_sums_in_the_compilers_order():
    """`tl.sum` of more than two follows the layout, which follows addresses: a row's bits would, too."""
    for path in KERNELS.glob("*.py"):
        found = re.findall(r"tl\.(?:sum|reduce|cumsum|dot)\(", path.read_text())
        assert path.name == "sums.py" or not found, f"{path.name}: use across, down or whole of sums.py"
