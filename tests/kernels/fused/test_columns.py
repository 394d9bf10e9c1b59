"""The column kernels: right to the bound of float32 statistics, and with bits that depend on valid values alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normkit as nk
from columns import EPS, Case
from fused import BACKEND, INTERPRETED
from rows import quick, randn

NORMS = ("batch", "instance", 2)
SHAPES = [(5, 1, 6), (3, 7, 2), (2, 70, 34), (1, 131, 16), (4, 5, 520)]
LAYOUTS = pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@LAYOUTS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("samples", "length", "c"), quick(SHAPES, lambda shape: shape in SHAPES[1:4:2]))
def test_values_and_gradients(norm: str | int, samples: int, length: int, c: int, masked: bool, first: bool):
    case = Case.draw(norm, samples, length, c)
    case = case.masked() if masked else case
    case.check(case.run(first))


@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == 2))
def test_half_types_round_once(norm: str | int):
    case = Case.draw(norm, 3, 37, 20, torch.bfloat16)
    case.check(case.run())
    case.masked().check(case.masked().run())


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_half_types_in_both_layouts(norm: str | int, dtype: torch.dtype, first: bool):
    for shape in [(5, 1, 6), (2, 70, 34), (4, 5, 520)]:
        case = Case.draw(norm, *shape, dtype)
        case.check(case.run(first))
        case.masked().check(case.masked().run(first))


@pytest.mark.parametrize(
    ("shape", "first"),
    quick([((3, 3000, 3), False), ((300, 5, 3), True), ((2, 9000, 2), True)], lambda case: case[0] == (300, 5, 3)),
)
def test_more_chunks_than_are_joined_at_once(shape: tuple[int, int, int], first: bool):
    case = Case.draw("batch", *shape)
    case.check(case.run(first))
    case.masked().check(case.masked().run(first))


@LAYOUTS
@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_extreme_channels(norm: str | int, first: bool):
    """Large means, and squares beyond float32 on either side; a scale is exact, so the bound is the same."""
    z = randn(3, 90, 8)
    spread = torch.tensor([1e18, 1e18, 1e30, 1e30, 0.005, 0.005, 3e37, 3e37])
    centre = torch.tensor([0, 0, 1e31, 1e31, 1e4, 1e4, 0, 0])
    case = replace(Case.draw(norm, 3, 90, 8), x=(z.clamp(-3, 3) * spread + centre))
    if norm == 2:  # a group of two per scale
        case = replace(case, norm=4)
    case.check(case.run(first))
    tiny = replace(case, x=z * torch.tensor([1e-30, 1e-30, 1e-38, 1e-38, 1e-20, 1e-20, 1.0, 1.0]), eps=0.0)
    tiny.check(tiny.run(first))


@LAYOUTS
@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_factors_that_may_not_be_multiplied_first(norm: str | int, first: bool):
    """Gains, gradients and deviations whose products leave float32's range although the results do not."""
    case = Case.draw(norm, 3, 90, 8)
    gains = torch.tensor([1e30, 1e-30, 0.0, 1e37, 1e-30, 1.0, -(2.0**50), 3.0])
    case = replace(case, weight=gains, bias=case.bias * gains)
    case.check(case.run(first))
    slopes = torch.tensor([1e-35, 1e25, 1e20, 1e-37, 1e30, 1e-25, 1e-30, 1e10])
    replace(case, dy=case.dy * slopes).check(replace(case, dy=case.dy * slopes).run(first))
    spread = torch.tensor([1e-9, 1e9, 1e-15, 1e15, 1e9, 1e-9, 1e16, 1e-16])
    if norm == 2:
        spread = spread[torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])]
    case = replace(case, x=(case.x - 3) * spread, eps=0.0)
    case.check(case.run(first))
    steep = replace(case, weight=randn(8, seed=2), dy=case.dy * spread.square().clamp(1e-27, 1e27))
    steep.check(steep.run(first))


@LAYOUTS
@pytest.mark.parametrize("length", quick([1667, 90, 5000], lambda length: length == 1667))
@pytest.mark.parametrize("eps", [EPS, 1e-12])
def test_a_constant_channel_is_its_bias(eps: float, length: int, first: bool):
    """Although the mean of so many equal numbers is off by their sum's rounding, which 1/√ε makes large."""
    case = replace(Case.draw("batch", 3, length, 6), eps=eps)
    case.x[:] = torch.tensor([57e6, 13700.3, 123456.7, 3.14e7, 0.1, -7.7])
    y, dx, dw, _ = case.run(first)
    assert torch.equal(y, case.bias.expand_as(y))
    assert not dw.any()
    g = case.dy.double() * case.weight.double() / eps**0.5
    bound = 2.0**-20 * g.abs().mean((0, 1)) * 8
    assert bool(((dx - (g - g.mean((0, 1)))).abs() <= bound).all())


