"""A row's bits in y and dx depend on that row alone: not on how many there are, on its place, on where they lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import BACKEND, LONG
from rows import compiled, randn

KINDS = {"layer": nk.TORCH_LAYER_NORM, "rms": nk.TORCH_RMS_NORM}
WIDTH = 200  # no power of two: the tail counts
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def on_the_kernels() -> Iterator[None]:
    with nk.use(BACKEND, batch_invariant=True):
        yield


def both(x: Tensor, dy: Tensor, spec: nk.NormSpec) -> tuple[Tensor, Tensor]:
    """Return y and dx, with the gradients of weight and bias taken on the way."""
    n = x.shape[-1]
    leaves = [x.detach().requires_grad_(), *(randn(n, seed=s, dtype=x.dtype).requires_grad_() for s in (1, 2))]
    y = nk.normalize(leaves[0], spec, *leaves[1:], eps=1e-6)
    return y.detach(), torch.autograd.grad(y, leaves, dy)[0]


@pytest.mark.parametrize(
    ("count", "n"), [(2, WIDTH), (7, WIDTH), pytest.param(255, WIDTH, marks=LONG), pytest.param(3, 33000, marks=LONG)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_any_position(kind: str, dtype: torch.dtype, count: int, n: int):
    alone = 1e-3 * randn(1, n, seed=3, dtype=dtype)  # ε counts
    upstream = randn(1, n, seed=4, dtype=dtype)
    y, dx = both(alone, upstream, KINDS[kind])
    for position in {0, count // 2, count - 1} if n == WIDTH else {1}:
        x, dy = 1e3 * randn(count, n, seed=5, dtype=dtype), randn(count, n, seed=6, dtype=dtype)
        x[position], dy[position] = alone[0], upstream[0]
        x[(position + 1) % count] *= 1e25  # a neighbour that has to be rescaled
        many = both(x, dy, KINDS[kind])
        assert torch.equal(many[0][position], y[0])
        assert torch.equal(many[1][position], dx[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_alignment(kind: str, dtype: torch.dtype):
    row, upstream = randn(1, WIDTH, dtype=dtype), randn(1, WIDTH, seed=1, dtype=dtype)
    expected = both(row, upstream, KINDS[kind])
    for offset in (1, 3, 8, 17):
        memory = torch.full((2, WIDTH + 33), torch.nan, dtype=dtype)
        memory[0, offset : offset + WIDTH], memory[1, offset + 2 : offset + 2 + WIDTH] = row[0], upstream[0]
        got = both(memory[:1, offset : offset + WIDTH], memory[1:, offset + 2 : offset + 2 + WIDTH], KINDS[kind])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", compiled(DTYPES, lambda dtype: False))
@pytest.mark.parametrize("kind", KINDS)
def test_contiguous_or_strided(kind: str, dtype: torch.dtype):
    x, dy = randn(5, WIDTH, dtype=dtype), randn(5, WIDTH, seed=1, dtype=dtype)
    expected = both(x, dy, KINDS[kind])

    def turned(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    def apart(t: Tensor) -> Tensor:
        wide = torch.full((5, 2 * WIDTH), torch.nan, dtype=dtype)
        wide[:, ::2] = t
        return wide[:, ::2]

    for a, b in ((turned, apart), (apart, turned), (turned, turned)):
        got = both(a(x), b(dy), KINDS[kind])
        assert all(torch.equal(c, d) for c, d in zip(got, expected, strict=True))
        assert torch.equal(both(a(x)[3:4], b(dy)[3:4], KINDS[kind])[1][0], expected[1][3])
