"""Gradients of the row norms: against float64 and torch, to third order, under every transform."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import normkit as nk
from rows import FLOATS, always, gradient_bounds, plain_norm, randn

Function = Callable[..., Tensor]
FUNCTIONS: dict[str, Function] = {"layer": nk.layer_norm, "rms": nk.rms_norm}


def grads(y: Tensor, leaves: tuple[Tensor, ...], dy: Tensor, **how: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy, **how)


@pytest.mark.parametrize("dtype", always(FLOATS, lambda dtype: dtype == torch.float32))
@pytest.mark.parametrize("n", [1, 3, 127, 768])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradients_lie_within_the_bound_of_float64(kind: str, n: int, dtype: torch.dtype):
    centered = kind == "layer"
    for seed, w_dtype in enumerate((torch.float32, dtype, dtype)):
        x, dy = randn(5, 4, n, seed=seed, dtype=dtype), randn(5, 4, n, seed=seed + 9, dtype=dtype)
        w, b = randn(n, seed=seed + 20, dtype=w_dtype), randn(n, seed=seed + 30, dtype=w_dtype)
        leaves = tuple(t.clone().requires_grad_() for t in (x, w, b))
        got = grads(FUNCTIONS[kind](*leaves, eps=1e-5), leaves, dy)
        wide = tuple(t.double().requires_grad_() for t in (x, w, b))
        exact = grads(plain_norm(*wide, centered=centered), wide, dy.double())
        limits = gradient_bounds(x, w, dy, exact, centered, [dtype, w_dtype, w_dtype])
        for g, e, limit, leaf, what in zip(got, exact, limits, leaves, "xwb", strict=True):
            assert g.dtype == leaf.dtype
            excess = ((g.double() - e).abs() - limit).max()
            assert excess <= 0, f"d{what} at seed {seed}: {float(excess):.3g} over {float(limit.max()):.3g}"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradients_are_torchs_to_rounding(kind: str):
    x, dy = randn(30, 100), randn(30, 100, seed=1)
    w, b = randn(100, seed=2), randn(100, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    ours = torch.autograd.grad(FUNCTIONS[kind](*leaves, eps=1e-5), leaves, dy)
    others = [t.clone().requires_grad_() for t in (x, w, b)]
    y = (
        F.layer_norm(others[0], (100,), *others[1:])
        if kind == "layer"
        else F.rms_norm(others[0], (100,), others[1], 1e-5) + others[2]
    )
    for ours_one, theirs in zip(ours, torch.autograd.grad(y, others, dy), strict=True):
        torch.testing.assert_close(ours_one, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e-8, 1e12, 1e14, 1e30])
@pytest.mark.parametrize("n", [1, 2, 1000])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradients_of_extreme_rows(kind: str, n: int, magnitude: float):
    """Automatic differentiation forms the cube of 1/√v: it must neither overflow nor vanish. Here ε is 0."""
    x, dy = randn(3, n), randn(3, n, seed=1)
    if kind == "layer":
        x, dy = torch.cat([x, -x], -1), torch.cat([dy, dy * 2], -1)  # width 1 would be 0/0
    else:
        x[:, 1:] *= 1e-3  # one element far above the others
    x, w = x * magnitude, torch.ones(dy.shape[-1])
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    (got,) = grads(FUNCTIONS[kind](leaf, eps=0.0), (leaf,), dy)
    exact = grads(plain_norm(wide, centered=kind == "layer", eps=0.0), (wide,), dy.double())
    limit = gradient_bounds(x, w, dy, exact, kind == "layer", [torch.float32], eps=0.0)[0]
    assert ((got.double() - exact[0]).abs() <= limit).all()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_strided_and_expanded_upstream_gradients(kind: str):
    x, w = randn(6, 8), randn(8, seed=1)
    for dy in (randn(6, 16)[:, ::2], randn(8, 6).t(), randn(1, 8).expand(6, 8), torch.ones(()).expand(6, 8)):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        got = torch.autograd.grad(FUNCTIONS[kind](*leaves), leaves, dy)
        copied = torch.autograd.grad(FUNCTIONS[kind](*leaves), leaves, dy.contiguous())
        for a, b in zip(got, copied, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)  # the layout decides the order of dw's sum


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_an_expanded_inputs_gradient_is_the_sum(kind: str):
    base, dy = randn(1, 8).requires_grad_(), randn(5, 8, seed=1)
    FUNCTIONS[kind](base.expand(5, 8)).backward(dy)
    leaf = base.detach().clone().requires_grad_()
    FUNCTIONS[kind](leaf).backward(dy.sum(0, keepdim=True))
    torch.testing.assert_close(base.grad, leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["x", "w", "b"])
@pytest.mark.parametrize("kind", always(FUNCTIONS, lambda kind: kind == "layer"))
def test_what_is_frozen_gets_no_gradient_and_the_rest_does(kind: str, frozen: str):
    leaves = {"x": randn(4, 8), "w": randn(8), "b": randn(8)}
    for name, t in leaves.items():
        t.requires_grad_(name != frozen)
    dy = randn(4, 8, seed=5)
    kept = dy.clone()
    FUNCTIONS[kind](*leaves.values()).backward(dy)
    assert torch.equal(dy, kept)
    assert {name for name, t in leaves.items() if t.grad is None} == {frozen}


@pytest.mark.parametrize("dtype", always(FLOATS, lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_statistics_are_kept_in_float32(kind: str, dtype: torch.dtype):
    """Faults A21 and B14: whatever backward reads per row is float32."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x, w = randn(6, 8, dtype=dtype).requires_grad_(), randn(8, dtype=dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        FUNCTIONS[kind](x, w)
    expected = {"layer": (6, 4), "rms": (6, 2)}[kind]  # μ̂, its remainder, 1/σ and the power of two a row was scaled by
    assert [(tuple(t.shape), t.dtype) for t in saved] == [((6, 8), dtype), ((8,), dtype), (expected, torch.float32)]
    saved.clear()
    with nk.use("reference"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        FUNCTIONS[kind](x, w)
    per_row = [t.dtype for t in saved if t.shape == (6, 1)]
    assert per_row
    assert set(per_row) <= {torch.float32, torch.bool}


SPECS = [
    nk.TORCH_LAYER_NORM, nk.TORCH_RMS_NORM, nk.LLAMA, nk.GEMMA, nk.GEMMA3N, nk.DEBERTA, nk.IMAGE_GPT, nk.NEMOTRON,
    nk.SCALE_NORM,
    nk.NormSpec(eps="outside"), nk.NormSpec(statistic="unbiased"), nk.NormSpec(statistic="unbiased", centered=True),
]  # fmt: skip


@pytest.mark.parametrize("spec", always(SPECS, SPECS[:3].__contains__), ids=lambda s: s.code)
def test_gradcheck_and_gradgradcheck(spec: nk.NormSpec):
    x, w, b = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate([(2, 4), (4,), (4,)]))
    f = partial(nk.normalize, eps=1e-3)

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return f(x, spec, w, b)

    assert gradcheck(call, (x, w, b), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, (x, w, b), check_fwd_over_rev=True)
    assert gradgradcheck(lambda x, b: f(x, spec, None, b), (x, b))  # C14
    assert gradgradcheck(lambda x, w: f(x, spec, w), (x, w))  # C20


