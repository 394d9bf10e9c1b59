"""use(batch_invariant=True): the fused kernel or an error that says why, also where a compiler looks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.kernels import registry
from rows import randn

Function = Callable[..., object]
FUNCTIONS: dict[str, Function] = {
    "rms": lambda x, r, w, b: nk.rms_norm(x, w, b, spec=nk.LLAMA),
    "layer": lambda x, r, w, b: nk.layer_norm(x, w, b, eps=1e-6),
    "l2": lambda x, r, w, b: nk.l2_norm(x),
    "middle axis": lambda x, r, w, b: nk.rms_norm(x.mT, w, b, axis=-2),
    "add rms": lambda x, r, w, b: nk.add_rms_norm(x, r, w, alpha=0.5),
    "add layer": lambda x, r, w, b: nk.add_layer_norm(x, r, w, b, branch_scale=3.0),
}


def compiled(function: Function, backend: str = "aot_eager") -> Function:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def step(run: Function, rows: int, dtype: torch.dtype, only: int | None = None) -> list[Tensor | None]:
    """Return outputs and gradients for ``rows`` rows of width 33, or for row ``only`` of those alone."""
    x, r = randn(rows, 33, seed=1), randn(rows, 33, seed=2)
    dy, ds = randn(rows, 33, seed=3, dtype=dtype), randn(rows, 33, seed=4)
    tensors = [x.to(dtype), r, randn(33, seed=5, dtype=dtype), randn(33, seed=6, dtype=dtype)]
    if only is not None:
        tensors[:2], dy, ds = [t[only : only + 1] for t in tensors[:2]], dy[only : only + 1], ds[only : only + 1]
    inputs = [t.clone().requires_grad_() for t in tensors]
    found = run(*inputs)
    results = found if isinstance(found, tuple) else (found,)
    wanted = [dy if t.shape == dy.shape else dy.mT for t in results]
    wanted[1:] = [ds] * (len(results) - 1)
    upstream = [u.to(t.dtype) for u, t in zip(wanted, results, strict=True)]
    return [*results, *torch.autograd.grad(results, inputs, upstream, allow_unused=True)]


def same(got: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(got, expected, strict=True)
    )


FAST = {("rms", torch.bfloat16), ("add layer", torch.float32)}
PAIRS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if (name, dtype) in FAST else pytest.mark.slow)
    for name in FUNCTIONS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_compiled_bits_are_the_eager_kernels_for_every_batch(name: str, dtype: torch.dtype):
    """Outputs and all gradients, one compilation; x differs from the residual in dtype in one of two."""
    with nk.use(batch_invariant=True):
        run = compiled(FUNCTIONS[name])
        for rows in (5, 3, 19):
            assert same(step(run, rows, dtype), step(FUNCTIONS[name], rows, dtype))
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rms", "add rms", "layer"])
def test_inductor_leaves_a_row_alone(name: str):
    """Between operators that it does fuse; a row of y, s, dx and the residual's gradient is what it is alone."""
    function = FUNCTIONS[name]
    with nk.use(batch_invariant=True):
        run = compiled(lambda x, r, w, b: function(x * 2, r * 2, w, b), "inductor")
        for rows, row in [(300, 0), (300, 299), (7, 3)]:
            many, one = step(run, rows, torch.bfloat16), step(run, rows, torch.bfloat16, only=row)
            for a, b in zip(many, one, strict=True):
                if a is not None and b is not None and a.shape[0] == rows:
                    assert torch.equal(a[row], b[0])
        # Dynamo compiles sizes of 1 apart, whatever dynamic= says; all other numbers of rows are one graph.
        assert counters["stats"]["unique_graphs"] == 2


