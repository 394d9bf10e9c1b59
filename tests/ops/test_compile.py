"""Norms under torch.compile: one graph, one compilation for every batch, every declared rounding kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import normkit as nk
from normkit.conventions import NAMED
from rows import depth, randn, unit
from traced import CASES, SPECS, Case, of_spec, outputs, randomized

ALL = {**SPECS, **CASES}
FAST = ("LLAMA", "add layer", "batch")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALL]


@contextmanager
def compilations(at_most: int) -> Iterator[None]:
    """Fail where more graphs than that are compiled."""
    torch._dynamo.reset()
    counters.clear()
    yield
    assert 1 <= counters["stats"]["unique_graphs"] <= at_most
    assert not counters["graph_break"]


def trained(case: Case, module: torch.nn.Module, batch: int, run: Callable[..., object]) -> list[Tensor]:
    """Return outputs and every gradient for random upstream gradients; buffers that moved, too."""
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in case.inputs(batch)]
    results = outputs(run(*inputs))
    asked = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    upstream = [randn(*t.shape, seed=50 + i, dtype=t.dtype) for i, t in enumerate(results)]
    gradients = torch.autograd.grad(results, asked, upstream, allow_unused=True)
    return [*results, *(g for g in gradients if g is not None), *module.buffers()]


@pytest.mark.parametrize("name", EACH)
def test_one_graph_for_every_batch_with_gradients(name: str):
    """The traced formula against the eager reference: the same operators, so the same values to the last bits."""
    case = ALL[name]
    module = randomized(case.make())
    traced = copy.deepcopy(module)
    compiled = torch.compile(traced, fullgraph=True, dynamic=True, backend="aot_eager")
    with compilations(1):
        for batch in (5, 3, 17):  # 5 is no other size of these inputs: equal sizes would share a symbol at first
            with nk.use("reference"):
                expected = trained(case, module, batch, module)
            got = trained(case, traced, batch, compiled)
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_another_epsilon_is_another_number_not_another_program(norm: str):
    """Inductor keeps a Python float as an input; at most the first change makes it one."""
    function = {"rms": nk.rms_norm, "layer": nk.layer_norm}[norm]
    compiled = torch.compile(lambda x, eps: function(x, eps=eps), fullgraph=True, dynamic=True)
    x = randn(4, 12) * 1e-2
    with compilations(2):
        for eps in (1e-5, 1e-6, 3e-6, 1e-3, 2e-3, 0.5):
            torch.testing.assert_close(compiled(x, eps), function(x, eps=eps), rtol=2e-6, atol=1e-6)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance of half-precision numbers in steps, across zero and binades."""

    def ordinal(t: Tensor) -> Tensor:
        bits = t.contiguous().view(torch.int16).to(torch.int64)
        return torch.where(bits >= 0, bits, -(bits & 0x7FFF))

    return (ordinal(a) - ordinal(b)).abs()


def half_specs() -> dict[str, nk.NormSpec]:
    """Return the named specs whose every rounding is declared: not those that compute in x's own dtype throughout."""
    return {name: spec for name, spec in NAMED.items() if spec.statistic_dtype != "input"}


def check_roundings(specs: dict[str, nk.NormSpec], dtype: torch.dtype) -> None:
    """Compile all of ``specs`` as one function, which invites every fusion, and compare with eager bits.

    The sums alone may differ, by e = (depth + 9)·u of the result at most (rows.py). Only where an intermediate lies
    within 2·e of a rounding boundary does it round apart: 2·2e per step of 2·unit(dtype) of it, for each of up to three
    roundings; and then a rounding on each of two sides adds to one step at most: 2 ULP, or 3 after three roundings.
    """
    n = 96
    x, gate = randn(64, n, dtype=dtype), randn(64, n, seed=1, dtype=dtype)
    modules = {name: of_spec(spec, dtype) for name, spec in specs.items()}
    for name, module in modules.items():
        with torch.no_grad():
            module.weight = torch.nn.Parameter(randn(n, seed=len(name), dtype=dtype))

    def run() -> dict[str, Tensor]:
        return {name: m(*((x, gate) if specs[name].gate != "none" else (x,))) for name, m in modules.items()}

    torch._dynamo.reset()
    with torch.no_grad():
        compiled, eager = torch.compile(run, fullgraph=True)(), run()
    e = (depth(n) + 9) * unit(torch.float32)
    share = 3 * 2 * 2 * e / (2 * unit(dtype))
    for name in specs:
        assert compiled[name].dtype == eager[name].dtype == dtype, name
        apart = ulps(compiled[name], eager[name])
        assert int(apart.max()) <= 3, name
        assert float((apart > 0).float().mean()) <= share, name
    if {"LLAMA", "OLMO2"} <= set(specs):
        differ = [(found["LLAMA"] != found["OLMO2"]).float().mean() for found in (compiled, eager)]
        assert differ[0] > 0.1  # a compiler that drops the rounding in between makes them equal
        assert abs(differ[0] - differ[1]) <= 2 * share


def test_llama_and_olmo2_stay_apart_in_compiled_bfloat16():
    check_roundings({name: NAMED[name] for name in ("LLAMA", "OLMO2")}, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_named_spec_keeps_its_roundings(dtype: torch.dtype):
    check_roundings(half_specs(), dtype)


@pytest.mark.slow
def test_statistics_in_a_half_type_are_no_worse_compiled():
    """``statistic_dtype="input"`` is what compiled code forms wider: nearer to the truth, never farther."""
    spec = nk.IMAGE_GPT
    x = randn(64, 96, dtype=torch.bfloat16)
    compiled = torch.compile(lambda t: nk.normalize(t, spec, eps=1e-5), fullgraph=True)
    truth = nk.normalize(x.double(), replace(spec, statistic_dtype="float32"), eps=1e-5)
    errors = [(y.double() - truth).abs().max() for y in (compiled(x), nk.normalize(x, spec, eps=1e-5))]
    assert errors[0] <= errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["placement post", "placement deepnorm"])
def test_a_compiled_step_normalises_the_rounded_stream(name: str):
    """Fused with the norm after it, the add would otherwise hand its float32 sum on."""
    block = randomized(CASES[name].make()).to(torch.bfloat16)
    block.sublayers[0] = torch.nn.Identity()
    x = randn(256, 12, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad():
        differ = torch.compile(block, fullgraph=True)(x) != block(x)
    assert differ.float().mean() < 2e-3


@pytest.mark.slow
def test_a_compiled_block_trains_as_the_eager_one():
    """Inductor, forward and backward, three batch sizes, one program; values to float32's accuracy."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(
        nk.PreNorm(32, torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))),
        nk.RMSNorm(32, spec=nk.LLAMA),
        nk.LayerNorm(32),
    )
    randomized(block[1]), randomized(block[2])
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with compilations(1):
        for batch in (3, 8, 21):
            x, dy = randn(batch, 7, 32, seed=batch), randn(batch, 7, 32, seed=1)
            found = []
            for run in (block, compiled):
                leaf = x.clone().requires_grad_()
                y = run(leaf)
                found.append([y, *torch.autograd.grad(y, [leaf, *block.parameters()], dy)])
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
