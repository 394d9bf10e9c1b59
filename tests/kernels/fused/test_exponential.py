"""The gates of the GPU kernels: the CPU's bits over the whole range, and with them the errors that hold there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused import INTERPRETED
from kernels.cpu import test_exponential as on_the_cpu

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs Triton")
BLOCK = 1 << 14


def interpreted(what: str, activation: str, x: Tensor) -> Tensor:
    """Run one function of exponential.py over x."""
    import triton
    import triton.language as tl

    from normkit.kernels.gpu.exponential import activated, lifted_exp, slope

    @triton.jit
    def kernel(x, y, n, WHAT: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * C + tl.arange(0, C)
        g = tl.load(x + at, mask=at < n, other=0.0)
        if WHAT == "exp":
            result = lifted_exp(tl.abs(g))
        elif WHAT == "slope":
            result = slope(g, SILU)
        else:
            result = activated(g, SILU)
        tl.store(y + at, result, mask=at < n)

    names: dict[str, Any] = {"triton": triton, "tl": tl, "activated": activated, "slope": slope}
    kernel.fn.__globals__.update(names | {"lifted_exp": lifted_exp})
    y = torch.full_like(x, torch.nan)
    kernel[(-(-x.numel() // BLOCK),)](x, y, x.numel(), what, activation == "silu", BLOCK)
    return y


@pytest.mark.parametrize(
    ("what", "activation"),
    [("exp", "none"), *((what, a) for what in ("activated", "slope") for a in ("silu", "sigmoid"))],
)
def test_the_bits_are_the_cpus(what: str, activation: str):
    inf, nan = torch.inf, torch.nan
    ends = torch.tensor([0.0, -0.0, inf, -inf, nan, 109.0, -109.0, -108.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 18, 1, 2, 3])
    x = torch.cat([ends, on_the_cpu.sweep(on_the_cpu.STEP)])
    got, expected = interpreted(what, activation, x), on_the_cpu.kernel(what, activation)(x)
    differ = (got != expected) & ~(got.isnan() & expected.isnan())
    assert not differ.any(), f"{int(differ.sum())} of {x.numel()} differ, first at {float(x[differ][0])}"
    assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~expected.isnan()])
