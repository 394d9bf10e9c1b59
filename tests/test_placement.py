"""Every wiring by the identity that defines it, and apart from every other."""

import copy
import importlib
import pickle
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.placement import Constants
from rows import always

D, DEPTH, EPS = 6, 12, 1e-6
ALPHA = 24**0.25


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[-1], dtype=x.dtype).expand_as(x)


class Linear(nn.Module):
    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.map = torch.randn(D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.map + self.shift


SUBLAYERS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "zero": Zero,
    "constant": Constant,
    "linear": Linear,
}
NORM = partial(nk.RMSNorm, eps=EPS, dtype=torch.float64)


def n(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _stream() -> Tensor:
    return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 2 + 1


def _block(name: str, *sublayers: nn.Module) -> nk.Residual:
    """Make the wiring with a different random weight in each of its norms."""
    block = nk.placement(name)(D, *sublayers, norm=NORM, depth=DEPTH)
    for seed, p in enumerate(block.parameters()):
        with torch.no_grad():
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return block


def _weight(norm: nn.Module | None) -> Tensor:
    assert isinstance(norm, nk.RMSNorm)
    assert norm.weight is not None
    return norm.weight.detach()


def _expected(name: str, block: nk.Residual, f: nn.Module, x: Tensor) -> Tensor:
    """Write each wiring out by hand."""
    if name == "pre":
        return x + f(n(x, _weight(block.norm_in)))
    if name == "post":
        return n(x + f(x), _weight(block.norm_out))
    if name == "deepnorm":
        return n(ALPHA * x + f(x), _weight(block.norm_out))
    if name == "sandwich":
        return x + n(f(n(x, _weight(block.norm_in))), _weight(block.norm_branch))
    if name == "reordered":
        return x + n(f(x), _weight(block.norm_branch))
    assert name == "parallel"
    read = n(x, _weight(block.norm_in))
    return x + f(read) + 2 * f(read)


class Twice(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.f(x)


def _sublayers(name: str, f: nn.Module) -> tuple[nn.Module, ...]:
    return (f, Twice(f)) if nk.WIRINGS[name].parallel else (f,)


@pytest.mark.parametrize("sublayer", SUBLAYERS)
@pytest.mark.parametrize("name", nk.WIRINGS)
def test_defining_identity(name: str, sublayer: str) -> None:
    f, x = SUBLAYERS[sublayer](), _stream()
    block = _block(name, *_sublayers(name, f))
    assert (block(x) - _expected(name, block, f, x)).abs().max() < 1e-12


@pytest.mark.parametrize(("one", "other"), list(combinations(nk.WIRINGS, 2)))
def test_no_wiring_is_its_neighbour(one: str, other: str) -> None:
    f, x = Linear(shift=2.0), _stream()  # a linear map commutes with the scale: N(F(N(x))) = N(F(x))
    blocks = [nk.placement(name)(D, *_sublayers(name, f), norm=NORM, depth=DEPTH) for name in (one, other)]
    assert (blocks[0](x) - blocks[1](x)).abs().max() > 0.1


def test_residual_before_and_after_the_norm_on_three_four() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norm = partial(nk.RMSNorm, eps=0.0, dtype=torch.float64)
    rms = 12.5**0.5
    pre, post = (nk.placement(name)(2, nn.Identity(), norm=norm) for name in ("pre", "post"))
    assert (pre(x) - (x + x / rms)).abs().max() < 1e-15
    assert (post(x) - x / rms).abs().max() < 1e-15  # n(2x) = n(x)
    # Wrong ways to write them: the residual taken after the norm, or added outside a post-norm.
    assert (pre(x) - 2 * x / rms).abs().max() > 1
    assert (post(x) - (x + x / rms)).abs().max() > 1


def test_a_silent_sublayer_leaves_the_stream_or_normalises_it() -> None:
    x = _stream()
    for name, row in nk.WIRINGS.items():
        y = nk.placement(name)(D, Zero(), norm=NORM, depth=DEPTH)(x)
        assert torch.equal(y, x) != row.after
        # A stack ends unnormalised exactly where nothing normalises the sum.
        assert row.final_norm != row.after


FORMULAS = {
    "pre": "x ← x + F(N(x))",
    "post": "x ← N(x + F(x))",
    "deepnorm": "x ← N(α·x + F(x))",
    "sandwich": "x ← x + N(F(N(x)))",
    "reordered": "x ← x + N(F(x))",
    "parallel": "x ← x + F₁(N(x)) + F₂(N(x))",
}


def test_formulas_and_names() -> None:
    assert {name: row.formula for name, row in nk.WIRINGS.items()} == FORMULAS
    for name, row in nk.WIRINGS.items():
        cls = nk.placement(name)
        assert cls is getattr(nk, row.class_name)
        assert cls.wiring is row
        assert (cls.__name__, cls.__module__) == (row.class_name, "normkit.placement")
        assert row.formula in (cls.__doc__ or "")
        assert row.formula in repr(cls(D, nn.Identity(), depth=DEPTH))
        assert row.source
        assert row.used_by


@pytest.mark.parametrize(
    ("architecture", "depth", "other", "alpha", "beta"),
    [
        ("encoder-only", 12, None, 2.2134, 0.3195),
        ("decoder-only", 12, None, 2.2134, 0.3195),
        ("encoder-only", 100, None, 3.7606, 0.1880),
        ("encoder-decoder/decoder", 12, None, 36**0.25, 144**-0.25),
        ("encoder-decoder/encoder", 6, 6, 0.81 * 7776 ** (1 / 16), 0.87 * 7776 ** (-1 / 16)),
        ("encoder-decoder/encoder", 18, 6, 0.81 * 629856 ** (1 / 16), 0.87 * 629856 ** (-1 / 16)),
    ],
)
def test_deepnorm_constants(architecture: Any, depth: int, other: int | None, alpha: float, beta: float) -> None:
    constants = nk.deepnorm_constants(depth, architecture, other_depth=other)
    assert constants.alpha == pytest.approx(alpha, abs=5e-5)
    assert constants.beta == pytest.approx(beta, abs=5e-5)
    block = nk.DeepNorm(D, nn.Identity(), depth=depth, architecture=architecture, other_depth=other)
    assert block.constants == constants


def test_deepnorm_bounds_the_update_of_the_stack() -> None:
    for depth in (1, 7, 12, 100, 1000):
        for architecture, sublayers in (("encoder-only", 2), ("decoder-only", 2), ("encoder-decoder/decoder", 3)):
            c = nk.deepnorm_constants(depth, architecture)  # type: ignore[arg-type]
            assert sublayers * depth * 2 * c.beta**2 / c.alpha**2 == pytest.approx(1, rel=1e-12)
    a, b = (
        nk.deepnorm_constants(8, "encoder-decoder/encoder"),
        nk.deepnorm_constants(8, "encoder-decoder/encoder", other_depth=8),
    )
    assert a == b
    assert nk.WIRINGS["deepnorm"].init.scaled == {"value", "output", "up", "down"}
    assert not nk.WIRINGS["pre"].init.scaled


def test_alpha_is_not_rounded_on_its_way_into_the_sum() -> None:
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    branch = torch.randn(400, 8, generator=torch.Generator().manual_seed(2)).bfloat16()

    class Given(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return branch

    block = nk.DeepNorm(8, Given(), norm=lambda width: nn.Identity(), depth=DEPTH)
    assert torch.equal(block(x), (ALPHA * x.double() + branch.double()).float().bfloat16())


def test_norm_factories() -> None:
    x = torch.randn(2, D)
    gemma = nk.PreNorm(D, nn.Identity(), norm=partial(nk.RMSNorm, spec=nk.GEMMA))
    assert isinstance(gemma.norm_in, nk.RMSNorm)
    assert gemma.norm_in.spec == nk.GEMMA
    assert torch.equal(gemma(x), x + nk.rms_norm(x))
    assert torch.equal(nk.PostNorm(D, nn.Identity(), norm=nk.LayerNorm)(x), nk.layer_norm(x + x))
    torchs = nk.SandwichNorm(D, nn.Identity(), norm=nn.LayerNorm)
    assert [type(torchs.norm_in), type(torchs.norm_branch), torchs.norm_out] == [nn.LayerNorm, nn.LayerNorm, None]
    assert torchs.norm_in is not torchs.norm_branch  # two norms, not one used twice


def test_arguments_reach_every_sublayer() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float, *, plus: float = 0.0) -> Tensor:
            return x * by + plus

    x = _stream()
    block = nk.ParallelNorm(D, Scaled(), Scaled(), norm=NORM)
    assert (block(x, 3.0, plus=1.0) - (x + 2 * (3 * n(x) + 1))).abs().max() < 1e-12


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize("name", nk.WIRINGS)
def test_what_is_refused(name: str) -> None:
    cls, words = nk.placement(name), nk.WIRINGS[name].class_name
    make = partial(cls, D, depth=DEPTH)
    with pytest.raises(ValueError, match=rf"{words}: expected .* one sublayer.* got 0"):
        make()
    if not nk.WIRINGS[name].parallel:
        with pytest.raises(ValueError, match=rf"{words}: expected exactly one sublayer after dim, got 2"):
            make(nn.Identity(), nn.Identity())
    for shape in [(2, D + 1), (2, 1), ()]:
        with pytest.raises(ValueError, match=rf"{words}: built for width {D}"):
            make(nn.Identity())(torch.ones(shape))
    for sublayer in (nn.LazyLinear(1), nn.LazyLinear(D + 1), nn.Flatten(0), Pair()):
        with pytest.raises(ValueError, match=f"{words}: a sublayer must return one tensor of x's shape"):
            make(sublayer)(torch.ones(2, D))
    for width, error in ((0, ValueError), (6.0, TypeError)):
        with pytest.raises(error, match="dim must be"):
            cls(width, nn.Identity(), depth=DEPTH)  # type: ignore[arg-type]


def test_depth_is_needed_where_constants_depend_on_it() -> None:
    with pytest.raises(ValueError, match=r"depth .*is needed"):
        nk.DeepNorm(D, nn.Identity())
    for depth in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {depth}"):
            nk.DeepNorm(D, nn.Identity(), depth=depth)
    with pytest.raises(ValueError, match="unknown architecture 'decoder'"):
        nk.DeepNorm(D, nn.Identity(), depth=2, architecture="decoder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown wiring 'prenorm'; one of deepnorm, parallel, post, pre"):
        nk.placement("prenorm")


@pytest.mark.parametrize("name", nk.WIRINGS)
def test_copies_and_files(name: str) -> None:
    block, x = _block(name, Linear()), _stream()
    for other in (pickle.loads(pickle.dumps(block)), copy.deepcopy(block)):
        assert type(other) is type(block)
        assert torch.equal(other(x), block(x))
    fresh = nk.placement(name)(D, Linear(), norm=NORM, depth=DEPTH)
    fresh.load_state_dict(block.state_dict(), strict=True)
    assert torch.equal(fresh(x), block(x))
    assert pickle.loads(pickle.dumps(nk.WIRINGS[name])) == nk.WIRINGS[name]


def _wirings() -> ModuleType:
    return importlib.import_module("normkit.placement")  # nk.placement is the function


def test_adding_a_wiring_is_adding_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(
        nk.WIRINGS["deepnorm"],
        name="keel",
        class_name="KeelNorm",
        before=True,
        constants=lambda depth, architecture, *, other_depth=None: Constants(alpha=2.0 * depth),
    )
    monkeypatch.setitem(nk.WIRINGS, "keel", row)
    block, x = nk.placement("keel")(D, Linear(), norm=NORM, depth=3), _stream()
    assert row.formula == "x ← N(α·x + F(N(x)))"
    assert (block(x) - n(6 * x + Linear()(n(x)))).abs().max() < 1e-12
    assert _wirings().KeelNorm is type(block) is nk.placement("keel")
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), block(x))
    with pytest.raises(ValueError, match="KeelNorm: depth"):
        nk.placement("keel")(D, Linear())
    with pytest.raises(AttributeError, match="NoSuchNorm"):
        _wirings().NoSuchNorm


@pytest.mark.parametrize("name", always(nk.WIRINGS, ("pre", "keel").__contains__))
def test_gradients_and_one_graph(name: str) -> None:
    block, x = _block(name, Linear()), _stream()[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(block, x)
    torch.compiler.reset()  # graphs of other tests count against the limit of recompilations
    assert torch.equal(torch.compile(block, fullgraph=True, backend="eager")(x), block(x))
