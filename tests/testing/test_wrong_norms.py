"""The kit names what is wrong, shows it on a small input, and the input can be pasted."""

from __future__ import annotations

import pytest
import torch

import normkit as nk
from normkit.testing import check
from rows import always
from testing import norms

WRONG = {
    "bfloat16 statistics": (norms.statistics_in_the_input_dtype, nk.LLAMA, {"V1", "A5", "A6"}),
    "one-pass variance": (norms.one_pass_variance, nk.TORCH_LAYER_NORM, {"A1", "A2", "A4"}),
    "weight before the cast": (norms.weight_before_the_cast, nk.LLAMA, {"B2", "V1"}),
    "in place": (norms.in_place, nk.LLAMA, {"B13", "C1"}),
    "ε outside the root": (norms.epsilon_outside, nk.LLAMA, {"A18"}),
    "no dw": (norms.without_dw, nk.LLAMA, {"G1"}),
}


@pytest.mark.parametrize("name", always(WRONG, ("one-pass variance", "in place", "no dw").__contains__))
def test_the_right_check_fails(name: str):
    fn, spec, expected = WRONG[name]
    found = check(fn, spec=spec)
    assert expected <= set(found.failed), found.report()
    right = check(norms.hugging_face, spec=nk.LLAMA, only=sorted(expected))
    assert spec.centered or right.ok, right.report()


def test_only_what_is_wrong_fails():
    failed = set(check(norms.in_place, spec=nk.LLAMA).failed) - {"V: 1e18", "G: 1e18"}
    # PyTorch refuses to write into an expanded tensor, and there is no second derivative to this one.
    assert failed == {"B13", "C1", "C14", "L: expanded", "L: expanded, gradients"}


def test_no_dw_is_a_missing_gradient():
    (failure,) = check(norms.without_dw, spec=nk.LLAMA, only=["G1"]).failures
    assert (failure.problem.kind, failure.problem.got) == ("dweight", "None")
    assert failure.inputs.x.shape == (1, 1)


def test_the_smallest_input_is_small_still_fails_and_can_be_pasted():
    (failure,) = check(norms.one_pass_variance, spec=nk.TORCH_LAYER_NORM, only=["A1"]).failures
    assert failure.inputs.x.numel() <= 4, "20 numbers were noticed; a few are enough"
    pasted: dict[str, object] = {"torch": torch}
    exec(str(failure.inputs), pasted)
    assert torch.equal(pasted["x"], failure.inputs.x)
    got = norms.one_pass_variance(pasted["x"], pasted["weight"], pasted["eps"])
    right = nk.layer_norm(pasted["x"], pasted["weight"], eps=pasted["eps"])
    assert float((got - right).abs().max()) > 1e-3
    for part in ("FAILS A1", "got", "expected", "bound", "torch.tensor"):
        assert part in str(failure)


def test_wrong_dtype_shape_and_exceptions_are_failures_with_words():
    wide = check(lambda x, w, eps: norms.hugging_face(x, w, eps).float(), spec=nk.LLAMA, backward=False, only=["V1"])
    assert wide.failures[0].problem.kind == "dtype"
    flat = check(lambda x, w, eps: norms.hugging_face(x, w, eps).sum(-1), spec=nk.LLAMA, backward=False, only=["V1"])
    assert flat.failures[0].problem.kind == "shape"

    def broken(x, w, eps):
        raise RuntimeError("no kernel for this")

    raised = check(broken, spec=nk.LLAMA, backward=False, only=["V1"]).failures[0].problem
    assert (raised.kind, raised.got) == ("raised", "RuntimeError: no kernel for this")


def test_layouts_that_are_misread_are_named_and_only_those():
    def misreads(x, w, eps):
        if x.is_contiguous() or x.numel() == 0:
            return norms.hugging_face(x, w, eps)
        return norms.hugging_face(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), w, eps)

    found = check(misreads, spec=nk.LLAMA, backward=False, dtypes=(torch.float32,))
    assert {"D1", "D5", "L: strided", "L: transposed"} <= set(found.failed)
    assert not {"V1", "A18", "L: strided, gradients"} & set(found.failed)


def test_a_nan_that_spreads_is_found():
    def spreads(x, w, eps):
        return norms.hugging_face(x, w, eps) + 0 * x.sum()

    assert check(spreads, spec=nk.LLAMA, backward=False, only=["N1"]).failures[0].problem.kind == "spread"


def test_wrong_second_derivatives_are_found():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, eps):
            ctx.save_for_backward(x, w)
            ctx.eps = eps
            return norms.hugging_face(x, w, eps)

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            wide, u = x.float(), x.shape[-1]
            r = torch.rsqrt(wide.detach().pow(2).mean(-1, keepdim=True) + ctx.eps)  # saved: a constant, wrongly
            g = dy.float() * w.float()
            dx = r * g - wide * r**3 * (g * wide).sum(-1, keepdim=True) / u
            return dx.to(x.dtype), (dy.float() * wide * r).sum(0).to(w.dtype), None

    found = check(Once.apply, spec=nk.LLAMA, dtypes=(torch.float32,), only=["G1", "C14"])
    assert found.failed == ("C14",), found.report()


def test_the_residual_gradient_and_the_rounded_sum_are_checked():
    def right(x, residual, weight, eps):
        return nk.add_rms_norm(x, residual, weight, eps=eps, spec=nk.OLMO2)

    def detached(x, residual, weight, eps):
        return right(x, residual.detach(), weight, eps)

    def unrounded(x, residual, weight, eps):
        y = nk.rms_norm(x.float() + residual.float(), weight.float(), eps=eps)
        return y.to(x.dtype), x + residual

    with nk.use("reference"):
        assert check(right, spec=nk.OLMO2, residual=True, only=["V1", "C3", "G1"]).ok
        assert check(detached, spec=nk.OLMO2, residual=True, only=["C3"]).failures[0].problem.kind == "dresidual"
        assert not check(unrounded, spec=nk.OLMO2, residual=True, backward=False, only=["V1"]).ok
