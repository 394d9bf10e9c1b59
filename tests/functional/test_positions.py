"""batch_norm, group_norm, instance_norm: values, gradients, masks, buffers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, vmap

import normkit as nk
from exact import Exact, exact

N, L, C, G = 4, 7, 6, 3
batch_norm = partial(nk.batch_norm, running_mean=None, running_var=None, training=True)
NORMS: dict[str, Callable[..., Tensor]] = {
    "batch": batch_norm,
    "instance": nk.instance_norm,
    "group": partial(nk.group_norm, groups=G),
}
MASK = torch.arange(L) < torch.tensor([7, 3, 1, 5]).unsqueeze(1)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w, b, dy = _random(N, L, C) * 2 + 1, _random(C, seed=1), _random(C, seed=2), _random(N, L, C, seed=3)
    return x.to(dtype), w, b, dy.to(dtype)


def _exact(name: str, x: Tensor, w: Tensor, b: Tensor, dy: Tensor, mask: Tensor | None = None) -> Exact:
    """Lay x out as (N, L, G, C/G) and take statistics over what the norm's name means."""
    groups = {"batch": C, "instance": C, "group": G}[name]

    def split(t: Tensor) -> Tensor:
        return t.unflatten(-1, (groups, C // groups))

    axes = (0, 1, 3) if name == "batch" else (1, 3)
    wide_mask = None if mask is None else mask[:, :, None, None]
    return exact(split(x), axes, split(w), split(b), split(dy), eps=1e-5, mask=wide_mask)


def _run(norm: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor, dy: Tensor, **options: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = norm(leaves[0], weight=leaves[1], bias=leaves[2], **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _check(name: str, got: list[Tensor], want: Exact, times: float = 1.0) -> None:
    for number, tensor in zip((want.y, want.dx, want.dw, want.db), got, strict=True):
        number.check(tensor.reshape(number.value.shape), times)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_against_float64(name: str, dtype: torch.dtype, masked: bool) -> None:
    x, w, b, dy = (t.to(dtype) for t in _inputs())
    mask = MASK if masked else None
    _check(name, _run(NORMS[name], x, w, b, dy, mask=mask), _exact(name, x, w, b, dy, mask))


@pytest.mark.parametrize("name", NORMS)
def test_channel_axis_one_is_the_transposed_norm(name: str) -> None:
    x, w, b, dy = _inputs()
    last = _run(NORMS[name], x, w, b, dy, mask=MASK)
    first = _run(NORMS[name], x.mT, w, b, dy.mT, mask=MASK, channel_axis=1)
    want = _exact(name, x, w, b, dy, MASK)
    _check(name, [first[0].mT, first[1].mT, *first[2:]], want)
    _check(name, last, want)


@pytest.mark.parametrize("name", NORMS)
def test_two_position_axes(name: str) -> None:
    x, w, b, _ = _inputs()
    image = x[:, :6].unflatten(1, (2, 3))
    flat = NORMS[name](x[:, :6], weight=w, bias=b, mask=MASK[:, :6])
    y = NORMS[name](image, weight=w, bias=b, mask=MASK[:, :6].unflatten(1, (2, 3)))
    assert (y.flatten(1, 2) - flat).abs().max() < 1e-5  # both within the bound of float64, of order n·u·|x̂| = 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_half_inputs_are_the_float32_result_rounded_once(name: str, dtype: torch.dtype) -> None:
    x, w, b, _ = _inputs(dtype)
    y = NORMS[name](x, weight=w, bias=b, mask=MASK)
    assert torch.equal(y, NORMS[name](x.float(), weight=w, bias=b, mask=MASK).to(dtype))
    mean, var = torch.zeros(C), torch.ones(C)
    y = nk.batch_norm(x, mean, var, w, b)
    assert torch.equal(y, nk.batch_norm(x.float(), mean, var, w, b).to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_content_of_padding_changes_no_bit(name: str, training: bool, bad: float) -> None:
    norm = NORMS[name]
    if name == "batch" and not training:
        norm = partial(nk.batch_norm, running_mean=_random(C, seed=5), running_var=_random(C, seed=6) ** 2)
    x, w, b, dy = _inputs()
    clean = _run(norm, torch.where(MASK.unsqueeze(-1), x, 0.0), w, b, dy, mask=MASK)
    dirty = _run(norm, torch.where(MASK.unsqueeze(-1), x, bad), w, b, dy, mask=MASK)
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(dirty[0][~MASK], torch.zeros(int((~MASK).sum()), C))
    assert torch.equal(dirty[1][~MASK], torch.zeros(int((~MASK).sum()), C))
    assert bool((dirty[1][MASK] != 0).any())


@pytest.mark.parametrize("more", [1, 9, 100])
@pytest.mark.parametrize("name", NORMS)
def test_amount_of_padding_changes_only_the_order_of_sums(name: str, more: int) -> None:
    x, w, b, dy = _inputs()
    padded, padded_dy = (torch.cat([t, torch.full((N, more, C), 9.0)], dim=1) for t in (x, dy))
    mask = torch.cat([MASK, torch.zeros(N, more, dtype=torch.bool)], dim=1)
    y, dx, dw, db = _run(NORMS[name], padded, w, b, padded_dy, mask=mask)
    assert not y[:, L:].any()
    assert not dx[:, L:].any()
    _check(name, [y[:, :L], dx[:, :L], dw, db], _exact(name, x, w, b, dy, MASK))


def test_padding_neither_moves_the_mean_nor_the_variance() -> None:
    x = torch.tensor([1.0, 2, 3, 4, 5, 0, 0, 0, 0, 0]).reshape(1, 10, 1)
    mean, var = torch.zeros(1), torch.ones(1)
    nk.batch_norm(x, mean, var, training=True, momentum=1.0, mask=torch.arange(10).unsqueeze(0) < 5)
    assert (float(mean), float(var)) == (3.0, 2.5)
    nk.batch_norm(x, mean, var, training=True, momentum=1.0)
    assert (float(mean), float(var)) == (1.5, pytest.approx(3.25 * 10 / 9))


def test_running_variance_is_unbiased() -> None:
    x = torch.tensor([1.0, 4.0, 7.0]).reshape(3, 1)
    mean, var = torch.full((1,), 5.0), torch.full((1,), 5.0)
    nk.batch_norm(x, mean, var, training=True, momentum=1.0)
    assert (float(mean), float(var)) == (4.0, 9.0)  # 6 · 3/2
    nk.batch_norm(x + 4, mean, var, training=True, momentum=0.25)
    assert (float(mean), float(var)) == (5.0, 9.0)  # the new one weighs a quarter


def test_running_buffers_of_other_dtypes_are_rounded_once() -> None:
    x = _random(N, L, C) + 3
    wide = [torch.full((C,), 0.3), torch.full((C,), 0.7)]
    half = [t.bfloat16() for t in wide]
    start = [t.float() for t in half]
    nk.batch_norm(x, *half, training=True)
    nk.batch_norm(x, *start, training=True)
    assert all(torch.equal(h, s.bfloat16()) for h, s in zip(half, start, strict=True))


@pytest.mark.parametrize("name", NORMS)
def test_nothing_to_normalise(name: str) -> None:
    w, b = torch.ones(C, requires_grad=True), torch.zeros(C, requires_grad=True)
    for shape in [(0, L, C), (N, 0, C), (0, C)]:
        x = torch.empty(shape, requires_grad=True)
        y = NORMS[name](x, weight=w, bias=b)
        grads = torch.autograd.grad(y.sum(), (x, w, b))
        assert y.shape == shape
        assert not any(g.any() for g in grads)
    x = torch.full((N, L, C), float("nan"), requires_grad=True)
    y = NORMS[name](x, weight=w, bias=b + 1, mask=torch.zeros(N, L, dtype=torch.bool))
    assert not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (x, w, b)))


@pytest.mark.parametrize("x", [torch.empty(0, L, C), torch.empty(N, 0, C), torch.empty(0, C)])
def test_empty_batches_leave_the_buffers(x: Tensor) -> None:
    mean, var = torch.full((C,), 2.0), torch.full((C,), 3.0)
    nk.batch_norm(x, mean, var, training=True)
    assert torch.equal(mean, torch.full((C,), 2.0))
    assert torch.equal(var, torch.full((C,), 3.0))


def test_a_wholly_masked_batch_leaves_the_buffers() -> None:
    mean, var = torch.full((C,), 2.0), torch.full((C,), 3.0)
    nothing = torch.zeros(N, L, dtype=torch.bool)
    nk.batch_norm(torch.full((N, L, C), float("inf")), mean, var, training=True, mask=nothing)
    assert torch.equal(mean, torch.full((C,), 2.0))
    assert torch.equal(var, torch.full((C,), 3.0))


@pytest.mark.parametrize("shape", [(1, C), (1, 1, C)])
def test_one_value_per_channel_is_refused(shape: tuple[int, ...]) -> None:
    mean, var = torch.zeros(C), torch.ones(C)
    x = torch.ones(shape)
    with pytest.raises(ValueError, match=rf"training needs more than one value.*\({shape[0]}, .*eval\(\)"):
        nk.batch_norm(x, mean, var, training=True)
    with pytest.raises(ValueError, match="without running statistics"):
        nk.batch_norm(x, None, None)
    one = torch.zeros(N, L, dtype=torch.bool)
    one[2, 3] = True
    with pytest.raises(ValueError, match=r"one real \(unmasked\) value"):
        nk.batch_norm(torch.ones(N, L, C), mean, var, training=True, mask=one)
    assert torch.equal(mean, torch.zeros(C))
    assert torch.equal(var, torch.ones(C))
    assert torch.equal(nk.batch_norm(x, mean, var, eps=0.0), x)


def test_a_mask_that_broadcasts_counts_what_it_stands_for() -> None:
    x, w, b, dy = _inputs()
    per_position = torch.arange(L).unsqueeze(0) < 1
    got = _run(batch_norm, x, w, b, dy, mask=per_position)
    _check("batch", got, _exact("batch", x, w, b, dy, per_position))


_BAD: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"weight": torch.ones(C + 1)}, ValueError, "weight must have shape"),
    ({"bias": torch.ones(1)}, ValueError, "bias must have shape"),
    ({"weight": torch.ones(C, dtype=torch.int64)}, TypeError, "weight"),
    ({"eps": None}, ValueError, "eps=None"),
    ({"eps": -1.0}, ValueError, "eps"),
    ({"mask": torch.ones(N, L)}, TypeError, "bool"),
    ({"mask": torch.ones(N, L + 1, dtype=torch.bool)}, ValueError, "mask must have"),
    ({"mask": torch.ones(N, L, C, dtype=torch.bool)}, ValueError, "mask must have"),
    ({"channel_axis": 0}, ValueError, "batch axis"),
    ({"channel_axis": 3}, ValueError, "out of range"),
]


