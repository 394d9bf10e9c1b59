"""The CPU's kernels and the GPU's: in half precision y and dx lie a rounding apart at most, float32 within both bounds.

Each machine computes in float32 and rounds once. Two float32 values within a bound B of the truth lie 2B apart, and
rounding them to half precision sets them at most one step of that dtype further apart. Few elements differ at all,
those where the two lie on either side of a tie.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import BACKEND, DEVICE
from normkit.testing.ulp import ulp
from rows import FLOATS, gradient_bounds, plain_norm, quick, randn, true_norm

pytestmark = pytest.mark.skipif(BACKEND != "gpu", reason="needs the GPU kernels: on a GPU or with TRITON_INTERPRET=1")
SPECS = {"rms": nk.TORCH_RMS_NORM, "layer": nk.TORCH_LAYER_NORM, "gemma": nk.GEMMA}
EPS = 1e-5


def on(backend: str, spec: nk.NormSpec, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return y and all gradients, computed by a machine's kernels, in the CPU's memory."""
    device = "cpu" if backend == "cpu" else DEVICE
    with nk.use(backend):
        fresh = [t.detach().to(device).requires_grad_() for t in leaves]
        y = nk.normalize(fresh[0], spec, *fresh[1:], eps=EPS)
        return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, fresh, dy.to(device)))]


def close(one: Tensor, other: Tensor, bound: Tensor, what: str) -> None:
    """Fail where two results are further apart than two bounds and, in half precision, a step."""
    assert one.dtype == other.dtype
    step = torch.zeros(())
    if one.dtype != torch.float32:
        step = ulp(torch.maximum(one.double().abs(), other.double().abs()), one.dtype)
    excess = (one.double() - other.double()).abs() - 2 * bound - step
    assert bool((excess <= 0).all()), f"{what}: {float(excess.max()):.3g} too far apart"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", quick([64, 127, 768, 4097], lambda n: n == 127))
@pytest.mark.parametrize("name", SPECS)
def test_both_machines_agree(name: str, n: int, dtype: torch.dtype):
    spec, rows = SPECS[name], 33
    x, w, dy = (randn(*s, seed=i, dtype=dtype).cpu() for i, s in enumerate([(rows, n), (n,), (rows, n)]))
    leaves = [x, w] + ([randn(n, seed=7, dtype=dtype).cpu()] if spec.centered else [])
    gain = w.double() + (1 if spec.weight == "one_plus" else 0)
    b = leaves[2].double() if spec.centered else 0.0
    wide = [x.double().requires_grad_(), gain.clone().requires_grad_()]
    exact = torch.autograd.grad(plain_norm(*wide, centered=spec.centered, eps=EPS), wide, dy.double())
    single = [torch.float32] * 3
    bounds = [true_norm(x, gain, b, eps=EPS, centered=spec.centered, out=torch.float32).bound]
    bounds += gradient_bounds(x, gain, dy, (*exact, exact[1]), spec.centered, single, eps=EPS)
    one, other = on("cpu", spec, leaves, dy), on("gpu", spec, leaves, dy)
    for what, a, c, bound in zip(("y", "dx", "dw", "db"), one, other, bounds, strict=False):
        close(a, c, bound, what)
        if dtype != torch.float32:
            assert (a != c).double().mean() < 0.02, f"{what}: more elements differ than lie beside a tie"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_machines_agree_on_a_residual_add(dtype: torch.dtype):
    n = 768
    x, r, w = (randn(*s, seed=i, dtype=dtype).cpu() for i, s in enumerate([(33, n), (33, n), (n,)]))
    found: list[tuple[Tensor, ...]] = []
    for backend, device in (("cpu", "cpu"), ("gpu", DEVICE)):
        with nk.use(backend):
            found.append(tuple(t.cpu() for t in nk.add_rms_norm(x.to(device), r.to(device), w.to(device), eps=EPS)))
    (y, s), (y_, s_) = found
    assert torch.equal(s, s_)
    close(y, y_, true_norm(s, w, eps=EPS, centered=False, out=torch.float32).bound, "y")


def test_a_rounding_more_would_show():
    x, w, dy = (randn(*s, seed=i, dtype=torch.bfloat16).cpu() for i, s in enumerate([(33, 768), (768,), (33, 768)]))
    twice, once = on("gpu", nk.LLAMA, [x, w], dy)[0], on("cpu", nk.TORCH_RMS_NORM, [x, w], dy)[0]
    bound = true_norm(x, w, eps=EPS, centered=False, out=torch.float32).bound
    close(once, once, bound, "y")
    assert (once != twice).double().mean() > 0.02
    with pytest.raises(AssertionError, match="too far apart"):
        close(once.roll(1, 1), twice, bound, "y")
