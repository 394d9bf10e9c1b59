"""PyTorch's norms and the Hugging Face formula: what holds, and exactly what does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.testing import check
from testing import norms

# Σx² leaves float32's range from 3e18 at width 38 on; none of these rescales.
OVERFLOW = {"V: 1e18", "G: 1e18"}
# A plain two-pass on a row whose mean is 2·10⁶ deviations from 0, and dw at width 1 (pytorch#188375).
PLAIN_TWO_PASS = {"V: 1e4 ± .005", "G: 1e4 ± .005", "A13"}
# torch.native_layer_norm keeps mean and 1/σ in the input's half type for the backward on the CPU.
ROUNDED_STATISTICS = {"G1", "A15b", "G: mean 2000, deviation 1", "G: one outlier of 1e3", "G: 1e-20"}


def test_rms_norm():
    found = check(nn.RMSNorm, spec=nk.TORCH_RMS_NORM)
    assert set(found.failed) == OVERFLOW, found.report()


def test_the_hugging_face_formula():
    found = check(norms.hugging_face, spec=nk.LLAMA)
    assert set(found.failed) == OVERFLOW, found.report()


def test_layer_norm_in_float32():
    found = check(nn.LayerNorm, spec=nk.TORCH_LAYER_NORM, dtypes=(torch.float32,))
    assert set(found.failed) == OVERFLOW | PLAIN_TWO_PASS, found.report()


@pytest.mark.slow
def test_layer_norm_in_halves_loses_digits_in_the_backward():
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    _, mean, rstd = torch.native_layer_norm(x, (4,), None, None, 1e-5)
    assert mean.dtype == rstd.dtype == torch.bfloat16, "torch no longer rounds its statistics: expect fewer failures"
    found = check(nn.LayerNorm, spec=nk.TORCH_LAYER_NORM)
    assert set(found.failed) == OVERFLOW | PLAIN_TWO_PASS | ROUNDED_STATISTICS, found.report()
    forward = check(nn.LayerNorm, spec=nk.TORCH_LAYER_NORM, backward=False)
    assert set(forward.failed) == {"V: 1e18", "V: 1e4 ± .005"}


def test_a_module_is_checked_at_its_own_width_and_epsilon():
    module = nn.RMSNorm(40, eps=1e-3)
    before = module.weight.detach().clone()
    found = check(module, spec=nk.TORCH_RMS_NORM, dtypes=(torch.float32,))
    assert set(found.failed) == {"G: 1e18"}, found.report()  # 40 squares still fit; their gradient's cube does not
    assert "D10" in found.skipped
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    assert not check(module, spec=nk.GEMMA, backward=False, only=["V1"]).ok, "1 + w is another norm"


def test_a_module_that_hides_epsilon_must_be_told():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return norms.hugging_face(x, self.weight, 1e-4)

    with pytest.raises(ValueError, match="shows no ε"):
        check(Hidden(), spec=nk.LLAMA)
    assert check(Hidden(), spec=nk.LLAMA, eps=1e-4, only=["V1", "A18", "G1"]).ok
    assert not check(Hidden(), spec=nk.LLAMA, eps=1e-6, only=["A18"]).ok


def test_what_cannot_be_checked_is_refused_in_words():
    with pytest.raises(TypeError, match="expected a function, an nn"):
        check(3)
    with pytest.raises(TypeError, match="got the class str"):
        check(str)
    with pytest.raises(ValueError, match="has a gate"):
        check(norms.hugging_face, spec=nk.MAMBA2)
    with pytest.raises(ValueError, match="no check is called 'Z9'"):
        check(norms.hugging_face, only=["Z9"])


def test_the_printed_report_says_what_holds_and_shows_the_table():
    text = str(check(norms.hugging_face, spec=nk.LLAMA, dtypes=(torch.float32, torch.bfloat16)))
    assert "holds B2: Rounding before or after the weight" in text
    assert "note I2" in text, "PyTorch's sums order themselves by stride"
    assert "error on random rows in ULP, largest (mean)" in text


def test_bits_are_required_only_when_asked_for():
    loose = check(norms.hugging_face, spec=nk.LLAMA, backward=False, only=["I"], dtypes=(torch.float32,))
    assert loose.ok
    assert "I2" in {note.id for note in loose.notes}
    strict = check(norms.hugging_face, spec=nk.LLAMA, backward=False, only=["I"], dtypes=(torch.float32,), bits=True)
    assert "I2" in strict.failed
