"""Which kernel runs, and why, said beforehand."""

import pytest
import torch

import normkit as nk
from rows import randn


def test_an_ordinary_call_runs_fused():
    told = nk.explain(randn(4, 32), nk.LLAMA, randn(32))
    assert (told.kernel, told.rejected, told.batch_invariant) == ("cpu", (), True)
    assert "A row's bits depend on that row alone" in str(told)


@pytest.mark.parametrize("spec", [nk.GATED_RMS, nk.MAMBA2, nk.QWEN3_NEXT_GATED, nk.KIMI_GATED])
def test_a_gated_norm_runs_fused_with_a_gate_and_without(spec: nk.NormSpec):
    x, w = randn(4, 32), randn(32).requires_grad_()
    for gate, size in ((randn(4, 32), None), (randn(4, 32), 8), (None, None)):
        assert nk.explain(x, spec, w, gate=gate, group_size=size).kernel == "cpu"
    told = nk.explain(x, spec, w, gate=randn(4, 32).double())
    assert told.kernel == "reference"
    assert "gate is torch.float64" in str(told)


def test_what_explains_no_gated_call_in_words():
    x = randn(4, 32)
    for message, call in (
        ("need a gated spec such as nk.MAMBA2", lambda: nk.explain(x, nk.LLAMA, gate=x)),
        ("need a gated spec such as nk.MAMBA2", lambda: nk.explain(x, nk.LLAMA, group_size=8)),
        ("over the last axis, got axis=0", lambda: nk.explain(x, nk.MAMBA2, axis=0, gate=x)),
        (r"gate must have x's shape \(4, 32\)", lambda: nk.explain(x, nk.MAMBA2, gate=x[0])),
        ("group_size must divide the width 32, got 5", lambda: nk.explain(x, nk.MAMBA2, gate=x, group_size=5)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("x", "spec", "why"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), nk.LLAMA, "float64"),
        (torch.zeros(2, 8), nk.GEMMA3N, "1/√"),
        (torch.zeros(0, 8), nk.LLAMA, "empty"),
    ],
)
def test_what_no_kernel_takes_is_the_reference_with_the_reason(x: torch.Tensor, spec: nk.NormSpec, why: str):
    told = nk.explain(x, spec)
    assert told.kernel == "reference"
    assert not told.batch_invariant
    ((name, reason),) = told.rejected
    assert name == "cpu"
    assert why in reason
    assert reason in str(told)


def test_under_a_transform_the_reference_runs():
    seen: list[nk.Explanation] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(nk.explain(x, nk.LLAMA))
        return nk.rms_norm(x)

    torch.func.vmap(look)(randn(2, 3, 8))
    assert seen[0].kernel == "reference"
    assert nk.explain(torch.zeros(2, 8, device="meta"), nk.LLAMA).kernel == "reference"


def test_a_backend_asked_for_by_name_says_why_it_cannot():
    with nk.use("reference"):
        assert nk.explain(randn(2, 8), nk.LLAMA).reason == "asked for by name"
    with nk.use("cpu"), pytest.raises(ValueError, match="float64"):
        nk.explain(torch.zeros(2, 8, dtype=torch.float64), nk.LLAMA)


def test_norms_across_positions():
    x = randn(4, 6, 8)
    batch = nk.explain(x, nk.TORCH_LAYER_NORM, coverage="batch")
    assert (batch.kernel, batch.batch_invariant) == ("cpu", False)
    assert "depend on the batch" in str(batch)
    sample = nk.explain(x.mT, nk.TORCH_LAYER_NORM, coverage="group", channel_axis=1)
    assert (sample.kernel, sample.batch_invariant) == ("cpu", True)
    assert "A sample's bits" in str(sample)
    apart = nk.explain(x[..., ::2], nk.TORCH_LAYER_NORM, coverage="instance")
    assert (apart.kernel, apart.batch_invariant) == ("reference", False)
    assert "side by side" in str(apart)
    for options, why in [
        ({"coverage": "switch"}, "unknown coverage"),
        ({"coverage": "batch", "channel_axis": 0}, "batch axis"),
    ]:
        with pytest.raises(ValueError, match=why):
            nk.explain(x, nk.TORCH_LAYER_NORM, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="TORCH_LAYER_NORM"):
        nk.explain(x, nk.LLAMA, coverage="batch")
