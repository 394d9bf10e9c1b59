"""Probe rows add up without rounding in any order, and leave no trace."""

from __future__ import annotations

import pytest
import torch

from normkit.surgery.probes import LARGEST, deviations, four_squares, lay_out, row_count, rows, scaled
from rows import randn

WIDTHS = (1, 2, 3, 5, 7, 8, 9, 13, 64, 65, 768, 1000, 4096)


@pytest.mark.parametrize("total", range(4 * LARGEST**2 + 1))
def test_four_squares_add_up(total: int) -> None:
    found = four_squares(total)
    if found is None:  # Lagrange's theorem has no upper limit on its numbers, LARGEST is one
        squares = [n * n for n in range(LARGEST + 1)]
        pairs = {a + b for a in squares for b in squares}
        assert not any(total - p in pairs for p in pairs)
    else:
        assert sum(n * n for n in found) == total
        assert max(found) <= LARGEST


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_means_are_exact(width: int) -> None:
    made = rows(8, width, seed=3)
    assert int(made.abs().max()) <= LARGEST + 3
    for row, mean in zip(made, (0, 1, -2, 3, 0, 1, -2, 3), strict=True):
        assert float(row.sum()) == mean * width
        if width >= 8:
            square = float((row - mean).square().mean())
            assert square == round(square)
            assert round(square**0.5) ** 2 != square  # a perfect square would hide how its root is rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_float32_adds_them_in_any_order(width: int, dtype: torch.dtype) -> None:
    made = scaled(rows(4, width, seed=1), [0, -9, 3, -4])
    assert torch.equal(made.to(dtype).double(), made)
    x = made.to(dtype).float()
    for power in (1, 2):
        term = x**power
        exact = (made**power).sum(-1)
        for seed in range(3):
            order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
            one = torch.zeros(4)
            for i in order[:300].tolist():  # one accumulator
                one += term[:, i]
            assert torch.equal(one.double(), (made[:, order[:300]] ** power).sum(-1))
            assert torch.equal(term[:, order].view(4, -1, 8).sum(1).sum(-1).double(), exact)  # eight lanes


def test_random_rows_do_not_add_up_exactly() -> None:
    x = randn(1024).square()
    orders = [torch.randperm(1024, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    assert len({float(x[order].view(-1, 8).sum(0).sum()) for order in orders}) > 1


def test_lay_out_puts_rows_along_the_axes() -> None:
    shape, axes = (2, 6, 3, 4), (1, 3)
    count, width = row_count(shape, axes)
    made = rows(count, width)
    x = lay_out(made, shape, axes)
    assert x.shape == shape
    assert torch.equal(x.permute(0, 2, 1, 3).reshape(count, width), made)


def test_drawing_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    deviations(64, 5)
    rows(4, 33)
    assert torch.equal(torch.get_rng_state(), before)
