"""The fused norms as PyTorch sees them: every transform by value, and nothing kept or done that need not be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import normkit as nk
from normkit import ops
from normkit.kernels.contract import Request
from normkit.kernels.cpu import rows as launch
from normkit.kernels.cpu.kernel import CPU
from normkit.ops import watch
from rows import always, plain_norm, randn

Function = Callable[..., Tensor]
FUNCTIONS: dict[str, Function] = {"layer": nk.layer_norm, "rms": nk.rms_norm}


def close(got: Tensor, expected: Tensor, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=rtol, atol=atol)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which kernels run."""
    seen: list[str] = []

    def recorded(name: str, run: Function) -> Function:
        def call(*args: object, **rest: object) -> object:
            seen.append(name)
            return run(*args, **rest)

        return call  # type: ignore[return-value]

    for name in ("forward", "add_forward", "backward"):
        monkeypatch.setitem(CPU.__dict__, name, recorded(name, getattr(CPU, name)))

    def noted(name: str, prepare: Callable[[Request], Function]) -> Callable[[Request], Function]:
        return lambda request: recorded(name, prepare(request))

    for name, prepared in (("forward", "quick"), ("add_forward", "quick_add")):
        monkeypatch.setitem(CPU.__dict__, prepared, noted(name, getattr(CPU, prepared)))
    for module in (ops.rows, ops.residual):
        monkeypatch.setattr(module, "_quick", {})
    return seen


def leaves(rows: int = 5, n: int = 12) -> list[Tensor]:
    return [randn(rows, n).requires_grad_(), randn(n, seed=1).requires_grad_(), randn(n, seed=2).requires_grad_()]


def formula(kind: str) -> Function:
    return partial(plain_norm, centered=kind == "layer", eps=1e-5)


def ours(kind: str) -> Function:
    return partial(FUNCTIONS[kind], eps=1e-5)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_kernels_run_where_nothing_looks_inside(kind: str, calls: list[str]):
    inputs = leaves()
    ours(kind)(*inputs).sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_second_and_third_derivatives(kind: str):
    def derivatives(f: Function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        dy = randn(5, 12, seed=4, dtype=dtype).requires_grad_()
        v = [randn(*t.shape, seed=5, dtype=dtype) for t in inputs]
        first = torch.autograd.grad(f(*inputs), inputs, dy, create_graph=True)
        asked = [*inputs[:2], dy]
        second = torch.autograd.grad(first, asked, v, create_graph=True)
        third = torch.autograd.grad(second[0].square().sum(), [inputs[0], dy])
        return [*first, *second, *third]

    inputs = leaves()
    for got, expected in zip(
        derivatives(ours(kind), inputs, torch.float32),
        derivatives(formula(kind), wide(inputs), torch.float64),
        strict=True,
    ):
        # The third derivatives are sums of up to a hundred products of numbers near ten.
        close(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.detach().abs().max())))