@pytest.mark.parametrize(("options", "error", "words"), _BAD)
@pytest.mark.parametrize("name", NORMS)
def test_what_is_refused(name: str, options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        NORMS[name](_random(N, L, C), **options)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        NORMS[name](torch.zeros(N, L, C, dtype=dtype))
    with pytest.raises(ValueError, match="batch and a channel axis"):
        NORMS[name](torch.zeros(C))


def test_groups_are_refused_by_name() -> None:
    for groups in (0, -1, 4):
        with pytest.raises(ValueError, match="divide the 6 channels"):
            nk.group_norm(_random(N, L, C), groups)
    for other in (2.0, True, "2"):
        with pytest.raises(TypeError, match="groups must be an int"):
            nk.group_norm(_random(N, L, C), other)  # type: ignore[arg-type]


_LATE: list[dict[str, object]] = [
    {"momentum": None},
    {"momentum": 1.5},
    {"weight": torch.ones(C + 1)},
    {"running_var": torch.ones(C + 1)},
    {"running_var": None},
    {"mask": torch.ones(2, 2, dtype=torch.bool)},
]


@pytest.mark.parametrize("options", _LATE)
def test_a_failed_call_moves_no_buffer(options: dict[str, object]) -> None:
    mean, var = torch.zeros(C), torch.ones(C)
    with pytest.raises((TypeError, ValueError)):
        nk.batch_norm(_random(N, L, C), **({"running_mean": mean, "running_var": var, "training": True} | options))
    assert torch.equal(mean, torch.zeros(C))
    assert torch.equal(var, torch.ones(C))


def test_function_transforms() -> None:
    x, w, b, _ = (t.double() for t in _inputs())
    mean, var = _random(C, dtype=torch.float64), _random(C, dtype=torch.float64) ** 2 + 0.1

    def inference(t: Tensor) -> Tensor:
        return nk.batch_norm(t, mean, var, w, b)

    jacobian = jacrev(inference)(x[0, :1].unsqueeze(0)).reshape(C, C)
    assert (jacobian - torch.diag(w / (var + 1e-5).sqrt())).abs().max() < 1e-14
    assert torch.equal(vmap(inference)(x.unsqueeze(1)).squeeze(1), inference(x))
    for norm in NORMS.values():
        apart = torch.stack([norm(sample) for sample in x.unflatten(0, (2, 2))])
        assert (vmap(norm)(x.unflatten(0, (2, 2))) - apart).abs().max() < 1e-13
        assert torch.autograd.gradcheck(norm, x[:2, :3].clone().requires_grad_())
    # A batch norm's output does not change when all of a channel moves: its Jacobian sums to zero.
    assert jacrev(batch_norm)(x).sum((-3, -2)).abs().max() < 1e-13


@pytest.mark.parametrize("name", NORMS)
def test_inputs_stay_as_they_were(name: str) -> None:
    x, w, b, _ = _inputs()
    copies = [t.clone() for t in (x, w, b, MASK)]
    NORMS[name](x, weight=w, bias=b, mask=MASK)
    assert all(torch.equal(t, c) for t, c in zip((x, w, b, MASK), copies, strict=True))
