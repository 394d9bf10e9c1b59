"""Shapes as they are written, the tensors of a case, and the bytes it must move."""

from __future__ import annotations

import pytest

from normkit.bench.shapes import Case, Shape, make_inputs, parse_shape


@pytest.mark.parametrize("text", ["512", "0x4", "4x", "axb", "4x4:heads", "4x4:other", "", "-1x4"])
def test_bad_shapes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512x768"):
        parse_shape(text)


def test_heads_are_a_slice_of_a_fused_projection() -> None:
    case = Case("rms", "step", parse_shape("1x8x2x64:heads"), "bfloat16")
    inputs = make_inputs(case, 0)
    assert inputs.x.shape == (1, 8, 2, 64)
    assert inputs.x.stride() == (8 * 3 * 2 * 64, 3 * 2 * 64, 64, 1)
    assert inputs.x.is_leaf
    assert inputs.x.requires_grad
    assert inputs.y.is_contiguous()


@pytest.mark.parametrize(
    ("op", "which", "planes", "rows"),
    [
        ("rms", "forward", 2, 1),  # x, y; w
        ("layer", "forward", 2, 2),  # x, y; w, b
        ("add_rms", "forward", 4, 1),  # x, residual, y, sum; w
        ("rms", "backward", 3, 2),  # x, dy, dx; w, dw
        ("layer", "backward", 3, 3),  # x, dy, dx; w, dw, db
        ("add_rms", "backward", 4, 2),  # sum, dy, its gradient, dx; w, dw
        ("rms", "step", 5, 3),
    ],
)
def test_bytes_count_each_tensor_once(op: str, which: str, planes: int, rows: int) -> None:
    case = Case(op, which, Shape((16, 32)), "bfloat16")
    assert case.moved == 2 * 32 * (16 * planes + rows)
    assert case.copied == 2 * 16 * 32 * 2
