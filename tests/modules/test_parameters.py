"""What all modules share: parameters made, reset, moved, saved, and refused."""

import copy
import io
import pickle
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.modules.parameters import check_last, check_width
from rows import always

D = 8
Make = Callable[..., nn.Module]
MODULES: dict[str, Make] = {
    "layer": lambda **o: nk.LayerNorm(D, **o),
    "layer, no bias": lambda **o: nk.LayerNorm(D, bias=False, **o),
    "nemotron": lambda **o: nk.LayerNorm(D, spec=nk.NEMOTRON, **o),
    "rms": lambda **o: nk.RMSNorm(D, **o),
    "rms, bias": lambda **o: nk.RMSNorm(D, bias=True, **o),
    "gemma": lambda **o: nk.RMSNorm(D, spec=nk.GEMMA, **o),
    "muse": lambda **o: nk.RMSNorm(D, spec=nk.MUSE_SPARK, **o),
    "weightless": lambda **o: nk.RMSNorm(D, spec=nk.WEIGHTLESS_RMS, **o),
    "scale": lambda **o: nk.ScaleNorm(D, **o),
    "gated": lambda **o: nk.GatedRMSNorm(D, **o),
    "dyt": lambda **o: nk.DyT(D, alpha=0.3, **o),
    "derf": lambda **o: nk.Derf(D, alpha=0.3, **o),
    "batch": lambda **o: nk.BatchNorm(D, **o),
    "instance": lambda **o: nk.InstanceNorm(D, **o),
    "group": lambda **o: nk.GroupNorm(2, D, **o),
    "qk": lambda **o: nk.QKNorm(D, 2, **o).q_norm,
    "qk, gemma, full": lambda **o: nk.QKNorm(D, 2, coverage="full", spec=nk.GEMMA, **o).q_norm,
}
RESTING: dict[str, dict[str, float]] = {
    "layer": {"weight": 1, "bias": 0},
    "layer, no bias": {"weight": 1},
    "nemotron": {"weight": 0, "bias": 0},
    "rms": {"weight": 1},
    "rms, bias": {"weight": 1, "bias": 0},
    "gemma": {"weight": 0},
    "muse": {"weight": 0},
    "weightless": {},
    "scale": {"weight": D**0.5},
    "gated": {"weight": 1},
    "dyt": {"weight": 1, "bias": 0, "alpha": 0.3},
    "derf": {"weight": 1, "bias": 0, "alpha": 0.3, "shift": 0},
    "batch": {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, "num_batches_tracked": 0},
    "instance": {"weight": 1, "bias": 0},
    "group": {"weight": 1, "bias": 0},
    "qk": {"weight": 1},
    "qk, gemma, full": {"weight": 0},
}


@pytest.fixture(autouse=True, params=["reference", pytest.param("auto", marks=pytest.mark.slow)])
def _backend(request: pytest.FixtureRequest) -> Generator[None]:
    """These are tests of modules: every one of these specs and dtypes has kernels of its own, minutes to compile."""
    with nk.use(request.param):
        yield


def _is_resting(name: str, module: nn.Module) -> bool:
    state = module.state_dict()
    assert set(state) == set(RESTING[name])
    return all(torch.equal(state[k], torch.full_like(state[k], v)) for k, v in RESTING[name].items())


def _input(module: nn.Module) -> Tensor:
    heads = (2,) if hasattr(module, "heads") else ()
    return torch.randn(2, 3, *heads, D, generator=torch.Generator().manual_seed(0))


def _disturb(module: nn.Module) -> None:
    for value in module.state_dict().values():
        value.fill_(7)


@pytest.mark.parametrize("name", MODULES)
def test_resting_values(name: str) -> None:
    assert _is_resting(name, MODULES[name]())


@pytest.mark.parametrize("name", MODULES)
def test_from_the_meta_device(name: str) -> None:
    module = MODULES[name](device="meta")
    assert all(t.is_meta for t in module.state_dict().values())
    with torch.device("meta"):
        assert all(t.is_meta for t in MODULES[name]().state_dict().values())
    module = module.to_empty(device="cpu")
    _disturb(module)
    module.reset_parameters()  # type: ignore[operator]
    assert _is_resting(name, module)
    assert torch.equal(module(_input(module)), MODULES[name]()(_input(module)))


