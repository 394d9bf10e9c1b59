"""round_to: the bits of a conversion, in eager and in compiled code."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.conventions import NAMED
from normkit.kernels import reference
from normkit.kernels.rounding import by_arithmetic, nearest, result_dtype, round_to
from rows import always, randn

HALVES = (torch.bfloat16, torch.float16)


WAYS = [nearest, by_arithmetic]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALVES)
def test_nearest_is_the_conversion_for_every_kind_of_number(dtype: torch.dtype, way: Callable[..., Tensor]):
    bits = torch.randint(-(2**31), 2**31 - 1, (2_000_000,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    x = x[~x.isnan()] if way is nearest else x[x.isfinite()]
    assert torch.equal(way(x, dtype), x.to(dtype).float())


@pytest.mark.parametrize("dtype", always(HALVES, lambda dtype: dtype == torch.bfloat16))
def test_a_whole_binade_and_the_edges_of_the_next_by_arithmetic(dtype: torch.dtype):
    mantissas = torch.arange(2**23, dtype=torch.int32)
    for exponent in (0, -15, 15, 100):
        x = (((exponent + 127) << 23) | mantissas).view(torch.float32)
        assert torch.equal(by_arithmetic(x, dtype), x.to(dtype).float())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALVES)
def test_nearest_sends_every_tie_to_even(dtype: torch.dtype, way: Callable[..., Tensor]):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = every[1:] / 2 + every[:-1] / 2
    assert torch.equal(way(ties, dtype), ties.to(dtype).float())


def test_an_eager_call_is_the_conversion():
    x = randn(100, dtype=torch.float64)
    assert torch.equal(round_to(x, torch.bfloat16), x.to(torch.bfloat16))
    assert round_to(x, torch.float64) is x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_compiled_bits_and_gradient_are_the_eager_ones(dtype: torch.dtype):
    """x − round(x): without care a compiler makes this 0, and the derivative of the conversion must remain 1."""

    def residue(x: Tensor) -> Tensor:
        return x - round_to(x, dtype).to(x.dtype)

    def scaled(x: Tensor) -> Tensor:
        return round_to(x, dtype).to(x.dtype) * 3

    x = torch.cat([randn(1000), torch.tensor([float("inf"), float("nan"), 1e-8, 7e4, 0.0, -0.0])])
    compiled = torch.compile(residue, fullgraph=True)
    torch.testing.assert_close(compiled(x), residue(x), rtol=0, atol=0, equal_nan=True)
    leaf = randn(1000).requires_grad_()
    torch.compile(scaled, fullgraph=True)(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((1000,), 3.0))


@pytest.mark.slow
def test_a_compiled_llama_norm_keeps_its_intermediate_rounding():
    """A quarter of the elements would differ; a sum in another order can move a few across a rounding boundary."""
    x, w = randn(64, 256, dtype=torch.bfloat16), randn(256, seed=1, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, w: nk.rms_norm(x, w, spec=nk.LLAMA), fullgraph=True)
    assert (compiled(x, w) != nk.rms_norm(x, w, spec=nk.LLAMA)).float().mean() < 1e-3


@pytest.mark.slow
def test_a_compiled_residual_norm_takes_the_statistic_of_the_rounded_sum():
    x, r = randn(64, 256, dtype=torch.bfloat16), randn(64, 256, seed=1, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, r: nk.add_rms_norm(x, r)[0], fullgraph=True)
    assert (compiled(x, r) != nk.add_rms_norm(x, r)[0]).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_traced_rounds_and_differentiates_as_a_conversion(dtype: torch.dtype):
    """The graph the compiler receives, run by PyTorch: bit for bit, infinities and NaN included, with derivative 1."""

    def scaled(x: Tensor) -> Tensor:
        return round_to(x, dtype).to(x.dtype) * 3

    x = torch.cat([randn(1000), torch.tensor([float("inf"), float("nan"), 1e-8, 7e4, 0.0, -0.0])]).requires_grad_()
    y = torch.compile(scaled, fullgraph=True, backend="aot_eager")(x)
    assert "copysign" in graph_of(scaled, x) or dtype == torch.bfloat16
    torch.testing.assert_close(y, scaled(x), rtol=0, atol=0, equal_nan=True)
    (dx,) = torch.autograd.grad(y[:1000].sum(), x)
    assert (dx[:1000] == 3).all()


def graph_of(f: Callable[[Tensor], Tensor], x: Tensor) -> str:
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(module.code)
        return module.forward

    torch.compile(f, fullgraph=True, backend=keep)(x)
    return graphs[0]


@pytest.mark.parametrize("dtype", HALVES)
def test_an_exported_graph_keeps_its_roundings_without_bits(dtype: torch.dtype):
    """Whoever runs the graph may drop a conversion that is taken back, and has no view of a float's bits."""

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return nk.rms_norm(x, w, spec=nk.LLAMA)

    x, w = randn(30, 80, dtype=dtype), randn(80, seed=1, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export warns about torch's own internals
        program = torch.export.export(Norm(), (x, w))
    assert "view.dtype" not in program.graph_module.code
    assert str(2.0**13 + 1 if dtype == torch.float16 else 2.0**16 + 1) in program.graph_module.code
    with nk.use("reference"):
        assert torch.equal(program.module()(x, w), Norm()(x, w))


def every_spec() -> list[nk.NormSpec]:
    """Return every possible combination of what decides a dtype, and the named specs."""
    axes = ("centered", "statistic_dtype", "weight", "cast", "output")
    hints = get_type_hints(nk.NormSpec)
    found = list(NAMED.values())
    for values in product(*(get_args(hints[name]) or (False, True) for name in axes)):
        try:
            found.append(nk.NormSpec(**dict(zip(axes, values, strict=True))))  # type: ignore[arg-type]
        except ValueError:
            continue  # an impossible combination
    return [spec for spec in found if spec.gate == "none"]


def test_the_dtype_foretold_is_the_references():
    """Kernels allocate y, and out= is checked, by `result_dtype` before anything is computed."""
    x = torch.ones(2, 4)
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for spec, x_dtype, w_dtype, b_dtype in product(every_spec(), floats, (None, *floats), (None, *floats)):
        if spec.weight == "none" and w_dtype is not None:
            continue
        w, b = (None if d is None else torch.ones(4, dtype=d) for d in (w_dtype, b_dtype))
        y = reference.normalize(x.to(x_dtype), spec, w, b, axes=(1,), eps=1e-6)
        foretold = result_dtype(spec, x_dtype, w_dtype, b_dtype)
        assert y.dtype == foretold, (spec.code, x_dtype, w_dtype, b_dtype)
