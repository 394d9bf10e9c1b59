"""A norm as one node of an ONNX model, and a session bound to PyTorch's memory. Needs onnx and onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from normkit.bench.shapes import EPS, Case, Inputs


def bound(case: Case, inputs: Inputs) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
    """Return the run of a session on ``inputs`` and the tensors that it writes."""
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after a run its threads leave the cores
    session = runtime.InferenceSession(_model(case, inputs), options, providers=["CPUExecutionProvider"])
    y = torch.full_like(inputs.y, torch.nan)
    results = {"y": y} if inputs.residual is None else {"y": y, "s": torch.full_like(y, torch.nan)}
    given = {"x": inputs.x} if inputs.residual is None else {"x": inputs.x, "r": inputs.residual}
    binding = session.io_binding()
    element = {torch.float32: 1, torch.float16: 10}[inputs.x.dtype]  # TensorProto.FLOAT, FLOAT16
    for name, t in given.items():
        binding.bind_input(name, "cpu", 0, element, list(t.shape), t.data_ptr())
    for name, t in results.items():
        binding.bind_output(name, "cpu", 0, element, list(t.shape), t.data_ptr())
    return partial(session.run_with_iobinding, binding), tuple(results.values())


def _model(case: Case, inputs: Inputs) -> bytes:
    onnx: Any = import_module("onnx")
    helper: Any = onnx.helper
    element = {torch.float32: 1, torch.float16: 10}[inputs.x.dtype]
    parameters = {"w": inputs.weight} if inputs.bias is None else {"w": inputs.weight, "b": inputs.bias}
    constants = [onnx.numpy_helper.from_array(t.detach().numpy(), name) for name, t in parameters.items()]
    eps = EPS[case.op]
    if case.op == "add_rms":
        names, results = ["x", "r"], ["y", "s"]
        node = helper.make_node(
            "SkipSimplifiedLayerNormalization", ["x", "r", "w"], ["y", "", "", "s"], domain="com.microsoft", epsilon=eps
        )
    else:
        names, results = ["x"], ["y"]
        kind = "LayerNormalization" if case.op == "layer" else "RMSNormalization"
        node = helper.make_node(kind, ["x", *parameters], ["y"], axis=-1, epsilon=eps, stash_type=1)
    sizes = list(case.shape.sizes)

    def infos(of: list[str]) -> list[Any]:
        return [helper.make_tensor_value_info(name, element, sizes) for name in of]

    graph = helper.make_graph([node], "norm", infos(names), infos(results), constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
