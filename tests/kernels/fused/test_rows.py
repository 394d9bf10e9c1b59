"""The fused rows forward: against float64, and bit by bit against the roundings that a spec declares."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import BACKEND, INTERPRETED, LONG, costly
from normkit.kernels.rounding import HALVES
from rows import FLOATS, adversarial, always, compiled, quick, randn, true_norm

KINDS = {"layer": nk.TORCH_LAYER_NORM, "rms": nk.TORCH_RMS_NORM}
WIDTHS = (1, 3, 16, 63, 64, 65, 127, 768, 4096, 4097, 10000)
SPECS = {
    "layer": nk.TORCH_LAYER_NORM,
    "nemotron": nk.NEMOTRON,
    "rms": nk.TORCH_RMS_NORM,
    "llama": nk.LLAMA,
    "gemma": nk.GEMMA,
    "muse": nk.MUSE_SPARK,
    "t5": nk.T5,
    "rounded, not promoted": nk.NormSpec(cast="first"),
    "rounded, one added in float32": nk.NormSpec(cast="first", output="promote", weight="one_plus"),
    "weighted, then promoted": nk.NormSpec(output="promote"),
}
BF, HF, F = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", quick(WIDTHS, lambda n: n in (3, 65, 4097)))
@pytest.mark.parametrize("kind", KINDS)
def test_random_rows_lie_within_the_bound(kind: str, n: int, dtype: torch.dtype):
    x, w, b = randn(7, n, dtype=dtype), randn(n, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    y = nk.normalize(x, KINDS[kind], w, b, eps=1e-5)
    assert y.dtype == dtype
    true_norm(x, w, b, eps=1e-5, centered=kind == "layer").check(y)


@pytest.mark.parametrize(
    ("n", "eps"),  # no GPU program holds a row of the last width
    [*itertools.product([3, 127, 4096, 4097], [0.0, 1e-30, 1e-12, 1e-5]), pytest.param(40001, 1e-12, marks=LONG)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_rows_lie_within_the_same_bound(kind: str, n: int, eps: float):
    rows = adversarial(n)
    for size in (1e-30, 1e-42):
        rows[f"{size}"] = (rows["1e18"].double() * 1e-18 * size).float()
    for name, x in rows.items():
        if name in ("zero", "constant") and eps < 1e-12:
            continue  # 0/0, or rounding over rounding
        y = nk.normalize(x, KINDS[kind], eps=eps)
        try:
            true_norm(x, eps=eps, centered=kind == "layer").check(y)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("eps", [1e-42, 1e31, 3e38, 1e39, 1e60])
def test_an_epsilon_outside_float32(eps: float):
    """It is brought into range with the row: neither 0 nor inf may take its place."""
    scale = eps**0.5
    for kind, spec in KINDS.items():
        for share in (1.0, 1e-10):  # as large as √ε, and far below it
            x = (randn(3, 64, dtype=torch.float64) * min(scale, 1e30) * share).float()
            y = nk.normalize(x, spec, eps=eps)
            assert y.abs().max() > share / 10
            true_norm(x, eps=eps, centered=kind == "layer").check(y)


@pytest.mark.parametrize("n", [200, pytest.param(17001, marks=LONG)])  # no GPU program holds a row of the last width
@pytest.mark.parametrize("kind", KINDS)
def test_written_over_x_it_has_the_same_bits(kind: str, n: int):
    """An extreme row is read once more, by whoever writes a part of it."""
    x, w = randn(3, n), randn(n, seed=1)
    x[1] *= 1e30
    expected = nk.normalize(x, KINDS[kind], w, eps=1e-6)
    assert nk.normalize(x, KINDS[kind], w, eps=1e-6, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_stays_in_its_row(kind: str):
    x = randn(9, 100)
    clean = nk.normalize(x, KINDS[kind], eps=1e-6)
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = x.clone()
        spoilt[4, 50] = value
        y = nk.normalize(spoilt, KINDS[kind], eps=1e-6)
        assert y[4, 50].isnan()
        assert torch.equal(y[:4], clean[:4])
        assert torch.equal(y[5:], clean[5:])
        with nk.use("reference"):
            same = nk.normalize(spoilt, KINDS[kind], eps=1e-6)
        assert torch.equal(y[4].isnan(), same[4].isnan())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_give_zero_and_constant_rows_the_bias(kind: str, dtype: torch.dtype):
    w, b = randn(65, seed=1, dtype=dtype), randn(65, seed=2, dtype=dtype)
    assert not nk.normalize(torch.zeros(3, 65, dtype=dtype), KINDS[kind], eps=1e-6).any()
    if kind == "layer":
        x = torch.full((3, 65), 7.1, dtype=dtype)
        assert torch.equal(nk.normalize(x, nk.TORCH_LAYER_NORM, w, b, eps=1e-6), b.expand(3, 65))


def normalised(x: Tensor, spec: nk.NormSpec) -> Tensor:
    """Return x̂ in float32: widening x is exact, so these are the bits that the kernel for x's own dtype rounds."""
    bare = nk.NormSpec(centered=spec.centered, statistic=spec.statistic, weight="none")
    order = as_summed(x)
    y = torch.empty(x.shape)
    y[:, order] = nk.normalize(x.float()[:, order], bare, eps=1e-6)
    return y