@LAYOUTS
@pytest.mark.parametrize(("spread", "size"), [(5e5, 1e34), (9.6e-7, 1e-37)])
def test_sums_of_gradients_keep_the_range_that_those_of_the_normalised_have(spread: float, size: float, first: bool):
    case = Case.draw("batch", 4, 64, 3)
    case = replace(case, x=(case.x - 3) * spread, dy=case.dy * size, eps=0.0, weight=case.weight * min(1, 1e30 / size))
    case.check(case.run(first))


@LAYOUTS
def test_an_extreme_channel_changes_no_bit_of_another(first: bool):
    case = replace(Case.draw("batch", 3, 90, 8), eps=1e-12)
    case.x[..., 5] *= 1e-41  # whose mean would be another, were it multiplied by a power of two, too
    plain = case.run(first)
    for value in (1e25, 1e-30, float("inf"), float("nan")):
        x = case.x.clone()
        x[..., 2] *= value
        found = replace(case, x=x).run(first)
        keep = torch.arange(8) != 2
        for got, want in zip(found, plain, strict=True):
            assert torch.equal(got[..., keep], want[..., keep])
        assert bool(found[0][..., 2].isnan().any()) == (value != value or value == float("inf"))


@LAYOUTS
@pytest.mark.parametrize("norm", ["instance", 2])
def test_a_sample_depends_on_itself_alone(norm: str | int, first: bool):
    case = Case.draw(norm, 4, 90, 18).masked()
    assert case.mask is not None
    one = replace(case, x=case.x[2:3], dy=case.dy[2:3], mask=case.mask[2:3]).run(first)
    x = case.x.clone()
    x[1] = float("nan")
    x[3] *= 1e25
    many = replace(case, x=x).run(first)
    assert same([t[2:3] for t in many[:2]], one[:2])


@LAYOUTS
@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_padding_changes_no_bit(norm: str | int, first: bool):
    """Neither its amount nor its content, nor where it lies, for chunks are of valid positions."""
    case = Case.draw(norm, 3, 150, 18)
    case = replace(case, mask=torch.arange(150) < torch.tensor([[150], [70], [101]]))
    want = case.run(first)
    where = torch.cat([torch.arange(0, 80), torch.arange(170, 240)])
    x, dy = (torch.full((3, 400, 18), torch.nan) for _ in range(2))
    mask = torch.zeros(3, 400, dtype=torch.bool)
    x[:, where], dy[:, where], mask[:, where] = case.x, case.dy, case.mask  # type: ignore[assignment]
    y, dx, dw, db = replace(case, x=x, dy=dy, mask=mask).run(first)
    assert not y[~mask].any()
    assert not dx[~mask].any()
    assert same([y[:, where], dx[:, where], dw, db], want)


def test_a_mask_is_as_good_as_leaving_out():
    case = Case.draw("batch", 3, 150, 18).masked()
    assert case.mask is not None
    y, dx, dw, db = case.run()
    left = replace(case, x=case.x[case.mask][None], dy=case.dy[case.mask][None], mask=None).run()
    assert same([y[case.mask][None], dx[case.mask][None], dw, db], left)
    whole = torch.ones(3, 150, dtype=torch.bool)
    assert same(replace(case, mask=whole).run(), replace(case, mask=None).run())


@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_outer_strides_change_no_bit(norm: str | int):
    case = Case.draw(norm, 4, 30, 18).masked()
    for first in (False, True):
        want = case.run(first)
        x, dy = (t.mT.contiguous() if first else t for t in (case.x, case.dy))

        def apart(t: Tensor) -> Tensor:
            """The same values with gaps along every axis but the innermost."""
            room = torch.full((8, t.shape[1] * 3, t.shape[2] + 5), torch.nan)
            view = room[::2, ::3, 2 : t.shape[2] + 2]
            view.copy_(t)
            return view

        leaf = apart(x).requires_grad_()
        y = case.call(leaf, case.weight, case.bias, channel_axis=1 if first else -1)
        (dx,) = torch.autograd.grad(y, leaf, apart(dy))
        got = [y.mT, dx.mT] if first else [y, dx]
        assert same([t.detach() for t in got], want[:2])


