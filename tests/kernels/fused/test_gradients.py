"""The fused rows backward: against float64, for every dtype, weight form and cast order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import BACKEND
from rows import FLOATS, adversarial, compiled, gradient_bounds, plain_norm, quick, randn, row_depth, unit

KINDS = {"layer": nk.TORCH_LAYER_NORM, "rms": nk.TORCH_RMS_NORM}
BF, HF, F = torch.bfloat16, torch.float16, torch.float32


def gradients(spec: nk.NormSpec, leaves: list[Tensor], dy: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    fresh = [t.detach().clone().requires_grad_() for t in leaves]
    return torch.autograd.grad(nk.normalize(fresh[0], spec, *fresh[1:], eps=eps), fresh, dy)


def held_to_float64(spec: nk.NormSpec, leaves: list[Tensor], dy: Tensor, first: torch.dtype | None = None) -> None:
    """Hold dx, dw, db to the plain formula in float64; ``first`` is what x̂ was rounded to before the weight."""
    x, w, _ = leaves
    wide = [t.double().requires_grad_() for t in leaves]
    gain = wide[1] if spec.weight == "plain" else 1 + wide[1]
    if spec.weight == "one_plus_rounded":
        gain = gain + ((1 + w).double() - gain).detach()
    exact = torch.autograd.grad(plain_norm(wide[0], gain, wide[2], centered=spec.centered), wide, dy.double())
    limits = gradient_bounds(x, gain.detach(), dy, exact, spec.centered, [t.dtype for t in leaves])
    if first is not None:  # dw meets the rounded x̂: half a unit of each term
        xhat = plain_norm(x.double(), centered=spec.centered)
        limits[1] = limits[1] + unit(first) * (dy.double() * xhat).abs().sum(0)
    for got, e, limit, leaf, what in zip(gradients(spec, leaves, dy), exact, limits, leaves, "xwb", strict=True):
        assert got.dtype == leaf.dtype
        excess = ((got.double() - e).abs() - limit).max()
        assert excess <= 0, f"d{what}: {float(excess):.3g} over {float(limit.max()):.3g}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", quick([1, 3, 16, 63, 64, 65, 127, 768, 4097], lambda n: n in (1, 65, 768)))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_lie_within_the_bound(kind: str, n: int, dtype: torch.dtype):
    leaves = [randn(*s, seed=i, dtype=dtype) for i, s in enumerate([(70, n), (n,), (n,)])]
    held_to_float64(KINDS[kind], leaves, randn(70, n, seed=9, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_no_gpu_program_holds(kind: str):
    n = 9001
    leaves = [randn(*s, seed=i) for i, s in enumerate([(6, n), (n,), (n,)])]
    held_to_float64(KINDS[kind], leaves, randn(6, n, seed=9))


@pytest.mark.parametrize("rows", [1, 31, 33, 2049, 5000])
def test_many_rows_add_up_in_partials(rows: int):
    leaves = [randn(*s, seed=i) for i, s in enumerate([(rows, 20), (20,), (20,)])]
    held_to_float64(nk.TORCH_RMS_NORM, leaves, randn(rows, 20, seed=9))
    assert row_depth(5000) > row_depth(33)


@pytest.mark.parametrize(
    ("spec", "x_dtype", "w_dtype"),
    [
        (nk.LLAMA, BF, BF),
        pytest.param(nk.LLAMA, HF, F, marks=pytest.mark.slow),
        *compiled([(nk.T5, F, BF), (nk.GEMMA, BF, F)], lambda case: False),
        pytest.param(nk.MUSE_SPARK, F, BF, marks=pytest.mark.slow),
        pytest.param(nk.NEMOTRON, BF, BF, marks=pytest.mark.slow),
        pytest.param(nk.TORCH_LAYER_NORM, HF, BF, marks=pytest.mark.slow),
    ],
    ids=["llama", "llama, mixed", "t5", "gemma", "muse", "nemotron", "layer, mixed"],
)
def test_gradients_of_every_weight_form_and_cast_order(spec: nk.NormSpec, x_dtype: torch.dtype, w_dtype: torch.dtype):
    leaves = [randn(40, 96, dtype=x_dtype), randn(96, seed=1, dtype=w_dtype), randn(96, seed=2)]
    dy = randn(40, 96, seed=9, dtype=nk.normalize(leaves[0], spec, *leaves[1:], eps=1e-5).dtype)
    first = {"last": None, "first": x_dtype, "t5": w_dtype}[spec.cast]
    held_to_float64(spec, leaves, dy, first)


def test_l2_norm():
    x, dy = randn(40, 96), randn(40, 96, seed=1)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    (got,) = torch.autograd.grad(nk.l2_norm(leaf, eps=1e-5), leaf, dy)
    (exact,) = torch.autograd.grad(plain_norm(wide, eps=1e-5 / 96, centered=False) / 96**0.5, wide, dy.double())
    (limit, *_) = gradient_bounds(x, torch.ones(()) / 96**0.5, dy, (exact,), False, [F], eps=1e-5 / 96)
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_rows(kind: str):
    """A large mean may cost the gradients no more than it costs y. (Not the wide range: its x̂ underflows.)"""
    n = 768
    for name, x in adversarial(n).items():
        if name in ("zero", "constant", "subnormal", "wide range"):
            continue
        dy, w = randn(1, n, seed=1), randn(n, seed=2)
        dx, dw = gradients(KINDS[kind], [x, w], dy)
        unit_row = x.double() / x.double().abs().max()
        wide = [unit_row.requires_grad_(), w.double().requires_grad_()]
        eps = 1e-5 / float(x.double().abs().max()) ** 2
        exact = torch.autograd.grad(plain_norm(*wide, centered=kind == "layer", eps=eps), wide, dy.double())
        scaled = dx.double() * float(x.double().abs().max())
        assert (scaled - exact[0]).abs().max() <= 1e-5 * exact[0].abs().max(), name
        assert (dw.double() - exact[1]).abs().max() <= 1e-5 * exact[1].abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_stays_in_its_row_of_dx(kind: str):
    x, w, b, dy = randn(9, 64), randn(64, seed=1), randn(64, seed=2), randn(9, 64, seed=3)
    clean = gradients(KINDS[kind], [x, w, b], dy)[0]
    for value in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[4, 10] = value
        dx = gradients(KINDS[kind], [spoilt, w, b], dy)[0]
        assert dx[4].isnan().any()
        assert torch.equal(dx[:4], clean[:4])
        assert torch.equal(dx[5:], clean[5:])


@pytest.mark.parametrize("shape", [(), (1,), (1, 40), (4, 1, 40), (4, 3, 1)])
def test_parameters_that_broadcast_collect_what_they_touched(shape: tuple[int, ...]):
    x, w, dy = randn(4, 3, 40), randn(*shape, seed=1), randn(4, 3, 40, seed=2)
    one_row = w.numel() in (1, 40)
    with nk.use(BACKEND if one_row else "auto"):  # a gain per head or sample is the reference's to train
        dx, dw = gradients(nk.TORCH_RMS_NORM, [x, w], dy)
    with nk.use("reference"):
        dx_, dw_ = gradients(nk.TORCH_RMS_NORM, [x, w], dy)
    assert dw.shape == w.shape
    torch.testing.assert_close(dx, dx_, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, dw_, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("x_dtype", "r_dtype"), compiled([(F, F), (BF, BF), (BF, F)], lambda pair: pair == (BF, BF)))
@pytest.mark.parametrize("used", ["y", "s", "both"])
def test_residual_add(x_dtype: torch.dtype, r_dtype: torch.dtype, used: str):
    """Both outputs, or either: the gradient of the sum reaches both summands, times their scales."""
    base = [randn(20, 96, dtype=x_dtype), randn(20, 96, seed=1, dtype=r_dtype), randn(96, seed=2, dtype=x_dtype)]
    leaves = [t.requires_grad_() for t in base]
    y, s = nk.add_rms_norm(*leaves, alpha=3.0, branch_scale=0.5, eps=1e-5)
    dy, ds = randn(20, 96, seed=3, dtype=y.dtype), randn(20, 96, seed=4, dtype=s.dtype)
    pairs = {"y": [(y, dy)], "s": [(s, ds)], "both": [(y, dy), (s, ds)]}[used]
    got = torch.autograd.grad([p[0] for p in pairs], leaves, [p[1] for p in pairs], allow_unused=True)
    point, w = s.detach().double().requires_grad_(), leaves[2].detach().double().requires_grad_()
    outputs = {"y": plain_norm(point, w, centered=False), "s": point}
    if used != "both":
        outputs = {used: outputs[used]}
    upstream = [{"y": dy, "s": ds}[name].double() for name in outputs]
    total, dw = torch.autograd.grad(list(outputs.values()), [point, w], upstream, allow_unused=True)
    # Once rounded to the sum's dtype, once times the scale; in float32 the bound on dx's own sums is wider.
    loose = {F: 2e-5}.get(x_dtype, 2.5 * unit(x_dtype))
    for g, scale in zip(got[:2], (0.5, 3.0), strict=True):
        torch.testing.assert_close(g.double(), total * scale, rtol=loose, atol=2e-5)
    assert (got[2] is None) == (used == "s") == (dw is None)
    if dw is not None:
        torch.testing.assert_close(got[2].double(), dw, rtol=loose, atol=1e-4)