def graph_operators(function: Function, *inputs: Tensor) -> set[str]:
    """Return the operators of the graph that a compiler receives."""
    names: set[str] = set()

    def keep(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        names.update(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=keep)(*inputs)
    return names


def test_the_graph_holds_the_operator_only_where_it_is_asked_for():
    x = randn(4, 12)

    def inside(t: Tensor) -> Tensor:
        with nk.use(batch_invariant=True):
            return nk.rms_norm(t)

    assert not any("normkit" in name for name in graph_operators(nk.rms_norm, x))
    assert graph_operators(inside, x) == {"normkit.row_norm"}
    with nk.use(batch_invariant=True):
        assert graph_operators(nk.rms_norm, x) == {"normkit.row_norm"}


def test_one_compiled_function_follows_what_is_in_force_in_each_thread():
    """A value burnt into the first program would be silent; so would another thread's."""
    run = compiled(nk.layer_norm, "eager")
    x = randn(64, 1000) + 3
    with nk.use("reference"):
        plain = nk.layer_norm(x)
    fused = nk.layer_norm(x)
    assert not torch.equal(plain, fused)  # the orders of their sums differ, or this test could not fail
    found: list[bool] = []

    def elsewhere() -> None:
        found.append(torch.equal(run(x), plain))
        with nk.use(batch_invariant=True):
            found.append(torch.equal(run(x), fused))

    for wanted in (False, True, False):
        with nk.use(batch_invariant=wanted):
            thread = threading.Thread(target=elsewhere)  # the first program is compiled where nothing was ever set
            thread.start()
            thread.join()
            assert torch.equal(run(x), fused if wanted else plain)
    assert found == [True] * 6
    assert counters["stats"]["unique_graphs"] == 2


def test_the_row_alone_decides_in_eager_mode():
    x = randn(64, 100, dtype=torch.bfloat16)
    with nk.use(batch_invariant=True):
        assert torch.equal(nk.rms_norm(x)[17], nk.rms_norm(x[17]))
        assert nk.explain(x, nk.LLAMA).batch_invariant


X = randn(4, 12)


def function_mode() -> Tensor:
    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            return func(*args, **(kwargs or {}))  # type: ignore[arg-type]

    with Nothing():
        return nk.rms_norm(X)


EAGER: dict[str, tuple[Callable[[], object], str]] = {
    "float64": (lambda: nk.rms_norm(X.double()), "x is torch.float64"),
    "no kernel": (lambda: nk.normalize(X, nk.GEMMA3N, eps=1e-6), "root='power'"),
    "gated": (lambda: vmap(lambda t: nk.gated_rms_norm(t, t))(X), "gated norms have no registered operator"),
    "group": (lambda: nk.group_norm(X[None].double(), 3), "x is torch.float64"),
    "instance, vmap": (lambda: vmap(nk.instance_norm)(X[None, None]), "no registered operator"),
    "batch statistics": (lambda: nk.BatchNorm(12)(X), "batch"),
    "meta": (lambda: nk.rms_norm(X.to("meta")), "no ordinary CPU or CUDA tensor"),
    "vmap": (lambda: vmap(nk.rms_norm)(X), "torch.func"),
    "grad": (lambda: grad(lambda t: nk.rms_norm(t).sum())(X), "torch.func"),
    "forward mode": (lambda: jvp(nk.rms_norm, (X,), (X,)), "forward-mode"),
    "add, forward mode": (lambda: jvp(lambda t: nk.add_rms_norm(t, X), (X,), (X,)), "forward-mode"),
    "export": (lambda: torch.export.export(nk.RMSNorm(12), (X,)), "exported graph"),
    "explain": (lambda: nk.explain(X.double(), nk.LLAMA), "x is torch.float64"),
    "function mode": (function_mode, "function mode"),
}


@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_promised_is_refused_with_the_reason(name: str):
    call, reason = EAGER[name]
    with nk.use(batch_invariant=True), pytest.raises(ValueError, match=f"batch_invariant=True needs.*{reason}"):
        call()
    assert not registry.batch_invariant()


@pytest.mark.parametrize(
    "function",
    [
        nk.rms_norm,
        lambda x: nk.add_layer_norm(x, x)[0],
        lambda x: nk.gated_rms_norm(x, x),
        lambda x: nk.group_norm(x, 7),
        nk.instance_norm,
    ],
)
def test_second_derivatives_are_refused_also_when_the_block_has_ended(function: Function):
    x = randn(4, 12, 7).requires_grad_()
    with nk.use(batch_invariant=True):
        y = function(x)
    assert isinstance(y, Tensor)
    with pytest.raises(ValueError, match="backward is itself differentiated"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_empty_rows_pass():
    with nk.use(batch_invariant=True):
        assert nk.rms_norm(X[:0]).shape == (0, 12)
        leaf = X[:0].clone().requires_grad_()
        y = compiled(nk.rms_norm)(leaf, torch.ones(12, requires_grad=True))
        assert y.shape == (0, 12)
        y.sum().backward()
        assert leaf.grad is not None


def refused_under_compile() -> dict[str, tuple[Callable[[], object], str]]:
    x = randn(4, 12).requires_grad_()

    def dual() -> object:
        with forward_ad.dual_level():
            return compiled(nk.rms_norm)(forward_ad.make_dual(X, X))

    def twice() -> object:
        y = compiled(nk.rms_norm)(x)
        return torch.autograd.grad(torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(), x)

    per_row = torch.ones(4, 1, requires_grad=True)
    return {
        "float64": (lambda: compiled(nk.rms_norm)(X.double()), "x is torch.float64"),
        "no kernel": (lambda: compiled(lambda t: nk.normalize(t, nk.GEMMA3N, eps=1e-6))(X), "root='power'"),
        "gated": (lambda: compiled(lambda t: nk.gated_rms_norm(t, t))(X), "gated norms have no registered operator"),
        "trained weight per row": (lambda: compiled(nk.rms_norm)(X, per_row), "differs from row to row"),
        "jvp inside": (lambda: compiled(lambda t: jvp(nk.rms_norm, (t,), (t,)))(X), "forward-mode"),
        "grad inside": (lambda: compiled(grad(lambda u: nk.rms_norm(u).sum()))(X), "torch.func"),
        "a dual number": (dual, "forward-mode"),
        "twice": (twice, "does not currently support double backward|create_graph=False"),  # PyTorch's own words
    }


REFUSED = refused_under_compile()


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_cannot_do_under_compile_is_no_silent_answer(name: str):
    call, reason = REFUSED[name]
    with nk.use(batch_invariant=True), pytest.raises(Exception, match=reason):
        call()


def operator_arguments(x: Tensor) -> tuple[object, ...]:
    return x, None, None, nk.TORCH_RMS_NORM.code, [1], 1e-6


def test_the_operator_itself_refuses_what_it_would_get_wrong():
    """Called by its name, as a graph does: PyTorch's own fallbacks drop tangents and second derivatives."""
    with nk.use(batch_invariant=True), torch.utils.flop_counter.FlopCounterMode(display=False):
        nk.rms_norm(X)  # registers the operators
    row_norm = torch.ops.normkit.row_norm
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        row_norm(*operator_arguments(forward_ad.make_dual(X, X)))
    with pytest.raises(ValueError, match=r"torch\.func"):
        grad(lambda t: row_norm(*operator_arguments(t)).sum())(X)
    x = randn(4, 12).requires_grad_()
    y = row_norm(*operator_arguments(x))
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    (dx,) = torch.autograd.grad(row_norm(*operator_arguments(x)), x, y.detach())
    assert torch.equal(dx, torch.autograd.grad(nk.rms_norm(x), x, y.detach())[0])
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.ops.normkit.row_norm_keep(*operator_arguments(x))


def test_dispatch_modes_see_the_operator():
    """Selective checkpointing and counters run under such modes; the bits stay."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator,dict-item]

    expected = step(FUNCTIONS["rms"], 5, torch.float32)
    with nk.use(batch_invariant=True), Watch():
        got = step(FUNCTIONS["rms"], 5, torch.float32)
        told = nk.explain(X, nk.LLAMA)
    assert same(got, expected)
    assert {"normkit.row_norm_keep.default", "normkit.row_norm_backward.default"} <= set(seen)
    assert (told.kernel, told.batch_invariant) == ("cpu", True)


def test_vmap_inside_a_compiled_function_is_a_loop_of_the_kernel():
    with nk.use(batch_invariant=True):
        got = compiled(vmap(nk.rms_norm))(X)
    assert torch.equal(got, nk.rms_norm(X))  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_same_bits(use_reentrant: bool):
    x, dy = randn(5, 12).requires_grad_(), randn(5, 12, seed=1)
    with nk.use(batch_invariant=True):
        y = checkpoint(nk.rms_norm, x, use_reentrant=use_reentrant)
        (dx,) = torch.autograd.grad(y, x, dy) if not use_reentrant else (y.backward(dy), x.grad)[1:]
        assert torch.equal(dx, torch.autograd.grad(nk.rms_norm(x), x, dy)[0])


def test_use_combines_restores_and_contradicts():
    with nk.use("cpu"), nk.use(batch_invariant=True):
        assert (registry.backend(), registry.batch_invariant()) == ("cpu", True)
        with nk.use("auto"):
            assert (registry.backend(), registry.batch_invariant()) == ("auto", True)
        with nk.use("reference", batch_invariant=False):
            assert (registry.backend(), registry.batch_invariant()) == ("reference", False)
        with pytest.raises(ValueError, match="contradict"), nk.use("reference"):
            pass
        with pytest.raises(TypeError, match="batch_invariant must be True or False, got 1"), nk.use(batch_invariant=1):  # type: ignore[arg-type]
            pass
        assert (registry.backend(), registry.batch_invariant()) == ("cpu", True)
    with nk.use("reference"), pytest.raises(ValueError, match="contradict"), nk.use(batch_invariant=True):
        pass
    assert (registry.backend(), registry.batch_invariant()) == ("auto", False)


CODE = """
import sys, torch
import normkit as nk
assert not hasattr(torch.ops.normkit, "row_norm") and "normkit.ops.opaque" not in sys.modules
from normkit.kernels import registry
print(registry.batch_invariant())
try:
    nk.rms_norm(torch.ones(2, 4, dtype=torch.float64))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("given", "backend", "prints"),
    [
        ("1", "auto", "True\nbatch_invariant=True needs a fused kernel"),
        ("0", "auto", "False\n"),
        (
            "1",
            "reference",
            "True\nbatch_invariant=True needs a fused kernel, and none can take this call: the reference",
        ),
    ],
)
def test_the_environment_decides_for_a_process(given: str, backend: str, prints: str):
    env = {**os.environ, "NORMKIT_BATCH_INVARIANT": given, "NORMKIT_BACKEND": backend}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.startswith(prints)


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NORMKIT_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="NORMKIT_BATCH_INVARIANT: expected 0 or 1, got 'yes'"):
        registry._invariance_from_environment()
