"""More elements than a 32-bit index counts: rows beyond the 2³¹st element, and a row that is longer than that."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import depth, plain_norm, randn, row_depth, unit

pytestmark = pytest.mark.slow
BF = torch.bfloat16
GIB = 2**30
WIDTH, PERIOD = 4000, 64
ROWS = 2**31 // WIDTH // PERIOD * PERIOD + PERIOD  # the rows repeat with this period


@pytest.fixture(autouse=True)
def room() -> None:
    """Skip where three tensors of 4 GiB and a margin do not fit."""
    needed, source = 14 * GIB, Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", source.read_text()) if source.exists() else None
    if found is None or int(found.group(1)) * 1024 < needed:
        pytest.skip(f"needs {needed // GIB} GiB of free memory")


def pieces() -> list[slice]:
    """Return the first rows, the last ones, and those about each power of two of elements and bytes."""
    edges = [2**31 // WIDTH, 2**30 // WIDTH, 2**29 // WIDTH]
    return [slice(0, PERIOD), slice(ROWS - PERIOD, ROWS), *(slice(e - 8, e + 8) for e in edges)]


@pytest.mark.parametrize("norm", [nk.rms_norm, nk.layer_norm])
def test_rows_beyond_the_last_32_bit_index(norm: Callable[..., Tensor]):
    centered, repeats = norm is nk.layer_norm, ROWS // PERIOD
    block, w = randn(PERIOD, WIDTH, dtype=BF).requires_grad_(), randn(WIDTH, seed=1, dtype=BF).requires_grad_()
    dy = randn(PERIOD, WIDTH, seed=2, dtype=BF)
    x = block.detach().repeat(repeats, 1).requires_grad_()
    assert x.numel() > 2**31
    with nk.use("cpu"):
        y, expected = norm(x, w), norm(block, w)
        (small,) = torch.autograd.grad(expected, block, dy)
        dx, dw = torch.autograd.grad(y.view(repeats, PERIOD, WIDTH), (x, w), dy.expand(repeats, PERIOD, WIDTH))
    rows = torch.arange(ROWS) % PERIOD
    for piece in pieces():
        assert torch.equal(y[piece], expected[rows[piece]])
        assert torch.equal(dx[piece], small[rows[piece]])
    wide = [t.detach().double().requires_grad_() for t in (block, w)]
    unweighted = plain_norm(*wide[:1], centered=centered, eps=1e-5 if centered else 1e-6)
    size = repeats * (dy.double().abs() * (1 + unweighted.detach().abs())).sum(0)
    exact = repeats * (dy.double() * unweighted.detach()).sum(0)
    error = (row_depth(ROWS) + depth(WIDTH) + 20) * unit(torch.float32) * size  # as rows.gradient_bounds has it
    assert bool(((dw.double() - exact).abs() <= error + unit(BF) * (exact.abs() + error)).all())


def test_a_row_longer_than_32_bits_count():
    """Mean square 25 by two halves of one size each: who counts or adds wrong misses the only two right values."""
    half = 2**30
    x = torch.ones(2 * half + 17, dtype=BF)
    x[half : 2 * half] = 7
    x[2 * half :] = 5
    with nk.use("cpu"):
        y = nk.rms_norm(x, eps=0.0)
    for part, value in ((y[:half], 0.2), (y[half : 2 * half], 1.4), (y[2 * half :], 1.0)):
        assert bool((part == torch.tensor(value, dtype=BF)).all())
