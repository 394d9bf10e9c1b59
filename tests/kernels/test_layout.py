"""Rows that lie anywhere: folded axes, packed rows, and outputs that share memory with inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.kernels.layout import fold, row_stride
from rows import randn

KINDS = {"layer": nk.TORCH_LAYER_NORM, "rms": nk.TORCH_RMS_NORM}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "heads": lambda: randn(2, 5, 3 * 4 * 16)[..., 64:128].view(2, 5, 4, 16),
    "heads, transposed": lambda: randn(2, 5, 4, 16).transpose(1, 2),
    "every second element": lambda: randn(6, 40)[:, ::2],
    "transposed": lambda: randn(24, 7).t(),
    "slice with offset": lambda: randn(9, 50)[2:7, 3:33],
    "one row, expanded": lambda: randn(20).expand(6, 20),
    "one number a row, expanded": lambda: randn(6, 1).expand(6, 20),
    "three outer axes": lambda: randn(3, 2, 4, 16).permute(2, 1, 0, 3)[:, :, :, ::2],
    "misaligned": lambda: randn(121)[1:].view(6, 20),
}


@pytest.fixture(autouse=True)
def on_the_kernels() -> Iterator[None]:
    with nk.use("cpu"):
        yield


def test_axes_merge_where_every_tensor_allows():
    assert fold([2, 3, 4], [[12, 4, 1], [12, 4, 1]]) == ([1, 1, 24], [[0, 0, 1], [0, 0, 1]])
    assert fold([2, 3, 4], [[12, 4, 1], [0, 0, 0]]) == ([1, 1, 24], [[0, 0, 1], [0, 0, 0]])
    assert fold([2, 3, 4], [[12, 4, 1], [4, 0, 1]]) == ([2, 3, 4], [[12, 4, 1], [4, 0, 1]])
    assert fold([2, 1, 4], [[4, 99, 1]]) == ([1, 1, 8], [[0, 0, 1]])
    assert fold([], [[]]) == ([1, 1, 1], [[0, 0, 0]])
    assert fold([2, 2, 2, 2], [[1, 2, 4, 8]]) is None


def test_the_stride_along_a_row():
    assert row_stride(torch.empty(3, 4), (1,)) == 1
    assert row_stride(torch.empty(4, 3).t(), (1,)) == 3
    assert row_stride(torch.empty(3, 4, 5), (1, 2)) == 1
    assert row_stride(torch.empty(3, 4, 5)[..., ::5], (1, 2)) == 5
    assert row_stride(torch.empty(3, 4, 5)[..., :4], (1, 2)) is None
    assert row_stride(torch.empty(3, 4, 5), (0, 2)) is None
    assert row_stride(torch.empty(7, 1).expand(7, 3), (1,)) == 0
    assert row_stride(torch.empty(3, 1), (1,)) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_bits_are_those_of_a_contiguous_copy(kind: str, layout: str):
    x = LAYOUTS[layout]()
    w, b = randn(x.shape[-1], seed=1), randn(x.shape[-1], seed=2)
    copy = x.contiguous().clone()
    assert torch.equal(nk.normalize(x, KINDS[kind], w, b, eps=1e-6), nk.normalize(copy, KINDS[kind], w, b, eps=1e-6))
    y, s = (nk.add_layer_norm if kind == "layer" else nk.add_rms_norm)(x, 2 * copy, w)
    y_, s_ = (nk.add_layer_norm if kind == "layer" else nk.add_rms_norm)(copy, 2 * copy, w)
    assert torch.equal(y, y_)
    assert torch.equal(s, s_)


def backward(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, spec: nk.NormSpec, axes: int = -1) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]  # detach keeps strides
    y = nk.normalize(leaves[0], spec, *leaves[1:], axes=axes, eps=1e-6)
    return list(torch.autograd.grad(y, leaves, dy))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_bits_are_those_of_contiguous_copies(kind: str, layout: str):
    x = LAYOUTS[layout]()
    w, b = randn(x.shape[-1], seed=1), randn(x.shape[-1], seed=2)
    copy = x.contiguous().clone()
    expected = backward(copy, w, b, copy * 3 + 1, KINDS[kind])
    for dy in (copy * 3 + 1, LAYOUTS[layout]() * 3 + 1, (copy * 3 + 1).transpose(0, -1).contiguous().transpose(0, -1)):
        got = backward(x, w, b, dy, KINDS[kind])
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_upstream_gradients_that_are_expanded():
    x, w, b = randn(2, 5, 4, 16), randn(16, seed=1), randn(16, seed=2)
    for dy in (torch.ones(()), randn(16), randn(5, 1, 1), randn(2, 1, 4, 16), randn(1, 5, 1, 16)):
        for spec in KINDS.values():
            got = backward(x, w, b, dy.expand(x.shape), spec)
            expected = backward(x, w, b, dy.expand(x.shape).contiguous(), spec)
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_other_axes(kind: str):
    spec, x = KINDS[kind], randn(4, 6, 10)
    w, b = randn(6, seed=1), randn(6, seed=2)
    moved = nk.normalize(x.movedim(1, -1).contiguous(), spec, w, b, eps=1e-6).movedim(-1, 1)
    assert torch.equal(nk.normalize(x, spec, w, b, axes=1, eps=1e-6), moved)
    dy = randn(4, 6, 10, seed=3)
    got = backward(x, w, b, dy, spec, axes=1)
    expected = backward(x.movedim(1, -1).contiguous(), w, b, dy.movedim(1, -1).contiguous(), spec)
    assert torch.equal(got[0], expected[0].movedim(-1, 1))
    assert torch.equal(got[1], expected[1])
    w2 = randn(6, 10, seed=4)
    flat = nk.normalize(x.view(4, 60), spec, w2.flatten(), eps=1e-6).view(4, 6, 10)
    assert torch.equal(nk.normalize(x, spec, w2, axes=(1, 2), eps=1e-6), flat)
    with nk.use("auto"):  # axes that form no row with one stride are the reference's
        apart = nk.normalize(x, spec, axes=(0, 2), eps=1e-6)
    gathered = nk.normalize(x.transpose(0, 1).reshape(6, 40), spec, eps=1e-6).view(6, 4, 10).transpose(0, 1)
    torch.testing.assert_close(apart, gathered, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 16), (2, 1, 1, 16), (2, 5, 1, 16), (5, 1, 1), (2, 5, 4, 16)])
def test_weights_that_differ_from_row_to_row(shape: tuple[int, ...]):
    """Per head (H, D), per sample (N, 1, …, C), and weights that are views themselves."""
    x, w = randn(2, 5, 4, 16), randn(*shape, seed=1)
    for spec in KINDS.values():
        full = nk.normalize(x, spec, w.expand(x.shape).contiguous(), w.expand(x.shape).contiguous(), eps=1e-6)
        assert torch.equal(nk.normalize(x, spec, w, w, eps=1e-6), full)
        apart = torch.stack([w, w], -1)[..., 0]
        assert torch.equal(nk.normalize(x, spec, apart, apart, eps=1e-6), full)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strided_output_leaves_its_neighbours_alone(kind: str):
    x, spec = randn(6, 20), KINDS[kind]
    expected = nk.normalize(x, spec, eps=1e-6)
    for view in (
        lambda t: t[2:8, 5:25],
        lambda t: t[:6, ::2][:, :20],
        lambda t: t.t()[:6, :20],
        lambda t: t[::2, 3:23],
    ):
        whole = torch.full((40, 40), 7.0)
        out = view(whole)[:6]
        assert nk.normalize(x, spec, eps=1e-6, out=out) is out
        assert torch.equal(out, expected)
        out.fill_(7)
        assert (whole == 7).all()


def test_an_output_whose_axes_fold_with_nothing():
    x = randn(2, 3, 2, 3, 8)
    out = torch.empty(3, 2, 3, 2, 8).permute(3, 2, 1, 0, 4)
    assert torch.equal(nk.rms_norm(x, out=out), nk.rms_norm(x))


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_over_the_input(kind: str):
    spec, n = KINDS[kind], 20
    for x in (randn(6, n), randn(n, 6).t(), randn(6, 2 * n)[:, ::2]):
        expected = nk.normalize(x, spec, eps=1e-6)
        assert torch.equal(nk.normalize(x, spec, eps=1e-6, out=x), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-21, -20, -1, 1, 20, 21])
def test_an_output_over_a_part_of_the_input(kind: str, shift: int):
    """Rows written over rows not yet read: the result is that of separate memory."""
    memory = randn(20 * 9)
    x, out = memory[30:150].view(6, 20), memory[30 + shift : 150 + shift].view(6, 20)
    expected = nk.normalize(x, KINDS[kind], eps=1e-6)
    assert torch.equal(nk.normalize(x, KINDS[kind], eps=1e-6, out=out), expected)


def test_an_output_over_the_input_transposed():
    square = randn(20, 20)
    expected = nk.rms_norm(square)
    assert torch.equal(nk.rms_norm(square, out=square.t()), expected)


def test_an_output_over_a_parameter():
    x = randn(6, 20)
    for place in (0, 3, 5):
        memory = randn(6, 20, seed=1)
        w = memory[place]
        expected = nk.rms_norm(x, w.clone())
        assert torch.equal(nk.rms_norm(x, w, out=memory), expected)


def test_an_output_over_memory_that_another_tensor_lent():
    """Two storages on one NumPy array know nothing of each other."""
    array = randn(140).numpy()
    x, out = torch.from_numpy(array[20:]).view(6, 20), torch.from_numpy(array[:120]).view(6, 20)
    expected = nk.rms_norm(x)
    assert torch.equal(nk.rms_norm(x, out=out), expected)


def test_an_output_that_overlaps_itself_is_refused():
    with pytest.raises(RuntimeError, match="single memory location"):
        nk.rms_norm(randn(4, 8), out=torch.empty(8).expand(4, 8))


def test_writing_an_output_is_seen_by_autograd():
    a = randn(4, 8).requires_grad_()
    kept = a * 1.0
    loss = (kept * kept).sum()
    with torch.no_grad():
        nk.rms_norm(randn(4, 8), out=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_inference_tensor_is_not_written_outside_its_mode():
    with torch.inference_mode():
        out = torch.zeros(4, 8)
        nk.rms_norm(randn(4, 8), out=out)
    assert out.any()
    before = out.clone()
    with pytest.raises(RuntimeError, match="inference tensor"):
        nk.rms_norm(randn(4, 8, seed=5), out=out)
    assert torch.equal(out, before)


def test_an_output_without_memory_is_refused_or_left_to_torch():
    with pytest.raises(ValueError, match="no ordinary CPU or CUDA tensor"):
        nk.rms_norm(randn(4, 8), out=torch.empty(4, 8, device="meta"))
    with nk.use("auto"):
        assert nk.rms_norm(randn(4, 8), out=torch.empty(4, 8, device="meta")).device.type == "meta"
