"""The gates on sixteen lanes against float64, over all of float32's range."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from normkit.kernels.cpu.objects import addresses_of

# The maxima over every float32 between 2^-27 and 110 of both signs are 3.345, 2.402, 0.987 and 4.667, 5.533.
ULPS = {"silu": 3.35, "sigmoid": 2.41, "exp": 0.99}
SLOPE_UNITS = {"silu": 4.7, "sigmoid": 5.6}  # of 2^-24 times the size of what a′ adds up
STEP = 9973


def kernel(what: str, activation: str) -> Callable[[Tensor], Tensor]:
    """Compile one function of exponential.py over an array whose length is a multiple of 16."""

    def make() -> Callable[[Any], None]:
        from normkit.kernels.cpu.exponential import activated, lifted_exp, magnitude, slope
        from normkit.kernels.cpu.simd import load, store, word
        from normkit.kernels.cpu.sums import jit
        from normkit.kernels.cpu.tags import Tag

        class Tags(NamedTuple):
            silu: Tag

        @jit
        def exp(g: Any, t: Any) -> Any:
            return lifted_exp(magnitude(g))

        function = {"activated": activated, "slope": slope, "exp": exp}[what]
        tags, f32 = Tags(Tag("yes" if activation == "silu" else "no")), Tag("f32")

        def run(q):  # type: ignore[no-untyped-def]
            source, target, n = word(q, 0), word(q, 1), word(q, 2)
            for j in range(0, n, 16):
                store(target + 4 * j, function(load(source + 4 * j, f32), tags), f32)

        return run

    call = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(addresses_of(f"test {what} {activation}", make)[0])

    def on_array(x: Tensor) -> Tensor:
        y = torch.full_like(x, torch.nan)
        call(struct.pack("3q", x.data_ptr(), y.data_ptr(), x.numel()))
        return y

    return on_array


def sweep(step: int) -> Tensor:
    """Return every ``step``-th finite float32 of both signs."""
    bits = torch.arange(0, 0x7F800000, step, dtype=torch.int32)
    positive = bits[: bits.numel() // 16 * 16].view(torch.float32)
    return torch.cat([positive, -positive])


def ulp(t: Tensor) -> Tensor:
    """Return the distance between float32 numbers at ``t``."""
    _, exponent = torch.frexp(t.abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(t), exponent - 24)


def parts(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return g, its sigmoid and that of −g in float64."""
    wide = g.double()
    e = torch.exp(-wide.abs())
    large, small = 1 / (1 + e), e / (1 + e)
    return wide, torch.where(wide > 0, large, small), torch.where(wide > 0, small, large)


def hold(x: Tensor, activation: str) -> None:
    g, s, rest = parts(x)
    true = g * s if activation == "silu" else s
    got = kernel("activated", activation)(x).double()
    assert ((got - true).abs() / ulp(true)).max() <= ULPS[activation]
    slope, size = (s * rest, s * rest) if activation == "sigmoid" else (s * (1 + g * rest), s * (1 + g.abs() * rest))
    error = (kernel("slope", activation)(x).double() - slope).abs()
    assert (error / (size * 2.0**-24 + 2.0**-149)).max() <= SLOPE_UNITS[activation]


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_within_the_stated_ulp_over_the_whole_range(activation: str):
    hold(sweep(STEP), activation)


def test_the_exponential_itself():
    x = sweep(STEP)
    x = x[x.abs() <= 109]
    x = x[: x.numel() // 16 * 16]
    true = torch.exp(-x.double().abs()) * 2.0**40
    assert ((kernel("exp", "none")(x).double() - true).abs() / ulp(true)).max() <= ULPS["exp"]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_within_the_stated_ulp_at_a_fine_step(activation: str):
    x = sweep(61)
    for part in x.split(1 << 22):
        hold(part, activation)


def test_the_ends_of_the_range():
    inf, nan = torch.inf, torch.nan
    x = torch.tensor(
        [0.0, -0.0, inf, -inf, nan, -1e4, 1e4, -3.4e38, 3.4e38, -108.0, -109.0, -110.0, 1e-45, -1e-45, 1, 2]
    )
    got = kernel("activated", "silu")(x)
    known = torch.tensor([0.0, -0.0, inf, nan, nan, -0.0, 1e4, -0.0, 3.4e38])
    torch.testing.assert_close(got[:9], known, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got[:9], silu(x)[:9], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[:9] & ~got[:9].isnan(), known.signbit() & ~known.isnan())
    assert -(2.0**-148) <= got[9] < 0
    assert (got[11], got[12]) == (0, 0)  # half of the smallest number goes to even
    got = kernel("activated", "sigmoid")(x)
    torch.testing.assert_close(got[:9], torch.tensor([0.5, 0.5, 1, 0, nan, 0, 1, 0, 1]), rtol=0, atol=0, equal_nan=True)
    # s·(1 + g·(1 − s)) is 0·inf at both ends, in PyTorch's own backward, too.
    leaf = x.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(silu(leaf).sum(), leaf)
    torch.testing.assert_close(kernel("slope", "silu")(x)[:9], theirs[:9], rtol=0, atol=1e-7, equal_nan=True)