def as_summed(x: Tensor) -> Tensor:
    """Return the order in which float32 is summed as x is: on a CPU the even ones of 32 come first in bfloat16."""
    columns = torch.arange(x.shape[1])
    whole = x.shape[1] // 64 * 64
    if INTERPRETED or x.is_cuda or x.dtype != BF:
        return columns
    return torch.cat([columns[:whole].view(-1, 16, 2).mT.flatten(), columns[whole:]])


def as_declared(x: Tensor, spec: nk.NormSpec, w: Tensor, b: Tensor | None) -> Tensor:
    """Weigh, shift and round x̂ as the spec's text says, each operation rounded by a plain operator."""
    xhat = normalised(x, spec)
    gain = {"plain": w, "one_plus": 1 + w.float(), "one_plus_rounded": 1 + w}[spec.weight]
    if spec.cast == "last":
        # A kernel multiplies and adds in one rounding: in float64 the product is exact.
        y = xhat * gain.float() if b is None else (xhat.double() * gain.double() + b.double()).float()
        out = x.dtype
        if spec.output == "promote":
            out = torch.promote_types(x.dtype, w.dtype)
            out = out if b is None else torch.promote_types(out, b.dtype)
        return y.to(out)
    first = x.dtype
    if spec.cast == "t5":
        first = w.dtype if w.dtype in HALVES else torch.float32
    y = gain * xhat.to(first)
    if b is not None:
        y = (y.double() + b.double()).float() if first == F and y.dtype == F else y + b
    return y if spec.output == "promote" else y.to(x.dtype)


DTYPES = [(F, F, F), (BF, BF, None), (BF, F, BF), (HF, BF, None)]


@pytest.mark.parametrize(("x_dtype", "w_dtype", "b_dtype"), always(DTYPES, lambda dtypes: dtypes == (BF, F, BF)))
@pytest.mark.parametrize("name", compiled(SPECS, ("llama", "t5").__contains__))
def test_every_rounding_is_the_declared_one(
    name: str, x_dtype: torch.dtype, w_dtype: torch.dtype, b_dtype: torch.dtype | None
):
    spec, n = SPECS[name], 200
    x, w = randn(64, n, dtype=x_dtype), randn(n, seed=1, dtype=w_dtype)
    b = None if b_dtype is None else randn(n, seed=2, dtype=b_dtype)
    y, expected = nk.normalize(x, spec, w, b, eps=1e-6), as_declared(x, spec, w, b)
    with nk.use("reference"):
        reference = nk.normalize(x, spec, w, b, eps=1e-6)
    assert y.dtype == expected.dtype == reference.dtype
    if spec.cast == "t5" and b is not None and w_dtype == F:
        # Nothing is rounded first there, so the kernel fuses the product with the sum: one rounding less.
        torch.testing.assert_close(y, expected, rtol=3e-7, atol=3e-7)
    else:
        assert torch.equal(y, expected), f"{(y != expected).float().mean():.2%} of the elements differ"
    # The reference's x̂ is another sum's: where it falls on the other side of a tie, one rounding differs.
    rounds = y.dtype in HALVES or (spec.cast == "first" and x_dtype in HALVES)
    close = 2.0**-6 if rounds else 2e-6
    torch.testing.assert_close(y.float(), reference.float(), rtol=close, atol=close)
    if rounds:
        assert (y != reference).float().mean() < 0.01


