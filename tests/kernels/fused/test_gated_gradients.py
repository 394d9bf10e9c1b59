"""The fused gated norms backward: dx, dgate, dw against float64, by layout, by what is wanted, to higher order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import normkit as nk
from fused import BACKEND, LONG
from gates import gate_of, true_gradients
from normkit.kernels.cpu.kernel import CPU
from normkit.kernels.gpu.kernel import GPU
from rows import adversarial, compiled, plain_norm, randn, unit

BF, HF, F = torch.bfloat16, torch.float16, torch.float32
AFTER, FIRST = nk.GATED_RMS, replace(nk.GATED_RMS, gate="before")
PLACES = {"after": AFTER, "first": FIRST}


def gradients(
    x: Tensor, g: Tensor, w: Tensor, dy: Tensor, spec: nk.NormSpec, size: int | None = None, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, g, w)]
    return torch.autograd.grad(nk.gated_rms_norm(*leaves, group_size=size, spec=spec, eps=eps), leaves, dy)


def held_to_float64(
    x: Tensor, g: Tensor, w: Tensor, dy: Tensor, spec: nk.NormSpec, size: int, first: float = 0.0
) -> None:
    """Hold dx, dgate, dw to float64, group by group; ``first`` is the unit of what x̂ and its product are rounded to."""
    got = gradients(x, g, w, dy, spec, size)
    for i in range(0, x.shape[-1], size):
        part = (..., slice(i, i + size))
        truths = true_gradients(x[part], g[part], w[part], dy[part], spec, eps=1e-5)
        # dw meets the x̂ that was rounded, dgate (of a gate after) the weighted value that was rounded twice.
        a, slope, _ = gate_of(g[part], spec.activation)
        row, up = (x[part] * a, dy[part].double()) if spec.gate == "before" else (x[part].double(), dy[part] * a)
        xhat = plain_norm(row, centered=False).abs()
        dgate = 0.0 if spec.gate == "before" else 2 * first * (dy[part] * w[part] * slope).abs() * xhat
        more = (0.0, 1.01 * dgate, 1.01 * first * (up.abs() * xhat).sum(0))
        for name, t, (exact, bound), extra in zip(("x", "gate", "w"), got, truths, more, strict=True):
            excess = (t[part].double() - exact).abs() - bound - extra
            assert excess.max() <= 0, f"d{name}: {float(excess.max()):.3g} over {float(bound.max()):.3g}"


@pytest.mark.parametrize(
    ("rows", "n"),  # no GPU program holds a row of 5001
    [(70, 1), (70, 3), (33, 65), (9, 768), (2, 4097), (9, 5001), pytest.param(2500, 20, marks=LONG)],
)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_lie_within_the_bound(place: str, rows: int, n: int):
    x, g, dy = randn(rows, n), 2 * randn(rows, n, seed=1), randn(rows, n, seed=2)
    held_to_float64(x, g, randn(n, seed=3), dy, PLACES[place], n)


@pytest.mark.parametrize(
    ("rows", "width", "size"),
    [
        pytest.param(75, 120, 1, marks=LONG),
        (2, 120, 1),
        (75, 120, 6),
        (75, 120, 40),
        pytest.param(7, 10002, 5001, marks=LONG),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_group_trains_its_own_columns(place: str, rows: int, width: int, size: int):
    x, g, dy = randn(rows, width), randn(rows, width, seed=1), randn(rows, width, seed=2)
    held_to_float64(x, g, randn(width, seed=3), dy, PLACES[place], size)


@pytest.mark.parametrize(
    ("spec", "dtypes"),
    compiled(
        [(nk.QWEN3_NEXT_GATED, (BF, BF, BF)), (nk.MAMBA2, (BF, HF, F)), (nk.KIMI_GATED, (F, BF, HF))],
        lambda case: case[0] is nk.QWEN3_NEXT_GATED,
    ),
    ids=["qwen", "mamba2, mixed", "kimi, mixed"],
)
def test_half_types_and_rounded_values(spec: nk.NormSpec, dtypes: tuple[torch.dtype, ...]):
    shapes = ((40, 96), (40, 96), (96,))
    x, g, w = (randn(*s, seed=i, dtype=t) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True)))
    dy = randn(40, 96, seed=9, dtype=nk.gated_rms_norm(x, g, w, spec=spec).dtype)
    held_to_float64(x, g, w, dy, spec, 24, first=unit(BF) if spec.cast == "first" else 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_layouts_of_everything_change_no_bit(place: str):
    base = [randn(3, 4, 96), randn(3, 4, 96, seed=1), randn(96, seed=2), randn(3, 4, 96, seed=3)]
    expected = gradients(*base, PLACES[place], 24)

    def padded(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:-1], 120), torch.nan)
        wide[..., 5:101] = t
        return wide[..., 5:101]

    def apart(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:-1], 192), torch.nan)
        wide[..., ::2] = t
        return wide[..., ::2]

    def turned(t: Tensor) -> Tensor:
        return t.transpose(0, 1).contiguous().transpose(0, 1)

    for change in (padded, apart, turned):
        for which in range(4) if change is not turned else (0, 1, 3):
            if change is apart and which in (0, 1):
                continue  # the next case packs all at once
            changed = [change(t) if k == which else t for k, t in enumerate(base)]
            for a, b in zip(gradients(*changed, PLACES[place], 24), expected, strict=True):
                assert torch.equal(a, b)
    for a, b in zip(gradients(*map(apart, base), PLACES[place], 24), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("place", PLACES)
def test_the_gradient_of_a_sum_is_one_expanded_value(place: str):
    x, g, w = randn(5, 96), randn(5, 96, seed=1), randn(96, seed=2)
    one = torch.ones(())
    for a, b in zip(
        gradients(x, g, w, one.expand(5, 96), PLACES[place], 24),
        gradients(x, g, w, torch.ones(5, 96), PLACES[place], 24),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("counts", [(2, 7), pytest.param((255, 1024), marks=LONG)])
@pytest.mark.parametrize("place", PLACES)
def test_bits_depend_on_the_row_and_never_on_threads(place: str, counts: tuple[int, ...]):
    w = randn(200, seed=2)
    x, g, dy = randn(1, 200), randn(1, 200, seed=1), randn(1, 200, seed=3)
    dx, dg, _ = gradients(x, g, w, dy, PLACES[place], 50)
    for count in counts:
        many = [randn(count, 200, seed=5), randn(count, 200, seed=6), randn(count, 200, seed=7)]
        for position in {0, count // 2, count - 1}:
            for t, row in zip(many, (x, g, dy), strict=True):
                t[position] = row[0]
            got = gradients(many[0], many[1], w, many[2], PLACES[place], 50)
            assert torch.equal(got[0][position], dx[0])
            assert torch.equal(got[1][position], dg[0])
    torch.set_num_threads(1)
    expected = gradients(many[0], many[1], w, many[2], PLACES[place], 50)
    torch.set_num_threads(2)
    for _ in range(3):
        got = gradients(many[0], many[1], w, many[2], PLACES[place], 50)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_bad_values_stay_in_their_group_of_dx_and_dgate(place: str):
    base = [randn(9, 200), randn(9, 200, seed=1), randn(200, seed=2), randn(9, 200, seed=3)]
    clean = gradients(*base, PLACES[place], 50)
    for which in (0, 1, 3):
        for value in (torch.nan, torch.inf):
            spoilt = [t.clone() for t in base]
            spoilt[which][4, 60] = value
            for got, good in zip(gradients(*spoilt, PLACES[place], 50)[:2], clean[:2], strict=True):
                assert got[4, 50:100].isnan().any() or which == 3
                keep = torch.ones(9, 200, dtype=torch.bool)
                keep[4, 50:100] = False
                assert torch.equal(got[keep], good[keep])


@pytest.mark.parametrize("n", [96, pytest.param(5001, marks=LONG)])
def test_products_beyond_float32s_range(n: int):
    """The gradients are those of the row scaled back, divided by the scales: powers of two, so bit by bit."""
    x, g, w, dy = randn(3, n), 20 + randn(3, n, seed=1).abs(), randn(n, seed=2), randn(3, n, seed=3)
    dx, dg, dw = gradients(x, g, w, dy, FIRST, eps=0.0)
    for a, b in ((70, 70), (90, 60)):
        dx_, dg_, dw_ = gradients(x * 2.0**a, g * 2.0**b, w, dy, FIRST, eps=0.0)
        assert torch.equal(dx_ * 2.0**a, dx)
        assert torch.equal(dw_, dw)
        assert torch.equal(dg_ * 2.0**b, dg)


@pytest.mark.parametrize("place", PLACES)
def test_extreme_rows(place: str):
    for name in ("1e-20", "1e18", "outlier", "large mean"):
        x, g, w, dy = adversarial(96)[name], randn(1, 96, seed=1), randn(96, seed=2), randn(1, 96, seed=3)
        peak = 2.0 ** round(float(x.abs().max().log2()))
        got = gradients(x, g, w, dy, PLACES[place], eps=1e-5)
        truths = true_gradients(x / peak, g, w, dy, PLACES[place], eps=1e-5 / peak**2)
        for t, (exact, bound), scale in zip(got, truths, (peak, 1.0, 1.0), strict=True):
            assert ((t.double() * scale - exact).abs() <= bound + 2.0**-126 * scale).all(), name


@pytest.mark.parametrize(
    ("place", "wanted"),
    compiled([("after", "g"), ("first", "w"), ("first", "x")], lambda case: case[0] == "after"),
    ids=["gate", "weight", "x"],
)
def test_no_work_for_what_is_frozen(place: str, wanted: str, monkeypatch: pytest.MonkeyPatch):
    base = {"x": randn(5, 96), "g": randn(5, 96, seed=1), "w": randn(96, seed=2)}
    dy = randn(5, 96, seed=3)
    all_three = dict(zip("xgw", gradients(*base.values(), dy, PLACES[place], 24), strict=True))
    made: list[tuple[Tensor | None, ...]] = []
    kernel = {"cpu": CPU, "gpu": GPU}[BACKEND]
    original = kernel.gated_backward

    def watched(*args: object, **options: object) -> object:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setitem(vars(kernel), "gated_backward", watched)
    leaf = base[wanted].requires_grad_()
    y = nk.gated_rms_norm(*base.values(), group_size=24, spec=PLACES[place], eps=1e-5)
    (got,) = torch.autograd.grad(y, leaf, dy)
    assert torch.equal(got, all_three[wanted])
    assert [t is not None for t in made[0]] == [name == wanted for name in "xgw"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 96)])
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_broadcast_collect_what_they_touched(place: str, shape: tuple[int, ...]):
    x, g, w, dy = randn(6, 96), randn(6, 96, seed=1), randn(*shape, seed=2), randn(6, 96, seed=3)
    got = gradients(x, g, w, dy, PLACES[place], 24)
    whole = gradients(x, g, w.expand(96) if w.dim() < 2 else w[0], dy, PLACES[place], 24)
    assert got[2].shape == w.shape
    assert torch.equal(got[0], whole[0])
    limit = 96 * 2.0**-24 * (dy * plain_norm(x, centered=False) * 5).abs().sum()  # one float32 sum of 96 columns
    assert (got[2] - whole[2].double().sum_to_size(w.shape if w.dim() < 2 else (96,))).abs().max() <= limit


@pytest.mark.parametrize("place", PLACES)
def test_higher_orders_are_the_formulas(place: str):
    """create_graph, a vector product with the Hessian, forward mode and vmap, by value against plain float64."""
    x, g, w, v = randn(3, 12), randn(3, 12, seed=1), randn(12, seed=2), randn(3, 12, seed=3)

    def ours(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return nk.gated_rms_norm(x, g, w, spec=PLACES[place], eps=1e-5)

    def plain(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        row = x * silu(g) if place == "first" else x
        return plain_norm(row, w, centered=False) * (1 if place == "first" else silu(g))

    def second(f: object, *leaves: Tensor) -> tuple[Tensor, ...]:
        held = [t.clone().requires_grad_() for t in leaves]
        first = torch.autograd.grad((f(*held) ** 2).sum(), held, create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(sum((t * t).sum() for t in first), held)  # type: ignore[arg-type]

    wide = [t.double() for t in (x, g, w)]
    for a, b in zip(second(ours, x, g, w), second(plain, *wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)
    tangent = torch.func.jvp(ours, (x, g, w), (v, v, v[0]))[1]
    exact = torch.func.jvp(plain, tuple(wide), (v.double(), v.double(), v[0].double()))[1]
    torch.testing.assert_close(tangent.double(), exact, rtol=1e-5, atol=1e-5)
    per_row = torch.func.vmap(torch.func.grad(lambda *a: ours(*a).sum(), argnums=(0, 1, 2)), (0, 0, None))(x, g, w)
    whole = gradients(x, g, w, torch.ones(3, 12), PLACES[place])
    for a, b in zip(per_row, (*whole[:2], None), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(per_row[2].sum(0), whole[2], rtol=1e-5, atol=1e-5)
