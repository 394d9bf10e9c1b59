"""The fused gated norms forward: against float64, bit by bit against the declared roundings, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import normkit as nk
from fused import LONG
from gates import true_gated
from rows import adversarial, compiled, randn

BF, HF, F = torch.bfloat16, torch.float16, torch.float32
AFTER, FIRST = nk.GATED_RMS, replace(nk.GATED_RMS, gate="before")
PLACES = {"after": AFTER, "first": FIRST}


def in_float64(x: Tensor, g: Tensor, w: Tensor, size: int, spec: nk.NormSpec, eps: float, got: Tensor) -> None:
    """Hold every group to the float64 value of the same columns."""
    for i in range(0, x.shape[-1], size):
        part = (..., slice(i, i + size))
        true_gated(x[part], g[part], w[part], spec, eps=eps, out=got.dtype).check(got[part])


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("n", [1, 3, 16, 63, 65, 768, 4097, 9001])  # no GPU program holds a row of the last width
@pytest.mark.parametrize("place", PLACES)
def test_random_rows_lie_within_the_bound(place: str, n: int, seed: int):
    count = 7 if n < 5000 else 2
    x, g, w = randn(count, n, seed=seed), 3 * randn(count, n, seed=seed + 1), randn(n, seed=seed + 2)
    in_float64(x, g, w, n, PLACES[place], 1e-5, nk.gated_rms_norm(x, g, w, eps=1e-5, spec=PLACES[place]))


@pytest.mark.parametrize(("width", "size"), [(120, 1), (120, 6), (120, 40), (120, 120), (18002, 9001)])
@pytest.mark.parametrize("place", PLACES)
def test_groups_have_statistics_and_weights_of_their_own(place: str, width: int, size: int):
    shape = (3, 5, width) if width < 5000 else (2, 1, width)
    x, g, w = randn(*shape), randn(*shape, seed=1), randn(width, seed=2)
    got = nk.gated_rms_norm(x, g, w, group_size=size, eps=1e-5, spec=PLACES[place])
    in_float64(x, g, w, size, PLACES[place], 1e-5, got)


@pytest.mark.parametrize("place", PLACES)
def test_bfloat16_rounds_once(place: str):
    x, g, w = (randn(*s, seed=i, dtype=BF) for i, s in enumerate([(64, 96), (64, 96), (96,)]))
    in_float64(
        x, g, w, 24, PLACES[place], 1e-5, nk.gated_rms_norm(x, g, w, group_size=24, eps=1e-5, spec=PLACES[place])
    )


SPECS = {
    "default": (AFTER, BF, BF, BF),
    "mamba2": (nk.MAMBA2, BF, BF, BF),
    "qwen": (nk.QWEN3_NEXT_GATED, BF, BF, BF),
    "kimi, mixed": (nk.KIMI_GATED, HF, F, BF),
    "mamba2 in float32, promoted, sigmoid": (replace(nk.MAMBA2, activation="sigmoid"), BF, HF, F),
    "one added, rounded first, then gated": (replace(nk.QWEN3_NEXT_GATED, weight="one_plus_rounded"), HF, BF, BF),
}


@pytest.mark.parametrize("name", compiled(SPECS, ("mamba2", "qwen").__contains__))
def test_every_declared_rounding_bit_by_bit(name: str):
    """Where gates are exact in both and sums of squares have no rounding, only the declared roundings are left.

    SiLU is 0 or g itself at 0 and beyond 18, the sigmoid 0, 1/2 or 1: 1 + exp(−g) is then exactly 2 or 1. g is no power
    of two, which would commute with a rounding. Gated products that are small integers make every sum exact in any
    order, and 1/√ is IEEE's in both.
    """
    spec, x_dtype, g_dtype, w_dtype = SPECS[name]
    x = (randn(50, 48) * 3).round().to(x_dtype)
    choices = torch.tensor([0.0, -200.0, 21.0, 37.0] if spec.activation == "silu" else [0.0, -200.0, 30.0, 60.0])
    g = choices[(randn(50, 48, seed=1) * 1000).long() % 4].to(g_dtype)
    w = randn(48, seed=2, dtype=w_dtype)
    got = nk.gated_rms_norm(x, g, w, group_size=12, spec=spec)
    with nk.use("reference"):
        expected = nk.gated_rms_norm(x, g, w, group_size=12, spec=spec)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert got.unique().numel() > 100


def test_no_gate_is_the_norm_of_the_groups():
    x, w = randn(5, 24), randn(24, seed=1)
    got = nk.gated_rms_norm(x, None, w, group_size=8)
    assert torch.equal(got, torch.cat([nk.rms_norm(x[:, i : i + 8], w[i : i + 8]) for i in (0, 8, 16)], -1))


@pytest.mark.parametrize("n", [127, pytest.param(9001, marks=LONG)])
@pytest.mark.parametrize("place", PLACES)
def test_extreme_rows_lie_within_the_same_bound(place: str, n: int):
    eps = 1e-12
    g, w = randn(1, n, seed=1), randn(n, seed=2)
    for name, x in adversarial(n).items():
        if place == "first" and name in ("subnormal", "wide range"):
            continue  # a product is rounded in float32, whose range ends here
        if n > 127 and name == "wide range":
            continue  # some x̂ underflows, and the gate multiplies its rounding
        in_float64(x, g, w, n, PLACES[place], eps, nk.gated_rms_norm(x, g, w, eps=eps, spec=PLACES[place]))


@pytest.mark.parametrize("n", [200, 9001])
def test_products_beyond_float32s_range(n: int):
    """x·a(g) of 1e45: both factors are scaled by a power of two, so that the row comes out as any other does."""
    x, g, w = randn(3, n), randn(3, n, seed=1).abs() + 20, randn(n, seed=2)
    got = nk.gated_rms_norm(x * 2.0**80, g * 2.0**70, w, spec=FIRST, eps=1e-6)
    assert torch.equal(got, nk.gated_rms_norm(x, g, w, spec=FIRST, eps=0.0))
    spoilt = x * 2.0**80
    spoilt[1, 7] = torch.inf
    y = nk.gated_rms_norm(spoilt, g * 2.0**70, w, spec=FIRST, eps=1e-6)
    assert y[1, 7].isnan()
    assert torch.equal(y[::2], got[::2])


def alone(x: Tensor, g: Tensor, w: Tensor, spec: nk.NormSpec) -> Tensor:
    return nk.gated_rms_norm(x, g, w, group_size=50, spec=spec)


COUNTS = [2, 7, *(pytest.param(count, marks=LONG) for count in (255, 1024))]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_rows_bits_depend_on_that_row_alone(place: str, count: int):
    spec, w = PLACES[place], randn(200, seed=2)
    x, g = randn(1, 200), randn(1, 200, seed=1)
    expected = alone(x, g, w, spec)
    for position in {0, count // 2, count - 1}:
        many, gates = 1e3 * randn(count, 200, seed=5), randn(count, 200, seed=6)
        many[position], gates[position] = x[0], g[0]
        many[(position + 1) % count, 3] = torch.nan if count > 2 else 1
        for threads in (1, 2) if count == 1024 else (1,):
            torch.set_num_threads(threads)
            assert torch.equal(alone(many, gates, w, spec)[position], expected[0])


@pytest.mark.parametrize("place", PLACES)
def test_bad_values_stay_in_their_group(place: str):
    x, g, w = randn(9, 200), randn(9, 200, seed=1), randn(200, seed=2)
    clean = alone(x, g, w, PLACES[place])
    for spoil_gate in (False, True):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt = [x.clone(), g.clone()]
            spoilt[spoil_gate][4, 60] = value
            y = alone(*spoilt, w, PLACES[place])
            assert torch.equal(y[:4], clean[:4])
            assert torch.equal(y[5:], clean[5:])
            assert torch.equal(y[4, :50], clean[4, :50])
            assert torch.equal(y[4, 100:], clean[4, 100:])
            assert not torch.equal(y[4, 60], clean[4, 60])


def test_zero_rows_and_zero_gates_are_zeros():
    x, g, w = randn(3, 40), randn(3, 40, seed=1), randn(40, seed=2)
    for spec in PLACES.values():
        assert not nk.gated_rms_norm(x * 0, g, w, spec=spec).any()
        assert not nk.gated_rms_norm(x, g * 0, w, spec=spec).any()


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("shape", [(24,), (3, 24), (5, 1, 24), (1,), (3, 1), ()])
def test_weights_that_broadcast(shape: tuple[int, ...], size: int | None):
    x, g, w = randn(5, 3, 24), randn(5, 3, 24, seed=1), randn(*shape, seed=2)
    whole = w.expand(5, 3, 24).contiguous()
    expected = nk.gated_rms_norm(x, g, whole, group_size=size)
    assert torch.equal(nk.gated_rms_norm(x, g, w, group_size=size), expected)
    torch.testing.assert_close(expected, nk.gated_rms_norm(x, g, torch.ones(24), group_size=size) * whole)


def layouts(t: Tensor) -> Iterator[Tensor]:
    """Yield ``t`` (3, 4, 96) with padded rows, as a slice of wider rows, transposed, and with elements apart."""
    wide = torch.full((3, 4, 120), torch.nan)
    wide[..., 5:101] = t
    yield wide[..., 5:101]
    yield t.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.full((3, 4, 192), torch.nan)
    apart[..., ::2] = t
    yield apart[..., ::2]
    yield t.permute(2, 0, 1).contiguous().permute(1, 2, 0)


@pytest.mark.parametrize("place", PLACES)
def test_strides_change_no_bit(place: str):
    x, g, w = randn(3, 4, 96), randn(3, 4, 96, seed=1), randn(96, seed=2)

    def f(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return nk.gated_rms_norm(x, g, w, group_size=24, spec=PLACES[place])

    expected = f(x, g, w)
    for a, b in zip(layouts(x), layouts(g), strict=True):
        for got in (f(a, g, w), f(x, b, w), f(a, b, w)):
            assert torch.equal(got, expected)
    expanded = f(x[:1].expand(3, 4, 96), g[:, :1].expand(3, 4, 96), w)
    assert torch.equal(expanded, f(x[:1].repeat(3, 1, 1), g[:, :1].repeat(1, 4, 1), w))
    assert torch.equal(f(x, g, randn(192, seed=2)[::2]), f(x, g, randn(192, seed=2)[::2].contiguous()))
    scalar = torch.tensor(2.0)
    assert torch.equal(f(x, g, scalar), f(x, g, scalar.expand(96).contiguous()))
