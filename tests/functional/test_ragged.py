"""Jagged nested tensors through every norm: what the padded and masked batch gives, without the padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor, nested_tensor_from_jagged

import normkit as nk
from exact import exact
from rows import always, randn, row_depth, unit

LENGTHS = (5, 0, 1, 7, 3)
N, T, LONGEST, C = len(LENGTHS), sum(LENGTHS), 9, 24
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
MASK = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]

Norm = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
SCALE = torch.tensor(0.7)
ROWS: dict[str, Norm] = {
    "layer": lambda x, other, w, b: nk.layer_norm(x, w, b),
    "rms": lambda x, other, w, b: nk.rms_norm(x, w),
    "llama": lambda x, other, w, b: nk.rms_norm(x, w, spec=nk.LLAMA),
    "l2": lambda x, other, w, b: nk.l2_norm(x),
    "scale": lambda x, other, w, b: nk.scale_norm(x, w[0]),
    "normalize": lambda x, other, w, b: nk.normalize(x, nk.GEMMA, w, eps=1e-6),
    "add layer": lambda x, other, w, b: nk.add_layer_norm(x, other, w, b, alpha=1.5),
    "add rms": lambda x, other, w, b: nk.add_rms_norm(x, other, w, branch_scale=0.5),
    "gated": lambda x, other, w, b: nk.gated_rms_norm(x, other, w, group_size=8),
    "ungated": lambda x, other, w, b: nk.gated_rms_norm(x, None, w),
    "dyt": lambda x, other, w, b: nk.dyt(x, SCALE, w, b),
    "derf": lambda x, other, w, b: nk.derf(x, SCALE, SCALE, w, b),
}
batch_norm = partial(nk.batch_norm, running_mean=None, running_var=None, training=True)
POSITIONS: dict[str, Callable[..., Tensor]] = {
    "batch": lambda x, w, b, **mask: batch_norm(x, weight=w, bias=b, **mask),
    "running": lambda x, w, b, **mask: nk.batch_norm(x, randn(C, seed=8), randn(C, seed=9).abs(), w, b, **mask),
    "instance": nk.instance_norm,
    "group": lambda x, w, b, **mask: nk.group_norm(x, 4, w, b, **mask),
}


def jagged(values: Tensor, axis: int = 1) -> Tensor:
    return nested_tensor_from_jagged(values, OFFSETS, jagged_dim=axis)


def padded(values: Tensor, filling: float) -> Tensor:
    whole = torch.full((N, LONGEST, *values.shape[1:]), filling, dtype=values.dtype)
    whole[MASK] = values
    return whole


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [*(randn(T, C, seed=seed + i).to(dtype) for i in range(3)), randn(C, seed=4), randn(C, seed=5)]


def outcome(norm: Callable[..., Any], leaves: list[Tensor], upstream: Tensor, shape: Callable[[Tensor], Tensor]) -> Any:
    """Return results and gradients of ``norm`` of leaves, the first of which ``shape`` makes ragged or padded."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    found = norm(*(shape(t) if t.dim() > 1 else t for t in leaves))
    results = found if isinstance(found, tuple) else (found,)
    flat = [y.values() if y.is_nested else y[MASK] for y in results]
    gradients = torch.autograd.grad(flat, leaves, [upstream.to(y.dtype) for y in flat], allow_unused=True)
    return results, [y.detach() for y in flat], gradients


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_padded_batch(name: str, dtype: torch.dtype):
    x, other, dy, w, b = inputs(dtype)
    leaves = [x, other, w, b]
    results, flat, gradients = outcome(ROWS[name], leaves, dy, jagged)
    _, expected, theirs = outcome(ROWS[name], leaves, dy, partial(padded, filling=2.0))
    for y, got, want in zip(results, flat, expected, strict=True):
        assert y.offsets() is OFFSETS
        assert got.dtype == want.dtype
        # A kernel's row has bits of its own; in float64 PyTorch's sums take their order from the shape.
        torch.testing.assert_close(got, want, rtol=0, atol=0 if dtype != torch.float64 else 1e-13)
    for i, (got, want) in enumerate(zip(gradients, theirs, strict=True)):
        if got is None or want is None:
            assert got is want
            continue
        # dx and the gradient of the stream or gate are a row's own. dw and db sum T rows of terms |dy|·|x̂| or |dy|
        # (dyt's are bounded by |dy|), the padded batch N·LONGEST, most of them 0, in another order: each within
        # row_depth roundings of the sum of sizes. Without a kernel (float64, dyt) dx may differ in the last bits.
        loose = dtype == torch.float64 or name in ("dyt", "derf")
        size = float((dy.double().abs() * (2 + x.double().abs() + other.double().abs()) ** 2).sum(0).max())
        u = unit(torch.promote_types(dtype, torch.float32))
        bound = 2 * row_depth(N * LONGEST) * u * size * (C if want.dim() == 0 else 1)
        if i < 2 and not loose:
            bound = 0.0
        torch.testing.assert_close(got, want, rtol=0, atol=bound, msg=lambda m, i=i: f"gradient {i}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_masked_batch_bit_for_bit(name: str, dtype: torch.dtype):
    x, _, dy, w, b = inputs(dtype)
    norm = POSITIONS[name]
    (y,), flat, gradients = outcome(norm, [x, w, b], dy, jagged)
    masked = outcome(partial(norm, mask=MASK), [x, w, b], dy, partial(padded, filling=float("nan")))
    assert y.offsets() is OFFSETS
    for got, want in zip([*flat, *gradients], [*masked[1], *masked[2]], strict=True):
        # float64 has no kernel: sums of T terms in another order, against terms of size up to 8³.
        torch.testing.assert_close(got, want, rtol=0, atol=0 if dtype != torch.float64 else T * 512 * unit(dtype))


@pytest.mark.parametrize("name", ["batch", "instance", "group"])
def test_channels_before_the_ragged_axis(name: str):
    x, _, dy, w, b = inputs()
    norm = partial(POSITIONS[name], channel_axis=1)
    (y,), (flat,), (dx, dw, db) = outcome(
        lambda x, w, b: norm(x.transpose(1, 2), w, b).transpose(1, 2), [x, w, b], dy, jagged
    )
    assert y.offsets() is OFFSETS
    groups = {"batch": C, "instance": C, "group": 4}[name]
    split = [padded(t, 0.0).unflatten(-1, (groups, -1)) for t in (x, dy)]
    axes = (0, 1, 3) if name == "batch" else (1, 3)
    truth = exact(
        split[0], axes, w.view(groups, -1), b.view(groups, -1), split[1], eps=1e-5, mask=MASK[:, :, None, None]
    )
    for number, got in ((truth.y, padded(flat, 0.0)), (truth.dx, padded(dx, 0.0)), (truth.dw, dw), (truth.db, db)):
        number.check(got.reshape(number.value.shape))


def test_modules_take_them_as_functions_do():
    x, other, _, _, _ = inputs()
    ragged, gate = jagged(x), jagged(other)
    modules: list[nn.Module] = [nk.LayerNorm(C), nk.RMSNorm(C, spec=nk.GEMMA), nk.ScaleNorm(C), nk.DyT(C), nk.Derf(C)]
    for module in modules:
        got = module(ragged)
        assert got.offsets() is OFFSETS
        torch.testing.assert_close(got.values(), module(x), rtol=0, atol=0)
    gated = nk.GatedRMSNorm(C)
    torch.testing.assert_close(gated(ragged, gate).values(), gated(x, other), rtol=0, atol=0)
    heads = nk.QKNorm(6, 4, num_kv_heads=2, coverage="full")
    q, k = heads(jagged(x.unflatten(-1, (4, 6))), jagged(other[:, :12].unflatten(-1, (2, 6))))
    want = heads(x.unflatten(-1, (4, 6)), other[:, :12].unflatten(-1, (2, 6)))
    torch.testing.assert_close((q.values(), k.values()), want, rtol=0, atol=0)
    for made in (lambda: nk.InstanceNorm(C), lambda: nk.GroupNorm(4, C)):
        y = made()(ragged)
        torch.testing.assert_close(y.values(), made()(padded(x, 1.0), MASK)[MASK], rtol=0, atol=0)


def test_batch_norm_remembers_real_positions():
    x, *_ = inputs()
    ours, masked = nk.BatchNorm(C), nk.BatchNorm(C)
    y = ours(jagged(x)) + jagged(x)  # PyTorch adds what has one offsets tensor
    torch.testing.assert_close(y.values(), masked(padded(x, float("nan")), MASK)[MASK] + x, rtol=0, atol=0)
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, masked.get_buffer(name)), name
    assert int(ours.num_batches_tracked) == 1
    ours.eval(), masked.eval()
    torch.testing.assert_close(ours(jagged(x)).values(), masked(padded(x, 1.0), MASK)[MASK], rtol=0, atol=0)