@pytest.mark.parametrize(("w_dtype", "b_dtype"), always([(BF, F), (F, BF), (HF, BF)], lambda d: d == (BF, F)))
def test_a_bias_that_promotes_joins_after_the_product_is_rounded(w_dtype: torch.dtype, b_dtype: torch.dtype):
    """w·x̂ is rounded to the promoted dtype of x and w, whatever the bias then makes of it."""
    x, w, b = randn(64, 200, dtype=BF), randn(200, seed=1, dtype=w_dtype), randn(200, seed=2, dtype=b_dtype)
    y = nk.normalize(x, nk.LLAMA, w, b, eps=1e-6)
    assert torch.equal(y, w * normalised(x, nk.LLAMA).to(BF) + b)


@costly
def test_mixed_dtypes_tell_the_specs_apart():
    """What each pair of conventions disagrees on shows in bits: the tests above could tell them apart."""
    x, w = randn(64, 200, dtype=BF), randn(200, seed=1, dtype=BF)
    for one, other in [("rms", "llama"), ("gemma", "muse"), ("rounded, one added in float32", "gemma")]:
        a, b = (nk.normalize(x, SPECS[name], w, eps=1e-6).float() for name in (one, other))
        assert (a != b).float().mean() > 0.05, (one, other)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 1, 40), (4, 1, 1)])
def test_weights_of_one_number_or_one_a_row(shape: tuple[int, ...]):
    x, w = randn(4, 3, 40), randn(*shape, seed=1)
    for spec in KINDS.values():
        full = nk.normalize(x, spec, w.expand(4, 3, 40).contiguous(), eps=1e-6)
        assert torch.equal(nk.normalize(x, spec, w, eps=1e-6), full)


@pytest.mark.parametrize(
    ("x_dtype", "r_dtype"), always([(F, F), (BF, BF), (BF, F), (F, BF), (HF, BF)], lambda pair: pair[0] == pair[1])
)
@pytest.mark.parametrize(
    ("alpha", "count", "n"), [(1.0, 33, 200), (2.7, 33, 200), pytest.param(2.7, 3, 20001, marks=LONG)]
)
def test_residual_add_is_the_add_and_then_the_norm(
    x_dtype: torch.dtype, r_dtype: torch.dtype, alpha: float, count: int, n: int
):
    x, r = randn(count, n, dtype=x_dtype), randn(count, n, seed=1, dtype=r_dtype)
    w = randn(n, seed=2, dtype=x_dtype)
    for add, norm, spec in [
        (nk.add_rms_norm, nk.rms_norm, nk.TORCH_RMS_NORM),
        (nk.add_layer_norm, nk.layer_norm, nk.TORCH_LAYER_NORM),
    ]:
        y, s = add(x, r, w, alpha=alpha, branch_scale=alpha, spec=spec, eps=1e-6)
        scaled = (r, x) if alpha == 1 else (r.float() * alpha, x.float() * alpha)
        assert torch.equal(s, (scaled[0] + scaled[1]).to(torch.promote_types(x_dtype, r_dtype)))
        assert torch.equal(y, norm(s.float(), w.float(), eps=1e-6).to(x_dtype))


@costly
def test_residual_add_rounds_first_to_the_branchs_dtype():
    """A float32 stream does not change where LLAMA rounds: to x's dtype, before the weight."""
    x, r, w = randn(33, 200, dtype=BF), randn(33, 200, seed=1), randn(200, seed=2, dtype=BF)
    y, s = nk.add_rms_norm(x, r, w, spec=nk.LLAMA, eps=1e-6)
    assert torch.equal(y, w * normalised(s, nk.LLAMA).to(BF))


def test_bfloat16_rounds_to_nearest_even_and_the_cpu_flushes_what_has_no_normal_number():
    """The rounding of the CPU's one instruction, which processors without it copy by integers. GPUs have subnormals."""
    x = torch.tensor([[1.0, -1.0]]).repeat(1, 32)
    gains = torch.tensor([1.00390625, 1.01171875, 3.3895314e38, 3.4e38, 1e-38, 1.1754944e-38, torch.inf, torch.nan])
    w = gains.repeat_interleave(2).repeat(4)
    y = nk.normalize(x.bfloat16(), nk.TORCH_RMS_NORM, w, eps=0.0)
    expected = (x * w).bfloat16()
    if BACKEND == "cpu":
        expected = torch.where(expected.abs() < torch.finfo(BF).smallest_normal, 0 * expected, expected)
        assert y[0, 8] == 0
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