def test_gradients_that_lie_differently():
    case = Case.draw("batch", 4, 30, 18)
    x = case.x.clone().requires_grad_()

    def gradient(dy: Tensor) -> Tensor:
        return torch.autograd.grad(case.call(x, case.weight, case.bias), x, dy)[0]

    assert torch.equal(gradient(case.dy.mT.contiguous().mT), gradient(case.dy))
    one = torch.tensor(0.5)
    assert torch.equal(gradient(one.expand(4, 30, 18)), gradient(torch.full((4, 30, 18), 0.5)))
    columns = case.dy[:1, :1].expand(4, 30, 18)
    assert torch.equal(gradient(columns), gradient(columns.contiguous()))


@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: False))
def test_expanded_inputs(norm: str | int):
    case = Case.draw(norm, 4, 30, 18)
    for x in (case.x[:1].expand(4, 30, 18), case.x[:, :1].expand(4, 30, 18)):
        repeated = replace(case, x=x.contiguous())
        leaf = x.detach().requires_grad_()
        y = case.call(leaf, case.weight, case.bias)
        assert same([y.detach(), *torch.autograd.grad(y, leaf, case.dy)], repeated.run()[:2])
    across = case.x[:1].mT.contiguous().expand(4, 18, 30)
    y = case.call(across, case.weight, case.bias, channel_axis=1)
    assert torch.equal(y.mT, replace(case, x=across.mT).run(first=True)[0])
    x = case.x[:, :1, 0].expand(4, 18).T.contiguous().T if norm == "batch" else case.x[:1, :1].expand(4, 1, 18)
    case.call(x, case.weight, case.bias)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_images(norm: str | int, form: torch.memory_format):
    case = Case.draw(norm, 2, 30, 18)
    image = case.x.mT.unflatten(2, (5, 6)).contiguous(memory_format=form)
    y = case.call(image, case.weight, case.bias, channel_axis=1)
    assert y.is_contiguous(memory_format=form)
    assert torch.equal(y.flatten(2).mT, case.run(first=form == torch.contiguous_format)[0])


def test_batches_of_single_vectors_in_any_order():
    case = Case.draw("batch", 90, 1, 18)
    x = case.x[:, 0]
    y = case.call(x, case.weight, case.bias)
    assert torch.equal(y.unsqueeze(1), case.run()[0])
    turned = case.call(x.T.contiguous().T, case.weight, case.bias)
    case.check([turned.unsqueeze(1), *case.run()[1:]])