@pytest.mark.parametrize("frozen", ["x", "w", "b", "x and w", "w and b"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_create_graph_with_something_frozen(kind: str, frozen: str):
    inputs = leaves()
    for name, t in zip("xwb", inputs, strict=True):
        t.requires_grad_(name not in frozen)
    asked = [t for t in inputs if t.requires_grad]
    dy = randn(5, 12, seed=4).requires_grad_()
    got = torch.autograd.grad(ours(kind)(*inputs), asked, dy, create_graph=True)
    doubles = wide(inputs)
    dd = dy.detach().double().requires_grad_()
    wanted = [t for t in doubles if t.requires_grad]
    expected = torch.autograd.grad(formula(kind)(*doubles), wanted, dd, create_graph=True)
    for a, b in zip(got, expected, strict=True):
        close(a, b)
    close(*(torch.autograd.grad([g.sum() for g in first], d)[0] for first, d in ((got, dy), (expected, dd))))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_transforms_by_value(kind: str):
    f, g = ours(kind), formula(kind)
    x, w, v = randn(5, 12), randn(12, seed=1), randn(5, 12, seed=2)
    x64, w64, v64 = x.double(), w.double(), v.double()

    def loss(h: Function) -> Function:
        return lambda row, gain: (h(row, gain) ** 3).sum()

    def tangent(h: Function, direction: Tensor) -> Function:
        return lambda t: jvp(h, (t,), (direction,))[1]

    close(tangent(lambda t: f(t, w), v)(x), tangent(lambda t: g(t, w64), v64)(x64))
    nested, plain = (tangent(tangent(lambda t, h=h, p=p: h(t, p), d), d) for h, p, d in ((f, w, v), (g, w64, v64)))
    close(nested(x), plain(x64), rtol=1e-4, atol=1e-4)
    close(vmap(f, (0, None))(x, w), g(x64, w64))
    for got, expected in zip(
        vmap(grad(loss(f), (0, 1)), (0, None))(x, w), vmap(grad(loss(g), (0, 1)), (0, None))(x64, w64), strict=True
    ):
        close(got, expected, rtol=1e-4, atol=1e-4)
    close(jacrev(f)(x[0], w), jacrev(g)(x64[0], w64))
    close(jacfwd(f)(x[0], w), jacrev(g)(x64[0], w64))
    close(hessian(loss(f))(x[0], w), hessian(loss(g))(x64[0], w64), rtol=1e-3, atol=1e-3)
    expected = tangent(lambda t: g(t, w64), v64)(x64)
    with forward_ad.dual_level():
        dual = f(forward_ad.make_dual(x, v), w)
        close(forward_ad.unpack_dual(dual).tangent, expected)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_batched_gradients_of_a_graph_that_kernels_made(kind: str):
    """``is_grads_batched`` maps over the backward alone; its upstream gradients have no memory of their own."""
    inputs, dy = leaves(), randn(3, 5, 12, seed=4)
    got = torch.autograd.grad(ours(kind)(*inputs), inputs, dy, is_grads_batched=True)
    for index in range(3):
        one = torch.autograd.grad(ours(kind)(*inputs), inputs, dy[index])
        for a, b in zip(got, one, strict=True):
            close(a[index], b)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_forward_mode_over_a_backward_that_kernels_made(kind: str):
    inputs, v = leaves(), randn(5, 12, seed=4)
    y = ours(kind)(*inputs)
    doubles = wide(inputs)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, inputs[0], forward_ad.make_dual(torch.ones(5, 12), v))
        got = forward_ad.unpack_dual(dx)
    (expected,) = torch.autograd.grad(formula(kind)(*doubles), doubles[0], v.double())
    assert got.tangent is not None
    close(got.tangent, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activation_checkpointing(kind: str, use_reentrant: bool, calls: list[str]):
    inputs, dy = leaves(), randn(5, 12, seed=4)
    expected = torch.autograd.grad(ours(kind)(*inputs), inputs, dy)
    calls.clear()
    checkpoint(ours(kind), *inputs, use_reentrant=use_reentrant).backward(dy)
    assert calls == ["forward", "forward", "backward"]
    assert all(torch.equal(t.grad, e) for t, e in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_is_kept_for_the_backward(kind: str, dtype: torch.dtype):
    """The input, the parameters and some numbers a row: nothing of the size of x is made."""
    x, w = randn(64, 256, dtype=dtype).requires_grad_(), randn(256, dtype=dtype).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(kind)(x, w)
        (add := {"layer": nk.add_layer_norm, "rms": nk.add_rms_norm}[kind])(x, x.detach(), w)
    known = {x.data_ptr(), w.data_ptr()}
    new = [t for t in saved if t.data_ptr() not in known]
    statistics = {"layer": 4, "rms": 2}[kind]
    assert [(tuple(t.shape), t.dtype) for t in new] == [
        ((64, statistics), torch.float32),
        ((64, 256), dtype),  # the sum, which is a result
        ((64, statistics), torch.float32),
    ]
    assert add(x, x)[1].shape == x.shape


@pytest.mark.parametrize("kind", always(FUNCTIONS, lambda kind: kind == "rms"))
def test_no_partials_for_what_is_frozen(kind: str, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[bool, bool, bool]] = []
    backward_code = launch.backward_code

    def recorded(
        spec: nk.NormSpec, kinds: launch.Kinds, dy: object, dx: object, extra: object, wanted: object
    ) -> object:
        made.append(wanted)  # type: ignore[arg-type]
        return backward_code(spec, kinds, dy, dx, extra, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "backward_code", recorded)
    for frozen in ("", "w", "wb", "x"):
        inputs = leaves()
        for name, t in zip("xwb", inputs, strict=True):
            t.requires_grad_(name not in frozen)
        ours(kind)(*inputs).sum().backward()
        assert made.pop() == tuple(name not in frozen for name in "xwb")
        assert [t.grad is None for t in inputs] == [name in frozen for name in "xwb"]


def test_a_changed_input_is_noticed():
    for index in (0, 1):
        inputs = leaves()
        x = inputs[0] * 1
        y = nk.rms_norm(x, inputs[1])
        with torch.no_grad():
            (x, inputs[1])[index].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("kind", always(FUNCTIONS, lambda kind: kind == "rms"))
def test_inference_mode_leaves_the_kernels_to_others(kind: str):
    """The first call of a process may come from inside: what an ordinary tensor is must not be learnt there."""
    code = f"""
import torch, normkit as nk
from normkit.ops import watch
with torch.inference_mode():
    y = nk.{kind}_norm(torch.ones(2, 4))
    assert y.is_inference() and watch.plain(y)
assert watch.plain(torch.ones(2)) and watch.plain(y)
with nk.use("cpu"):
    nk.{kind}_norm(torch.ones(2, 4))
    nk.{kind}_norm(y)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_has_no_memory_is_not_plain():
    x = torch.randn(4, 4)
    assert watch.plain(x)
    assert watch.plain(torch.nn.Parameter(x))
    assert watch.plain(None)
    imaginary = torch.randn(4, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    with FakeTensorMode():
        fake = torch.empty(4)
    for t in (x.to("meta"), x.to_sparse(), imaginary, fake, torch._efficientzerotensor(4)):
        assert not watch.plain(t)
    seen: list[bool] = []
    vmap(lambda t: seen.append(watch.plain(t)) or t)(x)
    assert seen == [False]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_tensor_whose_negation_is_pending(kind: str):
    imaginary = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    close(ours(kind)(imaginary), formula(kind)(imaginary.double().resolve_neg()))


def test_meta_tensors_and_fake_tensors():
    for kind, f in FUNCTIONS.items():
        y = f(torch.empty(3, 8, device="meta"), torch.empty(8, device="meta"))
        assert (y.shape, y.device.type) == ((3, 8), "meta")
        with FakeTensorMode():
            y = f(
                torch.empty(3, 8, dtype=torch.bfloat16),
                torch.empty(8),
                spec=nk.LLAMA if kind == "rms" else nk.TORCH_LAYER_NORM,
            )
        assert (y.shape, y.dtype) == ((3, 8), torch.float32 if kind == "rms" else torch.bfloat16)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_compiled_without_a_graph_break_and_once_for_many_batches(kind: str):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours(kind), fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 5, 17):
        inputs, dy = leaves(rows), randn(rows, 12, seed=4)
        y = compiled(*inputs)
        close(y, ours(kind)(*inputs))
        for a, b in zip(
            torch.autograd.grad(y, inputs, dy), torch.autograd.grad(ours(kind)(*inputs), inputs, dy), strict=True
        ):
            close(a, b)
    assert counter.frame_count == 1


class Tagged(Tensor):
    """A subclass that counts the functions it meets."""

    met: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        Tagged.met.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_is_given_plain_operators(calls: list[str]):
    Tagged.met = []
    x = randn(3, 8).as_subclass(Tagged)
    y = nk.rms_norm(x, torch.ones(8))
    assert type(y) is Tagged
    assert "mean" in Tagged.met
    assert calls == []
    with pytest.raises(ValueError, match="no ordinary CPU or CUDA tensor"), nk.use("cpu"):
        nk.rms_norm(x)


def test_modes_see_operators():
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator,dict-item]

    inputs = leaves()
    with Watch():
        ours("layer")(*inputs).sum().backward()
    assert any("aten.rsqrt" in name for name in seen)
    linear = torch.nn.Linear(12, 12)
    with FlopCounterMode(display=False) as flops:
        ours("layer")(linear(inputs[0])).sum().backward()
    assert flops.get_total_flops() > 0
    forward_only = ours("rms")(*inputs)
    seen.clear()
    with Watch():
        forward_only.sum().backward()  # a mode that starts after the forward still sees the backward
    assert any("aten.mul" in name for name in seen)


def test_hooks_may_give_back_other_memory():
    """Offloading hooks return copies, with other strides perhaps."""
    inputs, dy = leaves(), randn(5, 12, seed=4)
    inputs[0] = inputs[0].detach().t().contiguous().t().requires_grad_()
    expected = torch.autograd.grad(ours("layer")(*inputs), inputs, dy)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t + 0
    ):
        y = ours("layer")(*inputs)
    assert all(map(torch.equal, torch.autograd.grad(y, inputs, dy), expected))


def test_a_graph_may_be_walked_twice():
    inputs, dy = leaves(), randn(5, 12, seed=4)
    y = ours("rms")(*inputs)
    once = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y, inputs, dy), once))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("used", ["y", "s", "both"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_residual_add_to_second_order(kind: str, used: str, calls: list[str]):
    add = {"layer": nk.add_layer_norm, "rms": nk.add_rms_norm}[kind]

    def value(outputs: tuple[Tensor, Tensor]) -> Tensor:
        y, s = outputs
        return {"y": (y**3).sum(), "s": (s**3).sum(), "both": (y**3 * s).sum()}[used]

    def derivatives(f: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(value(f(*inputs)), inputs, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(
            sum((g.square().sum() for g in first if g is not None), torch.zeros(())), inputs, allow_unused=True
        )
        return [g for g in (*first, *second) if g is not None]

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = 2.5 * r + 0.5 * x
        return formula(kind)(s, w), s

    inputs = [randn(4, 12).requires_grad_(), randn(4, 12, seed=1).requires_grad_(), randn(12, seed=2).requires_grad_()]
    got = derivatives(partial(add, alpha=2.5, branch_scale=0.5, eps=1e-5), inputs)
    assert calls[0] == "add_forward"
    for a, b in zip(got, derivatives(plain, wide(inputs)), strict=True):
        close(a, b, rtol=1e-3, atol=1e-3)
