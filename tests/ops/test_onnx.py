"""ONNX models of norms, run by onnxruntime, against the eager reference and float64."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from ops.test_compile import ulps
from rows import adversarial, randn, true_norm
from traced import CASES, outputs, randomized

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
WIDTH = 64


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The exporter deprecates its own internals and logs that torchvision is absent."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


def model(module: nn.Module, inputs: tuple[Tensor, ...], opset: int) -> Any:
    """Return a checked ONNX model with a dynamic first axis."""
    shapes: Any = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    if type(module).__name__ == "Call":
        shapes = (shapes,)
    program = torch.onnx.export(
        module.eval(), inputs, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False
    )
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    assert {o.domain: o.version for o in proto.opset_import}[""] == opset
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    return proto


def session(proto: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(proto: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    s = session(proto)
    fed = {i.name: t.numpy() for i, t in zip(s.get_inputs(), inputs, strict=True)}
    return tuple(torch.from_numpy(y) for y in s.run(None, fed))


def norm_of(spec: nk.NormSpec, dtype: torch.dtype, width: int = WIDTH) -> nn.Module:
    made = nk.LayerNorm(width, spec=spec, dtype=dtype) if spec.centered else nk.RMSNorm(width, spec=spec, dtype=dtype)
    return randomized(made)


OPSETS = [18, pytest.param(23, marks=pytest.mark.slow)]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("spec", [nk.TORCH_LAYER_NORM, nk.LLAMA], ids=["layer", "llama"])
def test_float32_within_the_bound_of_any_float32_computation(spec: nk.NormSpec, opset: int):
    """The bound of rows.py on random and extreme rows.

    It allows three roundings behind the statistic and this runtime takes as many: root, reciprocal, product. Its sums
    run in eight or sixteen lanes, so no term passes through more additions than the bound allows. What is rounded in
    steps of 2^-149 before it meets 1/√ (√width·2^16 at most, for a rescaled peak of 2^-16) and the weight adds to it.
    """
    norm = norm_of(spec, torch.float32)
    proto = model(norm, (randn(3, WIDTH),), opset)
    x = torch.cat([randn(20, WIDTH, seed=1), *adversarial(WIDTH).values()])
    (y,) = run(proto, (x,))
    bias = norm.bias if norm.bias is not None else 0.0
    truth = true_norm(x, norm.weight, bias, eps=norm.eps, centered=spec.centered)
    replace(truth, bound=truth.bound + 2.0**-149 * 8 * 2**16 * norm.weight.abs()).check(y)


def half_rows() -> Tensor:
    """Return float16 rows: random, and those whose squares leave float16 or vanish in it."""
    z = randn(40, WIDTH)
    extreme = [torch.full((1, WIDTH), 3000.0), torch.full((1, WIDTH), 6e4), z[:1] * 1e-6, z[1:2] * 2e4, z[2:3] * 0]
    return torch.cat([z, *extreme]).half()


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    "name",
    [
        "LLAMA",
        "TORCH_LAYER_NORM",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("OLMO2", "GEMMA", "T5", "NEMOTRON")),
    ],
)
def test_float16_within_two_steps_of_ours(name: str, opset: int):
    """Where a float32 value lies at a rounding boundary, one intermediate and then the result may round apart."""
    norm = norm_of(getattr(nk, name), torch.float16)
    proto = model(norm, (randn(3, WIDTH, dtype=torch.float16),), opset)
    x = half_rows()
    (y,) = run(proto, (x,))
    with nk.use("reference"):
        ours = norm(x).detach()
    assert y.dtype == ours.dtype == torch.float16
    assert int(ulps(y, ours).max()) <= 2
    assert float((y != ours).float().mean()) < 0.02  # the declared roundings stand: without one a quarter differs


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.slow
def test_bfloat16_exports_and_says_what_the_runtime_lacks(opset: int):
    """Norms that round once run, bound to PyTorch's memory; a product in bfloat16 has no kernel there."""
    norm, x = norm_of(nk.OLMO2, torch.bfloat16), randn(5, WIDTH, dtype=torch.bfloat16)
    s = session(model(norm, (x[:3],), opset))
    y = torch.full_like(x, torch.nan)
    binding = s.io_binding()
    binding.bind_input(s.get_inputs()[0].name, "cpu", 0, onnx.TensorProto.BFLOAT16, list(x.shape), x.data_ptr())
    binding.bind_output(s.get_outputs()[0].name, "cpu", 0, onnx.TensorProto.BFLOAT16, list(y.shape), y.data_ptr())
    s.run_with_iobinding(binding)
    assert int(ulps(y, norm(x).detach()).max()) <= 1
    proto = model(norm_of(nk.LLAMA, torch.bfloat16), (x[:3],), opset)
    with pytest.raises(Exception, match="Could not find an implementation for Mul"):
        session(proto)


NAMES = [name for name in CASES if name != "batch"]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", NAMES)
def test_everything_exports_and_runs(name: str, opset: int):
    case = CASES[name]
    module = randomized(case.make()).eval()
    proto = model(module, case.inputs(5), opset)
    inputs = case.inputs(9)
    with nk.use("reference"), torch.no_grad():
        expected = outputs(module(*inputs))
    for a, b in zip(run(proto, inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