def test_rows_over_other_axes_and_weights_of_several():
    x = randn(T, 4, 5)
    w = randn(4, 5, seed=1)
    got = nk.layer_norm(jagged(x), w, axis=(2, 3), eps=1e-3)
    assert torch.equal(got.values(), nk.layer_norm(x, w, axis=(1, 2), eps=1e-3))
    heads = jagged(x).transpose(1, 2)  # (N, 4, j, 5)
    per_head = randn(4, 1, 5, seed=2)
    y = nk.rms_norm(heads, per_head)
    assert y.shape == heads.shape
    assert torch.equal(y.values(), nk.rms_norm(heads.values(), per_head))
    assert torch.equal(nk.rms_norm(heads, per_head[None]).values(), y.values())
    across = nk.rms_norm(heads, randn(4, 5, seed=3), axis=(1, 3))
    assert torch.equal(across.values(), nk.rms_norm(heads.values(), randn(4, 5, seed=3), axis=(0, 2)))


@pytest.mark.parametrize("axes", [(0, 1), (1,), (0, 1, 2), (1, 2)])
def test_moments(axes: tuple[int, ...]):
    x, *_ = inputs()
    got, want = nk.moments(jagged(x), axes=axes), nk.moments(padded(x, float("nan")), axes=axes, mask=MASK[:, :, None])
    for field in ("count", "mean", "m2", "remainder"):
        a, b = getattr(got, field), getattr(want, field)
        # All in one: 384 terms in other chunks, each sum within 384 roundings of that of sizes (m2's, the largest).
        atol = 2 * T * C * unit(torch.float32) * float(want.m2) if axes == (0, 1, 2) else 0.0
        torch.testing.assert_close(a.expand_as(b), b, rtol=0, atol=atol, msg=field)


