"""gated_rms_norm: gate before and after, groups, weights of every shape."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import silu

import normkit as nk
from normkit.kernels.rounding import result_dtype
from rows import FLOATS, randn

# On the reference where many dtypes meet; tests/kernels/cpu/test_gated.py is about the kernels.
GATE: Any = {"gate": "after", "activation": "silu"}
on_the_reference = pytest.mark.usefixtures("reference")
SPECS = {"gated": nk.GATED_RMS, "mamba2": nk.MAMBA2, "qwen": nk.QWEN3_NEXT_GATED, "kimi": nk.KIMI_GATED}


@pytest.fixture
def reference() -> Iterator[None]:
    with nk.use("reference"):
        yield


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return randn(5, 3, 24, dtype=dtype), randn(5, 3, 24, seed=1, dtype=dtype), randn(24, seed=2, dtype=dtype)


@on_the_reference
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 4, 12, 24])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_groups_are_norms_of_their_own(spec: nk.NormSpec, size: int, dtype: torch.dtype):
    x, g, w = inputs(dtype)
    parts = [
        nk.gated_rms_norm(x[..., i : i + size], g[..., i : i + size], w[i : i + size], spec=spec)
        for i in range(0, 24, size)
    ]
    got = nk.gated_rms_norm(x, g, w, group_size=size, spec=spec)
    if dtype == torch.float32:  # a group is a strided view there: its sum may be taken in another order
        torch.testing.assert_close(got, torch.cat(parts, -1), rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(got, torch.cat(parts, -1), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert not torch.allclose(got, nk.gated_rms_norm(x, g, w, spec=spec), rtol=1e-2) or size == 24


def test_place_and_activation_by_the_formula():
    x, g, w = inputs(torch.float64)

    def rms(t: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    f = partial(nk.gated_rms_norm, x, g, w)
    for got, expected in [
        (f(), rms(x) * w * silu(g)),
        (f(gate_first=False, activation="sigmoid"), rms(x) * w * g.sigmoid()),
        (f(gate_first=True), rms(x * silu(g)) * w),
        (f(gate_first=True, activation="sigmoid"), rms(x * g.sigmoid()) * w),
        (f(spec=nk.MAMBA2), rms(x * silu(g)) * w),
        (f(spec=nk.MAMBA2, gate_first=False), rms(x) * w * silu(g)),
        (f(spec=nk.KIMI_GATED, activation="silu", gate_first=True), rms(x * silu(g)) * w),
    ]:
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@on_the_reference
def test_the_places_differ_by_more_than_rounding():
    x, g, w = inputs()
    assert (nk.gated_rms_norm(x, g, w, gate_first=True) - nk.gated_rms_norm(x, g, w)).abs().max() > 0.1


@on_the_reference
def test_roundings_of_a_gate_after_a_rounded_weight():
    """Qwen3-Next rounds x̂, then w·x̂, then the gated product; the default rounds once."""
    x, g, w = inputs(torch.bfloat16)
    f = x.float()
    xhat = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    weighted = (w.float() * xhat.float()).bfloat16()
    expected = (weighted.float() * silu(g.float())).bfloat16()
    assert torch.equal(nk.gated_rms_norm(x, g, w, spec=nk.QWEN3_NEXT_GATED), expected)
    assert not torch.equal(nk.gated_rms_norm(x, g, w), expected)


@on_the_reference
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_output_dtype_follows_the_spec_wherever_the_gate_is(spec: nk.NormSpec, gate_first: bool):
    x, g, w = inputs(torch.bfloat16)
    promotes = spec.output == "promote"
    for gate in (g, g.float(), None):
        y = nk.gated_rms_norm(x, gate, w.float(), spec=spec, gate_first=gate_first)
        assert y.dtype == (torch.float32 if promotes else torch.bfloat16)
        assert nk.gated_rms_norm(x, gate, w, spec=spec, gate_first=gate_first).dtype == torch.bfloat16


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        nk.NormSpec(cast="t5", output="promote", **GATE),
        nk.NormSpec(weight="one_plus", cast="first", output="promote", **GATE),
        nk.NormSpec(weight="one_plus_rounded", cast="first", output="promote", **GATE),
        nk.NormSpec(output="promote", **GATE),
    ],
    ids=lambda spec: spec.code,
)
@pytest.mark.parametrize("w_dtype", FLOATS)
@on_the_reference
def test_a_gate_changes_no_output_dtype(spec: nk.NormSpec, w_dtype: torch.dtype, gate_first: bool):
    """Promotion is of x, weight and statistics; the gate's own dtype changes nothing."""
    for x_dtype in FLOATS:
        x, g, w = (t.to(d) for t, d in zip(inputs(), (x_dtype, torch.float32, w_dtype), strict=True))
        expected = result_dtype(spec, x_dtype, w_dtype, None)
        assert nk.gated_rms_norm(x, g, w, spec=spec, gate_first=gate_first).dtype == expected
        assert nk.gated_rms_norm(x, None, w, spec=spec).dtype == expected