def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that the kernels which run are added to."""
    ran: list[str] = []
    if INTERPRETED:
        from normkit.kernels.gpu.launch import Launcher

        launch = Launcher.launch
        monkeypatch.setattr(Launcher, "launch", lambda self, *a: (ran.append(self.kernel.__name__), launch(self, *a)))
    else:
        from normkit.kernels.cpu import column_launch, positions

        run = column_launch.run
        for module in (column_launch, positions):
            monkeypatch.setattr(
                module, "run", lambda plan, kernel, x, **kw: (ran.append(kernel), run(plan, kernel, x, **kw))
            )
    return ran


def test_what_is_not_wanted_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    ran = kernels_run(monkeypatch)
    case = Case.draw("batch", 4, 30, 18)
    dx, dw = case.run()[1:3]
    frozen = case.x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(case.call(frozen, case.weight, case.bias), frozen, case.dy)[0], dx)
    ran.clear()
    w = case.weight.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(case.call(case.x, w, case.bias), w, case.dy)[0], dw)
    assert "gradient" not in ran
    ran.clear()
    x = case.x.clone().requires_grad_()
    mean, var = randn(18), randn(18) ** 2
    torch.autograd.grad(nk.batch_norm(x, mean, var, case.weight), x, case.dy)
    assert ran == ["apply", "apply"]


@LAYOUTS
def test_running_statistics_at_inference(first: bool):
    case = Case.draw("batch", 4, 30, 18).masked()
    mean, var = randn(18, seed=5), randn(18, seed=6) ** 2
    want = [t.double().requires_grad_() for t in (case.x, case.weight, case.bias)]
    y = (want[0] - mean) / (var.double() + 1e-5).sqrt() * want[1] + want[2]
    y = torch.where(case.mask.unsqueeze(-1), y, 0.0)  # type: ignore[union-attr]
    exact = [y.detach(), *torch.autograd.grad(y, want, case.dy.double())]
    x, dy = (torch.where(case.mask.unsqueeze(-1), t, torch.nan) for t in (case.x, case.dy))  # type: ignore[union-attr]
    x, dy = (t.mT.contiguous() if first else t for t in (x, dy))
    leaves = [t.clone().requires_grad_() for t in (x, case.weight, case.bias)]
    y = nk.batch_norm(leaves[0], mean, var, *leaves[1:], mask=case.mask, channel_axis=1 if first else -1)
    got = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    got = [*(t.mT if first else t for t in got[:2]), *got[2:]]
    # Six roundings an element of size |x̂γ| + |β| at most; sums of 120 terms, each of depth below 128.
    size = (case.x.abs() + mean.abs()) / (var + 1e-5).sqrt() + 1
    u, up = 2.0**-24, case.dy.abs()
    limits = [
        8 * u * (size * case.weight.abs() + case.bias.abs()),
        8 * u * up * case.weight.abs() / (var + 1e-5).sqrt(),
    ]
    limits += [136 * u * (up * size).sum((0, 1)), 136 * u * up.sum((0, 1))]
    for g, e, limit in zip(got, exact, limits, strict=True):
        assert ((g.double() - e).abs() <= limit).all()


def test_the_buffers_move_as_float64_says():
    x = randn(3, 400, 5) * torch.tensor([1.0, 0.005, 1e18, 1e-25, 1.0]) + torch.tensor([0.0, 1e4, 0.0, 0.0, 7.0])
    mask = randn(3, 400, seed=1) < 0.5
    mean, var = torch.full((5,), 2.0), torch.full((5,), 3.0)
    nk.batch_norm(x, mean, var, training=True, momentum=0.25, mask=mask)
    valid = x[mask].double()
    batch = valid.mean(0), valid.var(0)
    # A sum of depth k = 128 is off by (k + 1)·u of the terms' sizes, a square by one more; then six roundings.
    for got, start, exact, spread in ((mean, 2.0, batch[0], valid.std(0)), (var, 3.0, batch[1], 2 * batch[1])):
        want = 0.75 * start + 0.25 * exact
        assert ((got.double() - want).abs() <= 2.0**-24 * (136 * 0.25 * spread + 6 * want.abs() + 6 * start)).all()


@pytest.mark.parametrize("norm", quick(NORMS, lambda norm: norm == "batch"))
def test_pytorch_agrees(norm: str | int):
    """Twice the bound, since theirs has an error, too; and their sums of squares are no corrected ones."""
    case = Case.draw(norm, 4, 60, 18)
    leaves = [t.clone().requires_grad_() for t in (case.x.mT.contiguous(), case.weight, case.bias)]
    buffers = [torch.zeros(18), torch.ones(18)]
    ours = [t.clone() for t in buffers]
    if norm == "batch":
        y = F.batch_norm(leaves[0], *buffers, *leaves[1:], training=True)
        nk.batch_norm(case.x, *ours, training=True)
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(ours, buffers, strict=True))
    elif norm == "instance":
        y = F.instance_norm(leaves[0], None, None, *leaves[1:])
    else:
        y = F.group_norm(leaves[0], int(norm), *leaves[1:])
    theirs = [y.detach().mT, *torch.autograd.grad(y, leaves, case.dy.mT)]
    theirs[1] = theirs[1].mT
    for a, b in zip(theirs, case.run(), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives_are_the_references(norm: str | int):
    case = Case.draw(norm, 2, 9, 6).masked()

    def second(backend: str) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (case.x, case.weight, case.bias)]
        with nk.use(backend):
            y = case.call(*leaves)
            first = torch.autograd.grad(y, leaves, case.dy, create_graph=True)
            return list(torch.autograd.grad([(g * g).sum() for g in first[:2]], leaves[:2]))

    for a, b in zip(second(BACKEND), second("reference"), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_second_derivatives_at_inference():
    x, w, mean, var = randn(3, 5, 4), randn(4, seed=1), randn(4, seed=2), randn(4, seed=3) ** 2
    leaves = [x.requires_grad_(), w.requires_grad_()]
    y = nk.batch_norm(leaves[0], mean, var, leaves[1])
    mean.add_(1)  # a step of training in between does not reach this backward
    (dx,) = torch.autograd.grad(y, leaves[0], torch.ones_like(y), create_graph=True)
    (mixed,) = torch.autograd.grad(dx.sum(), leaves[1])
    assert torch.allclose(mixed, 15 / (var + 1e-5).sqrt())


def test_what_has_no_kernel_says_so():
    x = randn(4, 6, 8)
    for bad, why in [
        (x.double(), "float64"),
        (x[..., ::2], "side by side"),
        (x[:, ::2].unflatten(1, (3, 1)).transpose(1, 2)[..., ::2], "side by side"),
    ]:
        with pytest.raises(ValueError, match=why):
            nk.instance_norm(bad)
        with nk.use("auto"):
            nk.instance_norm(bad)
    with pytest.raises(ValueError, match="need a gradient"):
        nk.batch_norm(x, torch.zeros(8), torch.ones(8, requires_grad=True))
    with pytest.raises(ValueError, match="float64"):
        nk.batch_norm(x, None, None, torch.ones(8, dtype=torch.float64), training=True)