BEGINS, HELD = torch.tensor([1, 0, 2]), torch.tensor([3, 2, 0])
REAL = (torch.arange(6) >= BEGINS[:, None]) & (torch.arange(6) < (BEGINS + HELD)[:, None])


@pytest.mark.parametrize("name", [*ROWS, *POSITIONS])
def test_what_lies_between_samples_reaches_nothing(name: str):
    norm = ROWS.get(name) or (lambda x, other, w, b: POSITIONS[name](x, w, b))
    dense = torch.where(REAL[..., None], randn(3, 6, C), torch.nan).requires_grad_()
    x = torch.nested.narrow(dense, 1, BEGINS, HELD, layout=torch.jagged)
    w, b = randn(C, seed=4).requires_grad_(), randn(C, seed=5).requires_grad_()
    packed = dense.detach()[REAL].requires_grad_()
    y, want = (
        result[0] if isinstance(result := norm(t, t, w, b), tuple) else result
        for t in (x, nested_tensor_from_jagged(packed, torch.tensor([0, 3, 5, 5])))
    )
    real, values, dy = REAL.view(-1), y.values(), randn(18, C, seed=6)
    # The same rows in the same order: the kernels' bits, and PyTorch's where there is none (dyt, derf).
    assert torch.equal(values[real], want.values())
    assert not values[~real].any()
    upstream = torch.where(real[:, None], dy, torch.nan)  # what a gradient may hold there
    leaves = [w] if name != "l2" else []
    dx, *dw = torch.autograd.grad(values, [dense, *leaves], upstream)
    expected, *expected_dw = torch.autograd.grad(want.values(), [packed, *leaves], dy[real])
    assert torch.equal(dx[REAL], expected)
    assert not dx[~REAL].any()
    for got, one in zip(dw, expected_dw, strict=True):
        # Rows of zeros between the samples move a row to another partial sum of dw: 18 terms of size up to 64 (scale's
        # single weight: C times as many).
        torch.testing.assert_close(got, one, rtol=0, atol=2 * row_depth(18) * 64 * C * unit(torch.float32))