def test_without_a_gate_it_is_the_norm():
    x, _, w = inputs(torch.bfloat16)
    assert torch.equal(nk.gated_rms_norm(x, None, w), nk.rms_norm(x, w))
    assert torch.equal(nk.gated_rms_norm(x, None, w, spec=nk.MAMBA2), nk.rms_norm(x, w, spec=nk.LLAMA))


@on_the_reference
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("shape", [(24,), (3, 24), (5, 1, 24), (1,), (3, 1), ()])
def test_weights_that_broadcast(shape: tuple[int, ...], size: int | None):
    x, g, _ = inputs()
    w = randn(*shape, seed=7)
    torch.testing.assert_close(
        nk.gated_rms_norm(x, g, w, group_size=size), nk.gated_rms_norm(x, g, group_size=size) * w
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradcheck(spec: nk.NormSpec):
    x, g, w = (t[:2, 0, :6] if t.dim() == 3 else t[:6] for t in inputs(torch.float64))
    leaves = [t.clone().requires_grad_() for t in (x, g, w)]
    f = partial(nk.gated_rms_norm, group_size=3, spec=spec)
    assert gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, leaves)


@pytest.mark.slow
def test_compiled_with_overrides():
    """An override makes a spec inside the traced code."""
    x, g, w = inputs()
    f = partial(nk.gated_rms_norm, group_size=4, gate_first=True, activation="sigmoid")
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x, g, w), f(x, g, w))


def test_zero_sizes_and_strides():
    x, g, w = inputs()
    assert nk.gated_rms_norm(x[:0], g[:0], w, group_size=4).shape == (0, 3, 24)
    assert nk.gated_rms_norm(x[..., :0], g[..., :0], w[:0]).shape == (5, 3, 0)
    strided = randn(5, 3, 48)[..., ::2]
    torch.testing.assert_close(
        nk.gated_rms_norm(strided, g, w, group_size=8), nk.gated_rms_norm(strided.contiguous(), g, w, group_size=8)
    )


def test_bad_input_in_words():
    x, g, w = inputs()
    f = nk.gated_rms_norm
    cases: list[tuple[type[Exception], str, Callable[[], Tensor]]] = [
        (ValueError, r"gate must have x's shape \(5, 3, 24\), got \(24,\)", lambda: f(x, g[0, 0], w)),
        (ValueError, "group_size must divide the width 24, got 5", lambda: f(x, g, w, group_size=5)),
        (ValueError, "group_size must divide the width 24, got 0", lambda: f(x, g, w, group_size=0)),
        (ValueError, "group_size must divide the width 24, got -4", lambda: f(x, g, w, group_size=-4)),
        (ValueError, "expected a gated rms spec.*MAMBA2", lambda: f(x, g, w, spec=nk.LLAMA)),
        (ValueError, "NormSpec.activation", lambda: f(x, g, w, activation="relu")),  # type: ignore[arg-type]
        (TypeError, "gate must be float16.*int64", lambda: f(x, g.long(), w)),
        (ValueError, "weight of shape .* fits neither", lambda: f(x, g, w[:4], group_size=4)),
        (ValueError, "eps=None", lambda: f(x, g, w, eps=None)),  # type: ignore[arg-type]
        (ValueError, "at least one axis", lambda: f(x[0, 0, 0], g[0, 0, 0], None)),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
