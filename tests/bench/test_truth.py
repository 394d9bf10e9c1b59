"""The check before the clock: PyTorch's own norms pass it, near misses do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.bench.shapes import DTYPES, EPS, Case, Shape, make_inputs
from normkit.bench.truth import truth_of, worst

SHAPES = [Shape((1, 96)), Shape((37, 100)), Shape((1, 8, 2, 64), heads=True)]


def compute(case: Case, seed: int) -> tuple[list[str], list[Tensor], Case]:
    inputs = make_inputs(case, seed)
    eps, width = EPS[case.op], (case.shape.width,)
    if inputs.residual is not None:
        s = inputs.x + inputs.residual
        outputs: tuple[Tensor, ...] = (F.rms_norm(s, width, inputs.weight, eps), s)
    elif case.op == "layer":
        outputs = (F.layer_norm(inputs.x, width, inputs.weight, inputs.bias, eps),)
    else:
        outputs = (F.rms_norm(inputs.x, width, inputs.weight, eps),)
    gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    return ["y", "s"][: len(outputs)] + list(inputs.names), [*outputs, *gradients], case


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["rms", "layer", "add_rms"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pytorch_passes_and_a_part_in_fifty_does_not(op: str, shape: Shape, dtype: str) -> None:
    case = Case(op, "step", shape, dtype)
    names, results, _ = compute(case, seed=1)
    truth = truth_of(case, make_inputs(case, 1))
    assert worst(truth, names, results)[1] <= 1
    for name, result in zip(names, results, strict=True):
        assert truth.excess(name, result * 1.05) > 1, name
        spoilt = result.detach().clone()
        spoilt.view(-1)[-1] = torch.nan
        assert truth.excess(name, spoilt) == float("inf"), name


def test_only_forwards_carry_no_gradients() -> None:
    case = Case("rms", "forward", SHAPES[0], "float32")
    assert set(truth_of(case, make_inputs(case, 0)).bounds) == {"y"}


def test_a_forgotten_weight_and_a_centred_rms_are_found() -> None:
    case = Case("rms", "forward", Shape((64, 128)), "bfloat16")
    inputs = make_inputs(case, 0)
    truth = truth_of(case, inputs)
    assert truth.excess("y", F.rms_norm(inputs.x, (128,), None, 1e-6)) > 1
    assert truth.excess("y", F.layer_norm(inputs.x, (128,), inputs.weight, None, 1e-6)) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_gradient_of_many_rows_can_still_be_wrong(dtype: str) -> None:
    """Units for every row would allow more than the sum of a quarter of a million: half the rows might be missing."""
    case = Case("rms", "step", Shape((1 << 18, 16)), dtype)
    inputs = make_inputs(case, 3)
    truth = truth_of(case, inputs)
    xhat = F.rms_norm(inputs.x.detach().float(), (16,), None, EPS["rms"])
    terms = inputs.dy.float() * xhat
    assert truth.excess("dw", terms.sum(0).to(inputs.dy.dtype)) <= 1
    assert truth.excess("dw", (inputs.dy.float() * xhat.to(inputs.dy.dtype).float()).sum(0)) <= 1
    assert truth.excess("dw", terms[: 1 << 17].sum(0)) > 1
