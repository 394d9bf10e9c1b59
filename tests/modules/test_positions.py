"""BatchNorm, InstanceNorm, GroupNorm against torch's, with their state."""

import copy
import io
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from exact import exact, unit

N, L, C = 4, 7, 6
U = unit(torch.float32)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _draw(*modules: nn.Module) -> None:
    """Give all the same random affine."""
    for module in modules:
        for seed, p in enumerate(module.parameters()):
            with torch.no_grad():
                p.copy_(_random(*p.shape, seed=seed + 10))


def _pair(channel_axis: int = -1, **options: Any) -> tuple[nk.BatchNorm, nn.BatchNorm1d]:
    ours, theirs = nk.BatchNorm(C, channel_axis=channel_axis, **options), nn.BatchNorm1d(C, **options)
    _draw(ours, theirs)
    return ours, theirs


def _batches(count: int = 4) -> list[Tensor]:
    return [_random(N + i, L - i, C, seed=i) * (1 + i) + i for i in range(count)]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _same_state(module: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def _grads(module: nn.Module, x: Tensor, dy: Tensor, **inputs: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = module(leaf, **inputs)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize(("momentum", "affine", "track"), list(product([0.1, None, 1.0], [True, False], [True, False])))
def test_batch_norm_is_torchs(momentum: float | None, affine: bool, track: bool, channel_axis: int) -> None:
    """Both lie within the float64 bound of `exact`, so they differ by at most twice that.

    Where that has no twin (inference, the other layout), sums of n terms on either side differ by at most 2n·u of the
    largest, and a rounding or two on top of n ≥ 16 are inside the 4n allowed. A running statistic adds three roundings
    a batch to a batch statistic's own n + 8.
    """
    options: dict[str, Any] = {"momentum": momentum, "affine": affine, "track_running_stats": track}
    ours, theirs = _pair(channel_axis, **options)
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        for seed, x in enumerate(_batches()):
            dy = _random(*x.shape, seed=seed + 50)
            mine, other = (x, dy) if channel_axis == -1 else (x.mT, dy.mT)
            got, want = _grads(ours, mine, other), _grads(theirs, x.mT, dy.mT)
            if channel_axis == -1:
                want[:2] = [want[0].mT, want[1].mT]
                if training or not track:
                    w, b = (ours.weight, ours.bias) if affine else (torch.ones(C), torch.zeros(C))
                    assert w is not None
                    assert b is not None
                    truth = exact(x, (0, 1), w, b, dy, eps=1e-5)
                    for number, value in zip((truth.y, truth.dx, truth.dw, truth.db), got, strict=False):
                        number.check(value)
                    for number, value in zip((truth.y, truth.dx, truth.dw, truth.db), want, strict=False):
                        number.check(value)
            for one, two in zip(got, want, strict=True):
                scale = float(two.abs().max()) * (x.numel() if one.dim() == 1 else N * L)
                assert (one - two).abs().max() <= 4 * U * scale
    if track:
        slack = len(_batches()) * (49 + 11) * U
        for name in ("running_mean", "running_var"):
            mine, other = ours.get_buffer(name), theirs.get_buffer(name)
            assert (mine - other).abs().max() <= slack * (other.abs().max() + 4)
        assert torch.equal(ours.get_buffer("num_batches_tracked"), theirs.get_buffer("num_batches_tracked"))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_state_dicts_load_both_ways(options: dict[str, Any]) -> None:
    ours, theirs = _pair(**options)
    for x in _batches(2):
        ours(x)
        theirs(x.mT * 3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    fresh = nn.BatchNorm1d(C, **options)
    fresh.load_state_dict(ours.state_dict(), strict=True)
    assert _same_state(fresh, _state(ours))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert _same_state(ours, _state(theirs))


def test_two_dimensional_input() -> None:
    ours, theirs = _pair()
    x = _random(9, C)
    assert (ours(x) - theirs(x)).abs().max() < 4 * 9 * U * 3
    assert (ours.eval()(x) - theirs.eval()(x)).abs().max() < 8 * U * 4


@pytest.mark.parametrize(("groups", "eps"), [(1, 1e-5), (2, 1e-3), (3, 1e-5), (6, 0.1)])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_torchs(groups: int, eps: float, affine: bool) -> None:
    ours, theirs = nk.GroupNorm(groups, C, eps, affine=affine), nn.GroupNorm(groups, C, eps, affine=affine)
    first = nk.GroupNorm(groups, C, eps, affine=affine, channel_axis=1)
    _draw(ours, theirs, first)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, dy = _random(N, L, C) * 3 + 1, _random(N, L, C, seed=1)
    mine, second = _grads(ours, x, dy), _grads(first, x.mT, dy.mT)
    other = _grads(theirs, x.mT, dy.mT)
    second[:2], other[:2] = [t.mT for t in second[:2]], [t.mT for t in other[:2]]

    def split(t: Tensor) -> Tensor:
        return t.unflatten(-1, (groups, C // groups))

    w, b = (ours.weight, ours.bias) if affine else (torch.ones(C), torch.zeros(C))
    assert w is not None
    assert b is not None
    truth = exact(split(x), (1, 3), split(w), split(b), split(dy), eps=eps)
    for results in (mine, second, other):
        for number, value in zip((truth.y, truth.dx, truth.dw, truth.db), results, strict=False):
            number.check(value.reshape(number.value.shape))


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_is_torchs(affine: bool) -> None:
    ours, theirs = nk.InstanceNorm(C, affine=affine), nn.InstanceNorm1d(C, affine=affine)
    _draw(ours, theirs)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, dy = _random(N, L, C) * 3 + 1, _random(N, L, C, seed=1)
    mine, other = _grads(ours, x, dy), _grads(theirs, x.mT, dy.mT)
    other[:2] = [t.mT for t in other[:2]]
    w, b = (ours.weight, ours.bias) if affine else (torch.ones(C), torch.zeros(C))
    assert w is not None
    assert b is not None
    truth = exact(x, (1,), w, b, dy, eps=1e-5)
    for results in (mine, other):
        for number, value in zip((truth.y, truth.dx, truth.dw, truth.db), results, strict=False):
            number.check(value)


MODULES = {
    "batch": lambda **options: nk.BatchNorm(C, **options),
    "instance": lambda **options: nk.InstanceNorm(C, **options),
    "group": lambda **options: nk.GroupNorm(3, C, **options),
}


@pytest.mark.parametrize("name", MODULES)
def test_lengths_are_a_mask(name: str) -> None:
    lengths = torch.tensor([7, 3, 0, 5])
    mask = torch.arange(L) < lengths.unsqueeze(1)
    x = torch.where(mask.unsqueeze(-1), _random(N, L, C), float("nan"))
    by_mask, by_lengths = MODULES[name](), MODULES[name]()
    first = MODULES[name](channel_axis=1)
    want = by_mask(x, mask)
    assert torch.equal(by_lengths(x, lengths=lengths), want)
    assert torch.equal(by_lengths(x, lengths=lengths.to(torch.uint8)), want)
    assert (first(x.mT, lengths=lengths).mT - want).abs().max() < 4 * N * L * U * 3
    assert not want[~mask].any()
    alone = MODULES[name]()(torch.where(mask.unsqueeze(-1), x, 1e9), mask)
    assert torch.equal(alone, want)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (
            {"mask": torch.ones(N, L, dtype=torch.bool), "lengths": torch.ones(N, dtype=torch.int64)},
            ValueError,
            "not both",
        ),
        ({"lengths": torch.ones(N)}, ValueError, "integers"),
        ({"lengths": torch.ones(N, dtype=torch.bool)}, ValueError, "integers"),
        ({"lengths": torch.ones(N + 1, dtype=torch.int64)}, ValueError, "one per sample"),
        ({"lengths": [1, 2, 3, 4]}, TypeError, "tensor"),
        ({"mask": [[True] * L] * N}, TypeError, "bool tensor"),
        ({"mask": torch.ones(N, L)}, TypeError, "bool tensor"),
        ({"mask": torch.ones(L, N, dtype=torch.bool)}, ValueError, r"\(4, 7\).*got \(7, 4\)"),
    ],
)
def test_masks_that_are_refused(name: str, inputs: dict[str, Any], error: type[Exception], words: str) -> None:
    module = MODULES[name]()
    before = _state(module)
    with pytest.raises(error, match=words):
        module(_random(N, L, C), **inputs)
    assert _same_state(module, before)


@pytest.mark.parametrize("name", MODULES)
def test_inputs_that_are_refused(name: str) -> None:
    module = MODULES[name](affine=False)
    before = _state(module)
    for shape in [(N, L, C + 1), (N, C, L), (C,), ()]:
        with pytest.raises(ValueError, match=rf"built for {C} channels on axis -1"):
            module(torch.ones(shape))
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
            module(torch.ones(N, L, C, dtype=dtype))
    with pytest.raises(ValueError, match="eps=None"):
        MODULES[name](eps=None)
    assert _same_state(module, before)


@pytest.mark.parametrize("width", [0, -1])
def test_sizes_that_are_refused(width: int) -> None:
    for make in (nk.BatchNorm, nk.InstanceNorm, lambda w: nk.GroupNorm(1, w), lambda w: nk.GroupNorm(w, C)):
        with pytest.raises(ValueError, match="at least 1"):
            make(width)
        with pytest.raises(TypeError, match="must be an int"):
            make(2.0)
    with pytest.raises(ValueError, match="divide"):
        nk.GroupNorm(4, C)
    with pytest.raises(ValueError, match="momentum"):
        nk.BatchNorm(C, momentum=1.1)
    with pytest.raises(TypeError, match="momentum"):
        nk.BatchNorm(C, momentum="0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batches_that_leave_no_trace(momentum: float | None) -> None:
    module = nk.BatchNorm(C, momentum=momentum)
    module(_random(N, L, C))
    before = _state(module)
    assert module(torch.empty(0, L, C)).shape == (0, L, C)
    assert not module(_random(N, L, C), torch.zeros(N, L, dtype=torch.bool)).any()
    assert not module(_random(N, L, C), lengths=torch.zeros(N, dtype=torch.int64)).any()
    for one in (torch.ones(1, 1, C), torch.ones(1, C)):
        with pytest.raises(ValueError, match=r"more than one value per channel, got x of shape \(1, "):
            module(one)
    assert _same_state(module, before)
    assert module.eval()(torch.ones(1, 1, C)).shape == (1, 1, C)
    assert _same_state(module, before)


def test_padding_moves_neither_output_nor_statistics() -> None:
    x, lengths = _random(N, L, C) + 2, torch.tensor([7, 3, 1, 5])
    short, long = nk.BatchNorm(C), nk.BatchNorm(C)
    y = short(x, lengths=lengths)
    padded = long(torch.cat([x, torch.full((N, 3 * L, C), 1e6)], dim=1), lengths=lengths)
    # Same 16 elements, another order of summation: twice the float64 bound of (n/2 + 9)|x̂| + n roundings, |x̂| ≤ 4.
    assert (padded[:, :L] - y).abs().max() <= 2 * U * (17 * 4 + 16)
    for name in ("running_mean", "running_var"):
        assert (short.get_buffer(name) - long.get_buffer(name)).abs().max() <= 2 * U * 24 * 8


def test_two_forwards_before_one_backward() -> None:
    x1, x2 = _random(N, L, C), _random(N, L, C, seed=1)
    module, apart = nk.BatchNorm(C), nk.BatchNorm(C)
    (module(x1).square().sum() + module(x2).pow(3).sum()).backward()
    apart(x1).square().sum().backward()
    apart(x2).pow(3).sum().backward()
    for p, q in zip(module.parameters(), apart.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).abs().max() <= 2 * U * 60 * N * L
    module.eval()(x1).sum().backward()  # a training step in between must not spoil what inference saved
    y = module.eval()(x1)
    module.train()(x2)
    y.sum().backward()


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.half)]
)
def test_running_statistics_never_become_half(cast: Any) -> None:
    module = nk.BatchNorm(C)
    for x in _batches(2):
        module(x)
    before = _state(module)
    wrapped = cast(nn.Sequential(module))
    assert module.weight is not None
    kind = module.weight.dtype
    assert kind in (torch.half, torch.bfloat16)
    assert torch.equal(module.get_buffer("running_mean"), before["running_mean"])
    assert torch.equal(module.get_buffer("running_var"), before["running_var"])
    y = wrapped(_random(N, L, C).to(kind))
    assert y.dtype == kind
    assert module.get_buffer("running_var").dtype == torch.float32
    halved = nn.BatchNorm1d(C).to(kind)
    module.load_state_dict(halved.state_dict(), strict=True)
    assert module.get_buffer("running_var").dtype == torch.float32
    halved.load_state_dict(module.state_dict(), strict=True)
    assert nk.BatchNorm(C, dtype=kind).get_buffer("running_mean").dtype == torch.float32
    assert wrapped.double()[0].running_mean.dtype == torch.float64
    assert wrapped.float()[0].running_mean.dtype == torch.float32


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_files(name: str) -> None:
    module = MODULES[name]()
    module(_random(N, L, C))
    _draw(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = MODULES[name]()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = _random(N, L, C, seed=9)
    want = module.eval()(x)
    for other in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.eval()(x), want)
    assert repr(module).startswith(type(module).__name__)


def test_repr_names_what_differs() -> None:
    assert "momentum=None" in repr(nk.BatchNorm(C, momentum=None))
    assert "track_running_stats=False" in repr(nk.BatchNorm(C, track_running_stats=False))
    assert "3, 6" in repr(nk.GroupNorm(3, 6))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_one_graph(name: str, mode: str) -> None:
    eager, module = MODULES[name](), MODULES[name]()
    getattr(module, mode)(), getattr(eager, mode)()
    x = _random(N, L, C)
    torch.compiler.reset()  # graphs of other tests count against the limit of recompilations
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with nk.use("reference"):  # which is what compilers are given
        assert torch.equal(compiled(x), eager(x))
    assert _same_state(module, _state(eager))
