"""layer_norm, rms_norm, l2_norm, scale_norm, normalize: values, shapes, faults, words."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

import normkit as nk
from rows import FLOATS, adversarial, always, randn, true_norm, unit

WIDTHS = (1, 3, 127, 768, 1000, 4096)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {"layer": nk.layer_norm, "rms": nk.rms_norm}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_random_rows_lie_within_the_bound_and_so_does_torch(kind: str, n: int, dtype: torch.dtype):
    for seed in range(3):
        x = randn(20, n, seed=seed, dtype=dtype)
        w, b = randn(n, seed=seed + 10, dtype=dtype), randn(n, seed=seed + 20, dtype=dtype)
        truth = true_norm(x, w, b, eps=1e-5, centered=kind == "layer")
        got = FUNCTIONS[kind](x, w, b, eps=1e-5)
        assert got.dtype == dtype
        truth.check(got)
        if kind == "layer":
            truth.check(F.layer_norm(x, (n,), w, b))
            continue
        with nk.use("reference"):
            assert torch.equal(nk.rms_norm(x, w, eps=1e-5), F.rms_norm(x, (n,), w, 1e-5))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5])
@pytest.mark.parametrize("n", [3, 127, 768, 4096])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_adversarial_rows_lie_within_the_same_bound(kind: str, n: int, eps: float):
    for name, x in adversarial(n).items():
        if eps == 0 and name in ("zero", "constant"):
            continue  # 0/0 or, centred, rounding over rounding
        w, b = randn(n, seed=1), randn(n, seed=2)
        truth = true_norm(x, w, b, eps=eps, centered=kind == "layer")
        try:
            truth.check(FUNCTIONS[kind](x, w, b, eps=eps))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_adversarial_rows_in_halves(kind: str, dtype: torch.dtype):
    for name, x in adversarial(768).items():
        half = x.to(dtype)
        if not half.isfinite().all():
            continue
        truth = true_norm(half, eps=1e-6, centered=kind == "layer")
        try:
            truth.check(FUNCTIONS[kind](half, eps=1e-6))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_one_pass_variance_shows_on_these_rows():
    """Fault A1: without a correction, rows of small variance around a large mean leave the bound."""
    x = adversarial(768)["large mean"]
    truth = true_norm(x, eps=1e-5, centered=True)
    d = x - x.mean(-1, keepdim=True)
    plain = d * (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    one_pass = d * (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square() + 1e-5).rsqrt()
    for wrong in (plain, one_pass):
        with pytest.raises(AssertionError, match="worst excess"):
            truth.check(wrong)


def test_faults_with_known_digits():
    close = {"rtol": 0, "atol": 5e-7}
    for start in (40000.0, 80000.0):  # A2
        y = nk.layer_norm(start + torch.arange(4.0))
        torch.testing.assert_close(y, torch.tensor([-1.341635, -0.447212, 0.447212, 1.341635]), **close)
    x = torch.full((10240,), 256.0)  # A4
    x[-1] = 255.0
    y = nk.layer_norm(x)
    torch.testing.assert_close(y[[0, -1]], torch.tensor([0.0094124, -96.373]), rtol=1e-5, atol=0)
    for value in (3000.0, 300.0):  # A5, A6
        assert (nk.rms_norm(torch.full((64,), value, dtype=torch.float16)) == 1).all()
    row = torch.full((8,), 1e-3)  # A18
    torch.testing.assert_close(nk.rms_norm(row, eps=1e-6), torch.full((8,), 0.707107), **close)
    torch.testing.assert_close(nk.rms_norm(row, eps=1e-5), torch.full((8,), 0.301511), **close)


def test_large_mean_of_the_largest_fault():
    """A1: (1024, 32768) around 100 with deviation .01, and mean 2000: in float64's company and no wider than 1."""
    for x in (100 + 0.01 * randn(64, 32768), 2000 + randn(5, 4)):
        y = nk.layer_norm(x)
        true_norm(x, eps=1e-5, centered=True).check(y)
        assert y.var(-1, correction=0).max() <= 1 + 1e-5


