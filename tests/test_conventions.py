"""Every named spec against its family's own arithmetic, written out plainly, bit for bit: the reference's bits.

The fused kernels add in another order; that they make the same roundings is shown in tests/kernels/cpu/test_rows.py.

Where the family centres, x holds small integers with an integer mean, so that the plain mean and variance are exact
and the roundings compared are those of the convention. On random rows the bounds of tests/rows.py apply instead.
"""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import normkit as nk
from normkit.conventions import NAMED
from normkit.spec import NormSpec
from rows import FLOATS, always, randn, true_norm, unit

C = 64
Formula = Callable[..., Tensor]
PAIRS = list(product(FLOATS, FLOATS))
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    with nk.use("reference"):
        yield


def mean_square(t: Tensor) -> Tensor:
    return t.pow(2).mean(-1, keepdim=True)


def rms(t: Tensor, eps: float) -> Tensor:
    return t * torch.rsqrt(mean_square(t) + eps)


def centred(t: Tensor, eps: float) -> Tensor:
    d = t - t.mean(-1, keepdim=True)
    return d * torch.rsqrt(mean_square(d) + eps)


def llama(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * rms(x.float(), eps).to(x.dtype)


def olmo2(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (w.float() * rms(x.float(), eps)).to(x.dtype)


def gemma(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (rms(x.float(), eps) * (1.0 + w.float())).to(x.dtype)


def gemma3n(x: Tensor, w: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.pow(mean_square(f) + eps, -0.5) * w.float()).to(x.dtype)


def muse_spark(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (rms(x.float(), eps) * (1.0 + w).float()).to(x.dtype)


def t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = rms(x.float(), eps)
    return w * (h.to(w.dtype) if w.dtype in HALVES else h)


def weightless(x: Tensor, w: None, eps: float) -> Tensor:
    return rms(x.float(), eps).to(x.dtype)


def rounded_root(x: Tensor, w: None, eps: float) -> Tensor:
    return x * torch.rsqrt(mean_square(x.float()) + eps).to(x.dtype)


def image_gpt(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(mean_square(x) + eps) * w


def cohere(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (w.float() * centred(x.float(), eps)).to(x.dtype)


def nemotron(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (centred(x.float(), eps) * (w + 1).float()).to(x.dtype)


def deberta(x: Tensor, w: Tensor, eps: float) -> Tensor:
    d = x.float() - x.float().mean(-1, keepdim=True)
    return w * (d / torch.sqrt(mean_square(d) + eps)).to(x.dtype)


def olmo(x: Tensor, w: None, eps: float) -> Tensor:
    return centred(x.float(), eps).to(x.dtype)


def l2(x: Tensor, w: None, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def mamba2(x: Tensor, w: Tensor, eps: float, gate: Tensor) -> Tensor:
    return w * rms(x.float() * silu(gate.float()), eps).to(x.dtype)


def qwen3_next(x: Tensor, w: Tensor, eps: float, gate: Tensor) -> Tensor:
    return ((w * rms(x.float(), eps).to(x.dtype)) * silu(gate.float())).to(x.dtype)


def kimi(x: Tensor, w: Tensor, eps: float, gate: Tensor) -> Tensor:
    return (w.float() * rms(x.float(), eps) * torch.sigmoid(gate.float())).to(x.dtype)


def gated(x: Tensor, w: Tensor, eps: float, gate: Tensor) -> Tensor:
    return (w.float() * rms(x.float(), eps) * silu(gate.float())).to(x.dtype)


FAMILIES: dict[str, Formula] = {
    "TORCH_LAYER_NORM": cohere,
    "TORCH_RMS_NORM": olmo2,
    "OLMO2": olmo2,
    "LLAMA": llama,
    "GEMMA": gemma,
    "GEMMA3N": gemma3n,
    "MUSE_SPARK": muse_spark,
    "T5": t5,
    "WEIGHTLESS_RMS": weightless,
    "ROUNDED_ROOT_RMS": rounded_root,
    "IMAGE_GPT": image_gpt,
    "NEMOTRON": nemotron,
    "COHERE": cohere,
    "DEBERTA": deberta,
    "OLMO": olmo,
    "L2_NORM": l2,
    "MAMBA2": mamba2,
    "QWEN3_NEXT_GATED": qwen3_next,
    "KIMI_GATED": kimi,
    "GATED_RMS": gated,
}
PROMOTED = {"LLAMA", "T5", "IMAGE_GPT", "DEBERTA", "MAMBA2"}


def integers(rows: int, dtype: torch.dtype) -> Tensor:
    """Return rows of small integers with mean 2: every sum a centred norm forms is exact."""
    half = (randn(rows, C // 2, seed=5) * 4).round()
    return torch.cat([half, 4 - half], -1)[:, torch.randperm(C, generator=torch.Generator().manual_seed(1))].to(dtype)


def inputs(spec: NormSpec, x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x = integers(32, x_dtype) if spec.centered else randn(32, C, dtype=x_dtype)
    w = None if spec.weight == "none" else randn(C, seed=1, dtype=w_dtype)
    return x, w, None if spec.gate == "none" else randn(32, C, seed=2, dtype=x_dtype)


def ours(spec: NormSpec, x: Tensor, w: Tensor | None, eps: float, gate: Tensor | None) -> Tensor:
    if gate is not None:
        return nk.gated_rms_norm(x, gate, w, eps=eps, spec=spec)
    return nk.normalize(x, spec, w, eps=eps)


def test_every_named_spec_has_a_formula_here():
    assert set(NAMED) == set(FAMILIES) | {"SCALE_NORM"}  # ScaleNorm divides its gain, see below


@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("eps", [1e-6, 1e-12])
def test_bits_and_dtype_of_each_family(name: str, x_dtype: torch.dtype, w_dtype: torch.dtype, eps: float):
    spec = NAMED[name]
    x, w, gate = inputs(spec, x_dtype, w_dtype)
    expected = FAMILIES[name](x, w, eps) if gate is None else FAMILIES[name](x, w, eps, gate)
    got = ours(spec, x, w, eps, gate)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected), f"{(got != expected).float().mean():.1%} of the elements differ"


@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_output_dtypes(x_dtype: torch.dtype, w_dtype: torch.dtype):
    for name, spec in NAMED.items():
        if name == "SCALE_NORM":
            continue
        expected = torch.promote_types(x_dtype, w_dtype) if name in PROMOTED else x_dtype
        if name == "T5":
            expected = w_dtype  # a half weight decides; a float32 one leaves the float32 value alone
        assert ours(spec, *_five(spec, x_dtype, w_dtype)).dtype == expected, name


def _five(
    spec: NormSpec, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, float, Tensor | None]:
    x, w, gate = inputs(spec, x_dtype, w_dtype)
    return x, w, 1e-6, gate


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("LLAMA", "OLMO2"),
        ("GEMMA", "MUSE_SPARK"),
        ("GEMMA", "OLMO2"),
        ("WEIGHTLESS_RMS", "ROUNDED_ROOT_RMS"),
        ("IMAGE_GPT", "LLAMA"),
        ("DEBERTA", "COHERE"),
        ("NEMOTRON", "COHERE"),
        ("MAMBA2", "GATED_RMS"),
        ("QWEN3_NEXT_GATED", "GATED_RMS"),
        ("KIMI_GATED", "GATED_RMS"),
    ],
)
def test_neighbours_differ_in_bfloat16(one: str, other: str):
    x, w, gate = inputs(NAMED[one], torch.bfloat16, torch.bfloat16)
    assert not torch.equal(ours(NAMED[one], x, w, 1e-6, gate), ours(NAMED[other], x, w, 1e-6, gate))


def test_t5_differs_from_llama_where_dtypes_mix():
    x, w = randn(32, C), randn(C, seed=1, dtype=torch.bfloat16)
    assert ours(NAMED["LLAMA"], x, w, 1e-6, None).dtype == torch.float32
    assert ours(NAMED["T5"], x, w, 1e-6, None).dtype == torch.bfloat16
    x, w = x.bfloat16(), w.float()
    assert not torch.equal(ours(NAMED["LLAMA"], x, w, 1e-6, None), ours(NAMED["T5"], x, w, 1e-6, None))


def test_cast_order_on_the_row_whose_digits_are_known():
    """Fault B2: the same row, weighted before or after the rounding, in bfloat16."""
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0]], dtype=torch.bfloat16)
    w = torch.full((4,), 0.90234375, dtype=torch.bfloat16)
    for add, backend in product((False, True), ("reference", "cpu")):
        for spec, digits in [
            (nk.LLAMA, [0.19628906, 0.59375, 0.98828125, 1.3828125]),
            (nk.OLMO2, [0.19726562, 0.58984375, 0.984375, 1.375]),
        ]:
            with nk.use(backend):
                y = nk.add_rms_norm(x, x * 0, w, spec=spec)[0] if add else nk.rms_norm(x, w, spec=spec)
            torch.testing.assert_close(y.float(), torch.tensor([digits]), rtol=0, atol=1e-8)


def test_gain_of_zero_centred_weights():
    """Faults B4 and B5: a stored .2 in the offset form is the plain form's 1.2, and 0 is the identity."""
    x = randn(8, C)
    assert torch.equal(nk.rms_norm(x, torch.zeros(C), spec=nk.GEMMA), nk.rms_norm(x))
    offset, plain = torch.full((C,), 0.2), 1 + torch.full((C,), 0.2)
    assert torch.equal(nk.rms_norm(x, offset, spec=nk.GEMMA), nk.rms_norm(x, plain))


@pytest.mark.parametrize("dtype", always(FLOATS, lambda dtype: dtype == torch.float32))
@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "COHERE", "OLMO", "NEMOTRON"])
def test_centred_families_stay_within_the_bound_on_random_rows(name: str, dtype: torch.dtype):
    """The families form σ² without a correction; both sides obey the same bound on rows whose mean is not large."""
    x = randn(64, 768, dtype=dtype)
    w = None if name == "OLMO" else randn(768, seed=1, dtype=dtype)
    gain = torch.ones(()) if w is None else 1 + w if name == "NEMOTRON" else w
    truth = true_norm(x, gain, eps=1e-5, centered=True)
    truth.check(nk.normalize(x, NAMED[name], w, eps=1e-5))
    with nk.use("cpu"):
        truth.check(nk.normalize(x, NAMED[name], w, eps=1e-5))
    truth.check(FAMILIES[name](x, w, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_norm_divides_by_the_length(dtype: torch.dtype):
    """Its authors form (g / ‖x‖)·x: three roundings in another order, each at most u, beside the sum's (rows.py)."""
    x, g = randn(32, C, dtype=dtype), torch.tensor(3.0)
    f = x.double()
    expected = 3.0 * f / f.norm(dim=-1, keepdim=True).clamp(min=1e-5)
    got = nk.normalize(x, nk.SCALE_NORM, g, eps=1e-5)
    assert got.dtype == dtype
    bound = (((C + 3) / 2 + 4) * unit(torch.float32) * 1.01 + unit(dtype) * (dtype != torch.float32)) * expected.abs()
    assert bool(
        ((got.double() - expected).abs() <= bound * 1.01 + torch.finfo(dtype).tiny * torch.finfo(dtype).eps).all()
    )
