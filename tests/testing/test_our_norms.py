"""normkit's own norms hold every check: the corrected two-pass everywhere, and of the fused kernels the bits too."""

from __future__ import annotations

import pytest
import torch

import normkit as nk
from normkit.testing import check
from rows import always

RMS = ("OLMO2", "LLAMA", "GEMMA", "GEMMA3N", "MUSE_SPARK", "T5", "WEIGHTLESS_RMS", "ROUNDED_ROOT_RMS", "IMAGE_GPT")
LAYER = ("TORCH_LAYER_NORM", "NEMOTRON", "DEBERTA", "OLMO")


def subject(spec: nk.NormSpec):
    if spec.centered:
        return lambda x, weight, bias, eps: nk.layer_norm(x, weight, bias, eps=eps, spec=spec)
    return lambda x, weight, eps: nk.rms_norm(x, weight, eps=eps, spec=spec)


ALWAYS = {"GEMMA", "ROUNDED_ROOT_RMS", "TORCH_LAYER_NORM"}


@pytest.mark.parametrize("name", always([*RMS, *LAYER], ALWAYS.__contains__))
def test_the_reference(name: str):
    spec = getattr(nk, name)
    # Squares formed in float16 overflow where the spec asks for them in float16.
    dtypes = (torch.float32, torch.bfloat16) if name == "IMAGE_GPT" else (torch.float32, torch.bfloat16, torch.float16)
    with nk.use("reference"):
        found = check(subject(spec), spec=spec, bias=spec.centered, strict=True, dtypes=dtypes)
    # Its product with the rounded root is float16's, and so is autograd's Σdy·x: 68 values of 1e4 leave its range.
    beyond = {"G: 1e4 ± .005", "G: mean 2000, deviation 1"} if name == "ROUNDED_ROOT_RMS" else set()
    assert set(found.failed) == beyond, found.report()


@pytest.mark.parametrize("name", always(["OLMO2", "TORCH_LAYER_NORM"], lambda name: False))
def test_the_fused_kernels_to_the_bit(name: str):
    spec = getattr(nk, name)
    found = check(subject(spec), spec=spec, bias=spec.centered, strict=True, bits=True)
    assert found.ok, found.report()


@pytest.mark.parametrize("name", always(["LLAMA", "GEMMA", "T5"], lambda name: False))
def test_the_fused_kernels_of_other_conventions_in_bfloat16(name: str):
    # One dtype: every convention, dtype and mixture is a kernel of its own, compiled for seconds the first time.
    spec = getattr(nk, name)
    checks = ["V", "A", "B2", "D", "G", "C", "I", "L", "U"]
    found = check(subject(spec), spec=spec, strict=True, bits=True, dtypes=(torch.bfloat16,), only=checks)
    assert found.ok, found.report()


@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_residual_forms(backend: str):
    def add(x, residual, weight, eps):
        return nk.add_rms_norm(x, residual, weight, eps=eps)

    with nk.use(backend):
        found = check(
            add,
            spec=nk.TORCH_RMS_NORM,
            residual=True,
            bits=backend == "auto",
            dtypes=(torch.bfloat16,),
            only=["V", "B", "C1", "C3", "C5", "D5", "G", "I", "L"],
        )
    assert found.ok, found.report()


@pytest.mark.parametrize("made", [nk.RMSNorm, pytest.param(nk.LayerNorm, marks=pytest.mark.slow)])
def test_modules(made: type[torch.nn.Module]):
    spec = nk.TORCH_LAYER_NORM if made is nk.LayerNorm else nk.TORCH_RMS_NORM
    found = check(made(40), spec=spec, dtypes=(torch.float32,), strict=True)
    assert found.ok, found.report()
    with nk.use("reference"):
        assert check(made, spec=spec, dtypes=(torch.float32,), only=["V", "G1"]).ok