@pytest.mark.parametrize(
    ("row", "eps"),
    [
        (torch.tensor([14.0, 14.0]), 1e-6),  # A11
        (torch.tensor([1e6]), 1e-5),  # A13
        (torch.full((64,), 7.1, dtype=torch.float16), 1e-12),  # A15
        (torch.full((1000,), 0.1, dtype=torch.bfloat16), 1e-12),
    ],
)
def test_constant_rows_give_exactly_the_bias(row: Tensor, eps: float):
    x = row.clone().requires_grad_()
    w = randn(len(row), dtype=row.dtype).requires_grad_()
    b = torch.full_like(row, 3.0, requires_grad=True)
    y = nk.layer_norm(x, w, b, eps=eps)
    assert (y == 3).all()
    y.backward(torch.full_like(y, 2.0**-10))  # dx is up to 1e6 times that, which float16 would not hold at 1
    assert (b.grad == 2.0**-10).all()
    assert not w.grad.any()
    assert x.grad.isfinite().all()
    if len(row) == 1:
        assert not x.grad.any()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_axes_are_those_of_a_transposed_copy(kind: str):
    f, x = FUNCTIONS[kind], randn(4, 5, 6)
    w, b = randn(5), randn(5, seed=1)
    moved = f(x.movedim(1, -1).contiguous(), w, b).movedim(-1, 1)
    torch.testing.assert_close(f(x, w, b, axis=1), moved, rtol=1e-6, atol=1e-6)
    w2, b2 = randn(4, 6), randn(4, 6, seed=1)
    flat = f(x.movedim(1, 0).reshape(5, 24), w2.flatten(), b2.flatten()).view(5, 4, 6).movedim(0, 1)
    for axis in ((0, 2), (-1, 0)):
        torch.testing.assert_close(f(x, w2, b2, axis=axis), flat, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_views_give_the_bits_of_their_copies(kind: str):
    f = FUNCTIONS[kind]
    base = randn(6, 40)
    heads = randn(8, 3 * 24)[:, 24:48].view(8, 2, 12)  # a slice of a joint projection (D1)
    for view in (base[1:3], base[:, ::2], base.t()[:6], base[:, :1].expand(6, 32), base[0].expand(4, 40), heads):
        torch.testing.assert_close(f(view), f(view.clone(memory_format=torch.contiguous_format)), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("shape", [(4, 8), (3, 1, 8), (1,), (), (8,), (3, 4, 8)])
@pytest.mark.parametrize("kind", always(FUNCTIONS, lambda kind: kind == "rms"))
def test_parameters_of_any_broadcastable_shape(kind: str, shape: tuple[int, ...]):
    f, x = FUNCTIONS[kind], randn(3, 4, 8)
    w, b = randn(*shape), randn(*shape, seed=1)
    torch.testing.assert_close(f(x, w, b), f(x) * w + b)
    torch.testing.assert_close(f(x, w), f(x) * w)
    torch.testing.assert_close(f(x, None, b), f(x) + b)  # D16: a missing parameter is exactly 1 or 0
    assert torch.equal(f(x, torch.ones(8), torch.zeros(8)), f(x))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5), (0,)])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_nothing_in_nothing_out(kind: str, shape: tuple[int, ...]):
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(shape[-1], requires_grad=True)
    y = FUNCTIONS[kind](x, w, w * 2)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()


def test_l2_and_scale_norm():
    x = randn(5, 100)
    true = x.double() / x.double().norm(dim=-1, keepdim=True)
    u = unit(torch.float32)
    for got, expected in [
        (nk.l2_norm(x, eps=0.0), true),
        (nk.scale_norm(x, torch.tensor(2.0)), 2 * true),
        (nk.scale_norm(x, torch.tensor([2.0])), 2 * true),
    ]:
        assert bool(((got - expected).abs() <= ((100 + 3) / 2 + 4) * u * expected.abs()).all())
    assert torch.equal(nk.scale_norm(x * 1e-30, torch.tensor(3.0), eps=1.0), 3 * (x * 1e-30))
    large = x.double() / (x.double().square().sum(-1, keepdim=True) + 50).sqrt()
    torch.testing.assert_close(nk.l2_norm(x, eps=50.0).double(), large, rtol=100 * u, atol=0)
    with pytest.raises(ValueError, match="weight must be one number"):
        nk.scale_norm(x, torch.ones(100))