@pytest.mark.parametrize("scale", [1.0, 1e60, 1e-60])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_third_order_is_the_plain_formulas(kind: str, scale: float):
    """Fault C15. Rows of 1e±60 are rescaled, and their third derivative scales by the fourth power less one."""
    unscaled, v = randn(7, dtype=torch.float64), [randn(7, seed=i, dtype=torch.float64) for i in (1, 2, 3)]

    def third(f: Function, x: Tensor) -> Tensor:
        def one(x: Tensor) -> Tensor:
            return jvp(f, (x,), (v[0],))[1]

        def two(x: Tensor) -> Tensor:
            return jvp(one, (x,), (v[1],))[1]

        return jvp(two, (x,), (v[2],))[1]

    def reverse(f: Function, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = f(x) @ v[0]
        for direction in (v[1], v[2], v[0]):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = g @ direction
        return value.detach()

    def same(x: Tensor) -> Tensor:
        return plain_norm(x, centered=kind == "layer", eps=0.0)

    ours = partial(FUNCTIONS[kind], eps=0.0)
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(third(ours, unscaled * scale) * scale**3, third(same, unscaled), **tolerance)
    torch.testing.assert_close(reverse(ours, unscaled * scale) * scale**3, reverse(same, unscaled), **tolerance)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_create_graph_changes_no_gradient(kind: str):
    """Fault C17: none of the reference's bits; the kernels' gradients and the reference's obey one bound."""
    leaves = (randn(4, 8).requires_grad_(), randn(8).requires_grad_())
    dy = randn(4, 8, seed=1)
    with nk.use("reference"):
        kept = grads(FUNCTIONS[kind](*leaves), leaves, dy, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(kept, grads(FUNCTIONS[kind](*leaves), leaves, dy), strict=True))
    wide = tuple(t.detach().double().requires_grad_() for t in leaves)
    exact = grads(plain_norm(*wide, centered=kind == "layer", eps=1e-5 if kind == "layer" else 1e-6), wide, dy.double())
    x, w = (t.detach() for t in leaves)
    limits = gradient_bounds(x, w, dy, exact, kind == "layer", [torch.float32] * 2, eps=1e-6)
    for create_graph in (False, True):
        got = grads(FUNCTIONS[kind](*leaves), leaves, dy, create_graph=create_graph)
        assert all(((g - e).abs() <= limit).all() for g, e, limit in zip(got, exact, limits, strict=True))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_transforms_agree_with_the_plain_formula(kind: str):
    x, w, v = (randn(*s, seed=i, dtype=torch.float64) for i, s in enumerate([(5, 6), (6,), (5, 6)]))
    x[1] *= 1e50  # one row that is rescaled
    f = partial(FUNCTIONS[kind], eps=1e-5)
    g = partial(plain_norm, centered=kind == "layer")
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

    def loss(h: Function) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda row, w: (h(row, w) ** 3).sum()

    close(vmap(f, (0, None))(x, w), g(x, w))
    close(vmap(grad(loss(f), (0, 1)), (0, None))(x, w), vmap(grad(loss(g), (0, 1)), (0, None))(x, w))
    close(jvp(lambda t: f(t, w), (x,), (v,)), jvp(lambda t: g(t, w), (x,), (v,)))
    close(jacrev(f)(x[0], w), jacrev(g)(x[0], w))
    close(jacfwd(f)(x[0], w), jacrev(g)(x[0], w))
    close(hessian(loss(f))(x[0], w), hessian(loss(g))(x[0], w))
    close(vjp(f, x, w)[1](v), vjp(g, x, w)[1](v))
    tangent = jvp(lambda t: g(t, w), (x,), (v,))[1]
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(f(forward_ad.make_dual(x, v), w)).tangent, tangent)


@pytest.mark.slow
def test_vmap_over_weights_of_one_number():
    x, g = randn(3, 4), randn(3)
    torch.testing.assert_close(
        vmap(nk.scale_norm)(x, g), torch.stack([nk.scale_norm(a, b) for a, b in zip(x, g, strict=True)])
    )
    half = x.bfloat16()
    y = vmap(lambda a, b: nk.rms_norm(a, b, spec=nk.LLAMA))(half, g)
    assert y.dtype == nk.rms_norm(half[0], g[0], spec=nk.LLAMA).dtype == torch.float32
