"""torch.export: plain ATen, a dynamic batch, a round trip through a file, equal results."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels.statistics import rescaling
from rows import adversarial, randn
from traced import CASES, SPECS, outputs, randomized

ALL = {**SPECS, **CASES}
FAST = ("LLAMA", "layer", "add rms", "qk", "group, masked", "batch, evaluated", "placement deepnorm")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALL if name != "batch"]


@pytest.fixture(autouse=True)
def _torchs_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export warns about torch's own internals
        yield


def exported(module: nn.Module, inputs: tuple[torch.Tensor, ...], strict: bool = False) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    if type(module).__name__ == "Call":  # its forward takes *inputs
        shapes = (shapes,)  # type: ignore[assignment]
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EACH)
def test_a_graph_of_plain_aten_that_comes_back_from_a_file(name: str, strict: bool):
    case = ALL[name]
    module = randomized(case.make())
    program = exported(module, case.inputs(5), strict)
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert getattr(node.target, "namespace", "aten") == "aten", node.target
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for batch in (5, 2, 9):
        inputs = case.inputs(batch)
        with nk.use("reference"):
            expected = outputs(module(*inputs))
        for found in (loaded(*inputs), program.module()(*inputs)):
            for a, b in zip(outputs(found), expected, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_batch_norm_exported_for_training_moves_its_buffers():
    norm = randomized(nk.BatchNorm(12))
    x = randn(9, 3, 12)
    eager, before = copy.deepcopy(norm), norm.running_mean.clone()
    program = exported(norm, (randn(5, 3, 12, seed=1),))
    trained = program.module()
    with nk.use("reference"):  # whose order of sums an exported graph has
        assert torch.equal(trained(x), eager(x))
    for name, buffer in trained.named_buffers():
        assert torch.equal(buffer, eager.get_buffer(name)), name
    assert not torch.equal(eager.running_mean, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_power_of_two_without_exponent_bits_brings_every_row_into_range(dtype: torch.dtype, monkeypatch: object):
    """All binades, their ends too; NaN, inf and 0 stay what they are."""
    info = torch.finfo(dtype)
    exponents = torch.arange(-1074 if dtype == torch.float64 else -149, 1024 if dtype == torch.float64 else 128)
    binades = torch.ldexp(torch.ones((), dtype=torch.float64), exponents).to(dtype)
    peaks = torch.cat([binades, binades * (2 - info.eps), binades * 1.5])
    peaks = peaks[(peaks > 0) & peaks.isfinite()]
    peaks = torch.cat([peaks, torch.tensor([0.0, torch.inf, torch.nan, info.max], dtype=dtype)]).unsqueeze(1)
    eager = rescaling(peaks, (1,), 0.0)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)  # type: ignore[attr-defined]
    scale = rescaling(peaks, (1,), 0.0)
    assert scale.dtype == dtype
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale == 1) == (eager == 1)).all()  # the same rows are left alone
    scaled = (peaks * scale)[(peaks > 0) & peaks.isfinite()]
    low, high = (2.0**-23, 2.0**16) if dtype == torch.float32 else (2.0**-128, 2.0**128)  # the least subnormals: 2^-23
    assert low <= scaled.min()
    assert scaled.max() <= high


@pytest.mark.parametrize("centered", [False, True])
def test_extreme_rows_have_the_eager_bits(centered: bool):
    """Another power of two rescales them, which rounds nothing above 2^-149 of the rescaled row.

    Its peak is 2^-16 at least, 1/√ of its mean square at most √64·2^16, and no weight reaches 2^2: 2^-128 together.
    """
    norm = randomized(nk.LayerNorm(64) if centered else nk.RMSNorm(64))
    x = torch.cat(list(adversarial(64).values()))
    program = exported(norm, (x[:5],))
    with nk.use("reference"):
        got, expected = program.module()(x), norm(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=2.0**-128)
    assert (got == expected).float().mean() > 0.95