def test_epsilon_by_torchs_default():
    """Fault A17: bfloat16 rows of .058 come out with a root mean square of 1, as nn.RMSNorm's."""
    for dtype in (*FLOATS, torch.float64):
        x = (0.058 * randn(2, 4, 1, 32)).to(dtype)
        y = nk.rms_norm(x, eps=nk.TORCH_DEFAULT)
        assert torch.equal(y, nk.rms_norm(x, eps=torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps))
        with nk.use("reference"):
            assert torch.equal(nk.rms_norm(x, eps=nk.TORCH_DEFAULT), F.rms_norm(x, (32,)))
        torch.testing.assert_close(y.double().square().mean(-1), torch.ones(2, 4, 1).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_out_is_written_and_returned(kind: str):
    f, x = FUNCTIONS[kind], randn(3, 8)
    for out in (torch.empty(3, 8), torch.empty(8, 3).t(), torch.empty(3, 16)[:, ::2]):
        assert f(x, out=out) is out
        assert torch.equal(out, f(x))
    with deterministic_fill():
        assert torch.equal(f(x, out=torch.empty(3, 8)), f(x))
    same = x.clone()
    assert torch.equal(f(same, out=same), f(x))


class deterministic_fill:
    """Fresh buffers full of NaN."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = True

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self.before)


def test_out_is_refused_before_anything_is_written():
    x, w = randn(3, 8), randn(8).requires_grad_()
    out = torch.zeros(3, 8)
    cases: list[tuple[type[Exception], str, Callable[[], Tensor]]] = [
        (ValueError, "out= cannot record a gradient", lambda: nk.rms_norm(x, w, out=out)),
        (ValueError, r"out must be torch.float32 of shape \(3, 8\)", lambda: nk.rms_norm(x, out=out[:2])),
        (ValueError, "out must be torch.bfloat16", lambda: nk.rms_norm(x.bfloat16(), out=out)),
        (TypeError, "out must be a torch.Tensor", lambda: nk.rms_norm(x, out=[0.0])),  # type: ignore[arg-type]
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert not out.any()
    with torch.no_grad():
        assert torch.equal(nk.rms_norm(x, w, out=out), nk.rms_norm(x, w))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_bad_input_in_words(kind: str):
    f, name, x = FUNCTIONS[kind], f"{kind}_norm", randn(2, 4)
    cases: list[tuple[type[Exception], str, Callable[[], Tensor]]] = [
        (ValueError, f"{name}: eps=None is ambiguous", lambda: f(x, eps=None)),
        (ValueError, f"{name}: eps must be finite", lambda: f(x, eps=-1.0)),
        (TypeError, f"{name}: x must be float16.*got torch.int64", lambda: f(torch.zeros(0, 0, 4, dtype=torch.int64))),
        (TypeError, f"{name}: x must be.*complex64; take .real", lambda: f(x.to(torch.complex64))),
        (TypeError, f"{name}: weight must be.*torch.int64", lambda: f(x, torch.ones(4, dtype=torch.int64))),
        (ValueError, rf"{name}: weight of shape \(3,\) fits neither", lambda: f(x, torch.ones(3))),
        (ValueError, rf"{name}: bias of shape \(5,\) fits neither", lambda: f(x, None, torch.ones(5))),
        (ValueError, f"{name}: axis 2 is out of range", lambda: f(x, axis=2)),
        (ValueError, f"{name}: expected an ungated {kind} spec.*l2_norm", lambda: f(x, spec=nk.L2_NORM)),
        (ValueError, f"{name}: expected an ungated.*gated_rms_norm", lambda: f(x, spec=nk.MAMBA2)),
    ]
    for error, message, call in cases:
        before = x.clone()
        with pytest.raises(error, match=message):
            call()
        assert torch.equal(x, before)
    other = nk.TORCH_LAYER_NORM if kind == "rms" else nk.TORCH_RMS_NORM
    with pytest.raises(ValueError, match=f"use {other.kind}_norm"):
        f(x, spec=other)


def test_a_weight_for_a_weightless_spec_and_a_gate_for_normalize():
    x = randn(2, 4)
    with pytest.raises(ValueError, match="has no weight, but one was given"):
        nk.rms_norm(x, torch.ones(4), spec=nk.WEIGHTLESS_RMS)
    with pytest.raises(ValueError, match="has a gate; use gated_rms_norm"):
        nk.normalize(x, nk.MAMBA2, eps=1e-6)


@pytest.mark.parametrize("spec", [nk.TORCH_RMS_NORM, nk.TORCH_LAYER_NORM, nk.LLAMA, nk.GEMMA, nk.IMAGE_GPT])
def test_nothing_the_caller_owns_is_written(spec: nk.NormSpec):
    """Fault B13: float32 needs no upcast, so a careless in-place step would hit the caller's tensor."""
    x, w = randn(3, 8), randn(8)
    b = None if spec == nk.IMAGE_GPT else randn(8, seed=1)
    before = [t if t is None else t.clone() for t in (x, w, b)]
    y = nk.normalize(x, spec, w, b, eps=1e-6)
    y.zero_()
    assert all(t is None or torch.equal(t, s) for t, s in zip((x, w, b), before, strict=True))


def test_axes_that_are_neighbours_in_memory_alone():
    w = randn(4, 5, seed=1).requires_grad_()
    x = randn(16, 4, 5).transpose(0, 1)  # (4, 16, 5), whose axes 0 and 2 form rows where they lie
    y = nk.layer_norm(x, w, axis=(0, 2))
    want = nk.layer_norm(x.transpose(0, 1), w, axis=(1, 2)).transpose(0, 1)
    # Rows of 20 elements: two computations, each within the bound of rows.py, 20 roundings of values up to 5.
    torch.testing.assert_close(y, want, rtol=0, atol=2 * 20 * 5 * 2**-24)
    (got,), (expected,) = (torch.autograd.grad(t.square().sum(), w) for t in (y, want))
    # 16 terms 2·y·x̂ each, |x̂| ≤ √20, of a row off by 20 roundings and added by 16.
    size = 16 * 2 * float(y.detach().abs().max()) * 20**0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=2 * (20 + 16) * size * 2**-24)