@pytest.mark.parametrize("name", MODULES)
def test_reset_undoes_training(name: str) -> None:
    module = MODULES[name]()
    _disturb(module)
    module.reset_parameters()  # type: ignore[operator]
    assert _is_resting(name, module)


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_files(name: str) -> None:
    module = MODULES[name]()
    for seed, p in enumerate(module.parameters()):
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    x = _input(module)
    module(x)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = MODULES[name]()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    want = module.eval()(x)
    for other in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.eval()(x), want)
    twin = copy.deepcopy(module)
    _disturb(twin)
    assert torch.equal(module(x), want)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_dtypes(name: str, kind: torch.dtype) -> None:
    made, moved = MODULES[name](dtype=kind), MODULES[name]().to(kind)
    assert {k: v.dtype for k, v in made.state_dict().items()} == {k: v.dtype for k, v in moved.state_dict().items()}
    assert all(p.dtype == kind for p in moved.parameters())
    made.load_state_dict(moved.state_dict())  # √dim and α, made in float32, keep its digits
    x = _input(moved).to(kind)
    y = moved(x)
    assert y.dtype == kind
    assert torch.equal(y, made(x))
    assert y.isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_float32_parameters_take_half_inputs(name: str) -> None:
    module = MODULES[name]()
    x = _input(module).bfloat16().requires_grad_()
    y = module(x)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_frozen_parameters_get_no_gradient(name: str) -> None:
    module = MODULES[name]().requires_grad_(False)
    x = _input(module).requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", [n for n in MODULES if RESTING[n]])
def test_two_forwards_before_one_backward(name: str) -> None:
    module, apart = MODULES[name](), MODULES[name]()
    x = _input(module)
    (module(x).square().sum() + module(2 * x).square().sum()).backward()
    apart(x).square().sum().backward()
    apart(2 * x).square().sum().backward()
    for p, q in zip(module.parameters(), apart.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)  # the same two terms, added in either order


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("batch", "instance", "group")])
def test_wrong_width_and_dtype(name: str) -> None:
    module = MODULES[name]()
    for shape in [(2, D + 1), (2, 2, D + 1), (2, 2, 1), ()]:
        with pytest.raises(ValueError, match=r"built for width 8|expected \(…, heads 2, head_dim 8\)"):
            module(torch.ones(shape))
    for kind in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=str(kind).removeprefix("torch.")):
            module(_input(module).to(kind))


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("dyt", "derf")])
@pytest.mark.parametrize(
    ("eps", "error"), [(None, ValueError), (-1e-6, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_eps_is_checked_when_made(name: str, eps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="eps"):
        MODULES[name](eps=eps)


@pytest.mark.parametrize("make", [nk.LayerNorm, nk.RMSNorm, nk.ScaleNorm, nk.GatedRMSNorm, nk.DyT, nk.Derf])
def test_widths(make: Callable[[Any], nn.Module]) -> None:
    for width in (0, -3):
        with pytest.raises(ValueError, match="at least 1"):
            make(width)
    for width in (2.0, True, (8,), None):
        with pytest.raises(TypeError, match="must be an int"):
            make(width)


def test_helpers_name_owner_and_remedy() -> None:
    with pytest.raises(ValueError, match="Mine: groups must be at least 1, got 0"):
        check_width(0, "Mine", "groups")
    with pytest.raises(ValueError, match=r"Mine: built for width 3, got x of shape .*use the function"):
        check_last(torch.ones(2, 4), 3, "Mine")


@pytest.mark.parametrize("name", always(MODULES, ("layer", "gated", "qk", "batch").__contains__))
def test_one_graph_at_inference(name: str) -> None:
    module = MODULES[name]().eval()
    x, extra = _input(module), ()
    if name == "gated":
        extra = (_input(module) + 1,)
    torch.compiler.reset()  # graphs of other tests count against the limit of recompilations
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    got = compiled(x, *extra)
    with nk.use("reference"):  # compiled code is made of plain operators, and so are these
        assert torch.equal(got, module(x, *extra))
