"""add_layer_norm and add_rms_norm: the sum, the norm of the rounded sum, and their gradients."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import normkit as nk
from rows import FLOATS, always, randn

PAIRS = {"layer": (nk.add_layer_norm, nk.layer_norm), "rms": (nk.add_rms_norm, nk.rms_norm)}
Adding = Callable[..., tuple[Tensor, Tensor]]


ALWAYS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("x_dtype", "r_dtype"), always(product(FLOATS, FLOATS), ALWAYS.__contains__))
@pytest.mark.parametrize("kind", always(PAIRS, lambda kind: kind == "rms"))
def test_bits_are_those_of_a_separate_add_and_norm(kind: str, x_dtype: torch.dtype, r_dtype: torch.dtype):
    add, norm = PAIRS[kind]
    x, r = 30 * randn(16, 96, dtype=x_dtype), 30 * randn(16, 96, seed=1, dtype=r_dtype)
    w, b = randn(96, seed=2), randn(96, seed=3)
    y, s = add(x, r, w, b)
    assert s.dtype == torch.promote_types(x_dtype, r_dtype)
    assert torch.equal(s, x + r)
    assert y.dtype == x_dtype  # B11: a float32 stream does not leak into the branch
    assert torch.equal(y, norm(s.float(), w, b).to(x_dtype))


def test_the_statistic_is_of_the_rounded_sum():
    x, r = randn(64, 96, dtype=torch.bfloat16), randn(64, 96, seed=1, dtype=torch.bfloat16)
    unrounded = nk.rms_norm(x.float() + r.float()).bfloat16()
    assert not torch.equal(nk.add_rms_norm(x, r)[0], unrounded)


@pytest.mark.parametrize("dtype", always(FLOATS, lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("kind", always(PAIRS, lambda kind: kind == "rms"))
def test_scales_act_in_float32_before_the_rounding(kind: str, dtype: torch.dtype):
    add, norm = PAIRS[kind]
    x, r = randn(16, 96, dtype=dtype), randn(16, 96, seed=1, dtype=dtype)
    y, s = add(x, r, alpha=2.7, branch_scale=0.22)
    assert torch.equal(s, (r.float() * 2.7 + x.float() * 0.22).to(dtype))
    assert torch.equal(y, norm(s))
    if dtype != torch.float32:
        assert not torch.equal(s, r * 2.7 + x * 0.22)
    assert torch.equal(add(x, r, alpha=2.0)[1], (2 * r.float() + x.float()).to(dtype))
    assert torch.equal(add(x, r, branch_scale=0.5)[1], (r.float() + x.float() / 2).to(dtype))
    assert torch.equal(add(x, r, alpha=0)[1], x)


@pytest.mark.slow
def test_the_spec_decides_the_cast_order_here_too():
    x, r, w = (randn(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(8, 64), (8, 64), (64,)]))
    s = x + r
    for spec in (nk.LLAMA, nk.OLMO2, nk.GEMMA, nk.T5):
        assert torch.equal(nk.add_rms_norm(x, r, w, spec=spec)[0], nk.rms_norm(s, w, spec=spec))
    assert nk.add_rms_norm(x, r.float(), w, spec=nk.LLAMA)[0].dtype == torch.bfloat16
    assert nk.add_rms_norm(x, r, w.float(), spec=nk.LLAMA)[0].dtype == torch.float32


def test_torchs_epsilon_is_that_of_the_sum():
    x, r = 1e-8 * randn(3, 8), 1e-8 * randn(3, 8, seed=1, dtype=torch.float64)
    y, s = nk.add_rms_norm(x, r, eps=nk.TORCH_DEFAULT)
    assert torch.equal(y, nk.rms_norm(s, eps=nk.TORCH_DEFAULT).float())


@pytest.mark.parametrize("used", ["y", "s", "both"])
@pytest.mark.parametrize("kind", PAIRS)
def test_both_summands_get_their_gradient_through_either_output(kind: str, used: str):
    """Fault C3: with the normalised output alone, the stream still has a gradient."""
    add, norm = PAIRS[kind]
    x, r, w = randn(4, 8).requires_grad_(), randn(4, 8, seed=1).requires_grad_(), randn(8, seed=2).requires_grad_()
    dy, ds = randn(4, 8, seed=3), randn(4, 8, seed=4)
    kept = [dy.clone(), ds.clone()]

    def run(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        x.grad = r.grad = None
        outputs = {"y": pair[:1], "s": pair[1:], "both": pair}[used]
        torch.autograd.backward(outputs, {"y": [dy], "s": [ds], "both": [dy, ds]}[used])
        assert x.grad is not None
        assert r.grad is not None
        return [x.grad, r.grad]

    s = 3.0 * r + 0.5 * x
    got, expected = run(add(x, r, w, alpha=3.0, branch_scale=0.5)), run((norm(s, w), s))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], 6 * got[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(dy, kept[0])
    assert torch.equal(ds, kept[1])


@pytest.mark.parametrize("kind", PAIRS)
def test_gradcheck(kind: str):
    leaves = [
        randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate([(2, 3), (2, 3), (3,), (3,)])
    ]
    add = PAIRS[kind][0]
    assert gradcheck(lambda *t: add(*t, alpha=1.5), leaves, check_forward_ad=True)
    assert gradgradcheck(lambda *t: add(*t, alpha=1.5), leaves)


@pytest.mark.parametrize("kind", PAIRS)
def test_views_and_nothing(kind: str):
    add = PAIRS[kind][0]
    neighbours = randn(4, 24)
    before = neighbours.clone()
    x, r = randn(4, 8), neighbours[:, 8:16]  # D6: a stream that is a slice of something
    y, s = add(x, r)
    torch.testing.assert_close(y, add(x, r.clone())[0], rtol=3e-7, atol=3e-7)
    s.zero_()
    y.zero_()
    assert torch.equal(neighbours, before)
    assert [t.shape for t in add(torch.zeros(0, 8), torch.zeros(0, 8))] == [(0, 8)] * 2


@pytest.mark.parametrize("kind", PAIRS)
def test_bad_input_in_words(kind: str):
    add, x = PAIRS[kind][0], randn(2, 4)
    wrong = nk.TORCH_RMS_NORM if kind == "layer" else nk.TORCH_LAYER_NORM
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"one shape, got \(2, 4\) and \(4,\)", lambda: add(x, x[0])),
        (TypeError, "residual must be float16.*torch.int64", lambda: add(x, x.long())),
        (TypeError, "x must be float16", lambda: add(x.long(), x)),
        (ValueError, "needs at least one axis", lambda: add(x[0, 0], x[0, 0])),
        (ValueError, f"expected an ungated {kind} spec", lambda: add(x, x, spec=wrong)),
        (ValueError, "eps=None is ambiguous", lambda: add(x, x, eps=None)),
        (ValueError, "fits neither", lambda: add(x, x, torch.ones(3))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=f"add_{kind}_norm: .*{message}"):
            call()