@pytest.mark.parametrize("name", POSITIONS)
def test_values_beyond_the_last_sample_are_not_counted(name: str):
    x, _, _, w, b = inputs()
    longer = torch.cat([torch.full((2, C), torch.nan), x, torch.full((3, C), torch.nan)])
    y = POSITIONS[name](nested_tensor_from_jagged(longer, OFFSETS + 2), w, b)
    assert torch.equal(y.values()[2:-3], POSITIONS[name](jagged(x), w, b).values())


def test_nothing_at_all():
    none = nested_tensor_from_jagged(torch.empty(0, C), torch.zeros(4, dtype=torch.int64))
    for norm in (nk.rms_norm, nk.instance_norm, partial(nk.group_norm, groups=4), batch_norm):
        assert norm(none).values().shape == (0, C)
    assert int(nk.moments(none, axes=(0, 1)).count.max()) == 0


def test_out_writes_where_it_was_told():
    x, other, *_ = inputs()
    ragged, stream, to = jagged(x), jagged(other), jagged(torch.full((T, C), torch.nan))
    assert nk.rms_norm(ragged, out=to) is to
    assert torch.equal(to.values(), nk.rms_norm(x))
    y, s = nk.add_rms_norm(ragged, stream, out=(ragged, stream))
    assert y is ragged
    assert s is stream
    want = nk.add_rms_norm(*inputs()[:2])
    assert torch.equal(ragged.values(), want[0])
    assert torch.equal(stream.values(), want[1])


def test_a_wiring_around_a_jagged_stream():
    block = nk.PreNorm(C, nn.Linear(C, C))
    x, *_ = inputs()
    y = block(jagged(x))
    assert y.offsets() is OFFSETS
    torch.testing.assert_close(y.values(), block(x), rtol=1e-6, atol=1e-6)


def test_explain_speaks_of_what_runs():
    x = jagged(inputs()[0])
    assert nk.explain(x, nk.LLAMA).kernel == "cpu"
    assert nk.explain(x, nk.TORCH_LAYER_NORM, coverage="instance").kernel == "cpu"
    assert nk.explain(jagged(inputs()[0].double()), nk.LLAMA).kernel == "reference"


def test_refusals():
    x, other, *_ = inputs()
    ragged = jagged(x)
    elsewhere = nested_tensor_from_jagged(other, OFFSETS.clone())
    for norm in (nk.add_rms_norm, nk.add_layer_norm, nk.gated_rms_norm):
        with pytest.raises(ValueError, match="one offsets"):
            norm(ragged, elsewhere)
        with pytest.raises(ValueError, match=r"is dense.*x.offsets\(\)"):
            norm(ragged, other)
    with pytest.raises(ValueError, match="is dense"):
        nk.add_rms_norm(x, ragged)
    with pytest.raises((ValueError, TypeError), match="gate"):
        nk.gated_rms_norm(x, ragged)
    for axis, what in ((0, "batch"), (1, "ragged"), ((1, 2), "ragged")):
        with pytest.raises(ValueError, match=f"is the {what} axis"):
            nk.rms_norm(ragged, axis=axis)
    for weight in (randn(T, C), randn(N, 1, C), randn(T, 1)):
        with pytest.raises(ValueError, match="not one for all positions"):
            nk.rms_norm(ragged, weight)
    with pytest.raises(TypeError, match="weight is a nested tensor"):
        nk.rms_norm(x, ragged)
    for axes in ((0,), (2,), (0, 2)):
        with pytest.raises(ValueError, match="leave its ragged axis"):
            nk.moments(ragged, axes=axes)
    for norm in (nk.instance_norm, partial(nk.group_norm, groups=4), batch_norm):
        with pytest.raises(ValueError, match="holds real positions only"):
            norm(ragged, mask=MASK)
        with pytest.raises(ValueError, match="is the ragged axis"):
            norm(ragged, channel_axis=1)
        with pytest.raises(TypeError, match="mask is a nested"):
            norm(padded(x, 0.0), mask=jagged(torch.ones(T, dtype=torch.bool)))
    for module in (nk.BatchNorm(C), nk.InstanceNorm(C), nk.GroupNorm(4, C)):
        with pytest.raises(ValueError, match="holds real positions only"):
            module(ragged, lengths=torch.tensor(LENGTHS))
    with pytest.raises(ValueError, match="more than one"):
        batch_norm(nested_tensor([randn(1, C)], layout=torch.jagged))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_old_layout_is_refused_by_name():
    x = nested_tensor([randn(3, C), randn(2, C)], layout=torch.strided)
    w, b = randn(C), randn(C)
    norms = [partial(f, x, x, w, b) for f in ROWS.values()] + [partial(f, x, w, b) for f in POSITIONS.values()]
    modules = (nk.LayerNorm(C), nk.RMSNorm(C), nk.ScaleNorm(C), nk.DyT(C), nk.Derf(C), nk.BatchNorm(C),
               nk.InstanceNorm(C), nk.GroupNorm(4, C))  # fmt: skip
    norms += [partial(module, x) for module in modules]
    norms += [lambda: nk.moments(x, axes=0), lambda: nk.QKNorm(C, 2)(x, x), lambda: nk.GatedRMSNorm(C)(x, x)]
    for norm in norms:
        with pytest.raises(TypeError, match=r"layout torch.strided; make it jagged"):
            norm()


COMPILED = {name: norm for name, norm in ROWS.items() if name in ("layer", "llama", "add rms", "gated", "dyt")}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo reads it
@pytest.mark.parametrize("name", always([*COMPILED, "batch"], ("layer", "batch").__contains__))
def test_under_a_compiler(name: str):
    x, other, dy, w, b = inputs()
    torch._dynamo.reset()
    norm = COMPILED.get(name) or (lambda x, other, w, b: POSITIONS["batch"](x, w, b))
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    leaves = [x, other, w, b]
    _, flat, gradients = outcome(norm, leaves, dy, jagged)
    found, again, theirs = outcome(compiled, leaves, dy, jagged)
    assert all(y.shape[0] == N for y in found)
    for got, want in zip([*again, *theirs], [*flat, *gradients], strict=True):
        if want is not None:
            assert got is not None
            # Both are float32 computations of values up to 8² from sums of at most T·C terms.
            torch.testing.assert_close(got, want, rtol=0, atol=T * C * 64 * unit(torch.float32))


@pytest.mark.parametrize("name", ["instance", "group"])
def test_statistics_of_a_sample_are_refused_under_a_compiler(name: str):
    x, _, _, w, b = inputs()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot be compiled here"):
        torch.compile(lambda x: POSITIONS[name](x, w, b), backend="eager", fullgraph=True)(jagged(x))
