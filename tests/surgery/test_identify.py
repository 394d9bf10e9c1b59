"""`identify` by behaviour: named conventions, strangers, near misses; and nothing of the caller's changes."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conventions import NAMED
from normkit.surgery.findings import name_of
from normkit.surgery.stand_in import StandIn
from rows import FLOATS, always
from surgery import strangers


def ours(name: str, eps: float = 1e-6, dim: int = 48) -> nn.Module:
    spec = NAMED[name]
    if spec.gate != "none":
        return nk.GatedRMSNorm(dim, eps=eps, group_size=16, spec=spec)
    if spec.kind == "layer":
        return nk.LayerNorm(dim, eps=eps, spec=spec)
    return nk.ScaleNorm(dim, eps=eps) if name == "SCALE_NORM" else nk.RMSNorm(dim, eps=eps, spec=spec)


NAMES = [n for n in NAMED if n != "L2_NORM"]


@pytest.mark.parametrize("name", NAMES)
def test_our_own_modules_are_what_they_say(name: str) -> None:
    with nk.use("reference"):
        found = nk.identify(ours(name, eps=1e-6))
    assert isinstance(found, nk.Identified), found
    assert NAMED[name] in (found.spec, *found.evidence.equivalent)
    assert found.eps == 1e-6
    assert found.weight == (None if NAMED[name].weight == "none" else "weight")
    assert found.groups == (3 if NAMED[name].gate != "none" else 1)
    assert len(found.evidence.dtypes) == (3 if found.weight is None and found.bias is None else 7)


@pytest.mark.parametrize("name", always(["TORCH_LAYER_NORM", "LLAMA", "GEMMA"], lambda name: False))
def test_the_fused_kernels_are_seen_through(name: str) -> None:
    found = nk.identify(ours(name, eps=1e-5))
    assert isinstance(found, nk.Identified), found
    assert (found.spec, found.eps) == (NAMED[name], 1e-5)


@pytest.mark.parametrize(
    ("module", "spec", "eps", "axes", "matched"),
    [
        (nn.LayerNorm(48), nk.TORCH_LAYER_NORM, 1e-5, (-1,), "torch.layer_norm"),
        (nn.LayerNorm(48, eps=1e-12, bias=False), nk.TORCH_LAYER_NORM, 1e-12, (-1,), "torch.layer_norm"),
        (nn.LayerNorm(33, eps=3e-7), nk.TORCH_LAYER_NORM, 3e-7, (-1,), "torch.layer_norm"),
        (nn.LayerNorm((4, 12)), nk.TORCH_LAYER_NORM, 1e-5, (-2, -1), "torch.layer_norm"),
        (nn.RMSNorm(48), nk.TORCH_RMS_NORM, nk.TORCH_DEFAULT, (-1,), "the formula"),
        (nn.RMSNorm(48, eps=1e-5), nk.TORCH_RMS_NORM, 1e-5, (-1,), "the formula"),
        (nn.RMSNorm(48, elementwise_affine=False), nk.WEIGHTLESS_RMS, nk.TORCH_DEFAULT, (-1,), "the formula"),
        (nn.GroupNorm(4, 48), nk.TORCH_LAYER_NORM, 1e-5, (1, 2, 3), "torch.group_norm"),
        (nn.InstanceNorm2d(48, affine=True), nk.TORCH_LAYER_NORM, 1e-5, (-2, -1), "torch.instance_norm"),
        (strangers.ChannelsFirst(48), nk.TORCH_LAYER_NORM, 1e-5, (1,), "torch.layer_norm"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_pytorchs_own(module: nn.Module, spec: nk.NormSpec, eps: object, axes: tuple[int, ...], matched: str) -> None:
    found = nk.identify(module)
    assert isinstance(found, nk.Identified), found
    assert (found.spec, found.eps, found.axes) == (spec, eps, axes)
    assert found.evidence.matched == matched
    assert found.groups == (4 if isinstance(module, nn.GroupNorm) else 1)


@pytest.mark.parametrize(
    ("module", "name", "eps"),
    [
        (strangers.Llama(), "LLAMA", 1e-6),
        (strangers.Llama(64, 1e-5, "eps"), "LLAMA", 1e-5),
        (strangers.Llama(65, 0.0), "LLAMA", 0.0),
        (strangers.Llama(9, 1e-12), "LLAMA", 1e-12),
        (strangers.Llama(48, 7.25e-4), "LLAMA", 7.25e-4),
        (strangers.Olmo(), "TORCH_RMS_NORM", 1e-6),
        (strangers.Lying(), "LLAMA", 3e-5),
        (strangers.PerHead(), "TORCH_LAYER_NORM", 1e-5),
    ],
)
def test_strangers(module: nn.Module, name: str, eps: float) -> None:
    found = nk.identify(module)
    assert isinstance(found, nk.Identified), found
    assert (name_of(found.spec), found.eps) == (name, eps)


def test_an_epsilon_that_lies_is_noted() -> None:
    found = nk.identify(strangers.Lying())
    assert isinstance(found, nk.Identified)
    assert "variance_epsilon=1e-06 is not what is added: 3e-05" in str(found.evidence)
    honest = nk.identify(strangers.Llama())
    assert isinstance(honest, nk.Identified)
    assert honest.evidence.notes == ()
    assert honest.evidence.eps_from == "attribute variance_epsilon, seen in the output"


def test_an_epsilon_that_no_probe_shows_is_not_guessed() -> None:
    """max(‖x‖, 1e-20) and max(‖x‖, 0) have the same bits on every row that is not itself about to vanish."""
    found = nk.identify(nk.ScaleNorm(48, eps=1e-20))
    assert isinstance(found, nk.Unidentified), found
    assert found.statistic
    assert re.search("eps=1e-20 leaves no trace|no formula known here", found.reason)


def test_an_epsilon_outside_of_the_root() -> None:
    for eps in (1e-4, 1e-12):
        found = nk.identify(strangers.RootOfMean(eps=eps))
        assert isinstance(found, nk.Identified), found
        assert (found.spec.eps, found.eps) == ("outside", eps)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (strangers.OnePass(), "outside the error bound"),
        (strangers.RoundedSquares(), "its float16 bits are those of no convention"),
        (strangers.TwicePlusOne(), "no formula known here"),
        (strangers.Clamped(), "differs with its place"),
        (strangers.Block(), "contains modules"),
        (nn.Linear(8, 8), "Linear: a matrix product"),
        (nn.Dropout(), "Dropout: dropout"),
        (nn.Sequential(nn.Dropout(), nn.ReLU()), "contains modules|two runs on one input differ"),
        (nn.ReLU(), "pointwise"),
        (nn.Tanh(), "pointwise"),
        (nn.Identity(), "affine in x"),
        (nn.Softmax(-1), "scaling x changes y"),
        (nk.DyT(48), "pointwise"),
        (nn.BatchNorm1d(48), "batch"),
        (nn.BatchNorm1d(48).eval(), "affine in x, element by element"),
        (nn.Embedding(10, 8), "a table of vectors"),
        (nn.Conv1d(8, 8, 3, padding=1), "a convolution"),
        (nn.Flatten(0), "it returns shape"),
        (nn.Bilinear(4, 4, 4), "a matrix product"),
        (nn.LocalResponseNorm(3), "no whole groups"),
        (nn.MultiheadAttention(8, 2), "contains modules"),
        (nn.GRUCell(8, 8), "takes no tensor|fails|scaling x|mixes|weight"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_what_is_no_norm_known_here_gets_its_reason(module: nn.Module, reason: str) -> None:
    found = nk.identify(module)
    assert isinstance(found, nk.Unidentified), found
    assert re.search(reason, found.reason), found.reason
    assert not found


def test_gates_come_from_the_signature_or_the_example() -> None:
    class Required(strangers.Gated):
        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return super().forward(x, z)

    example = (torch.zeros(5, 48), torch.zeros(5, 48))
    for found in (nk.identify(strangers.Gated()), nk.identify(Required()), nk.identify(Required(), *example)):
        assert isinstance(found, nk.Identified), found
        assert name_of(found.spec) == "MAMBA2"


def test_an_example_without_a_gate_asks_for_the_ungated_norm() -> None:
    found = nk.identify(strangers.Gated(), torch.zeros(5, 48))
    assert isinstance(found, nk.Identified), found
    assert name_of(found.spec) == "LLAMA"


def test_an_example_says_the_shape() -> None:
    found = nk.identify(strangers.PerHead(), torch.zeros(2, 7, 3, 16))
    assert isinstance(found, nk.Identified), found
    assert found.evidence.shape == (2, 7, 3, 16)
    wrong = nk.identify(strangers.PerHead(), torch.zeros(2, 7, 5, 16))
    assert isinstance(wrong, nk.Unidentified)
    assert wrong.reason.startswith("fails on the example")


def test_meta_parameters_are_probed_by_stand_ins() -> None:
    with torch.device("meta"):
        module = strangers.Llama()
    found = nk.identify(module)
    assert isinstance(found, nk.Identified), found
    assert name_of(found.spec) == "LLAMA"
    assert any("meta" in note for note in found.evidence.notes)
    assert module.weight.is_meta


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_modules_own_dtype_does_not_matter(dtype: torch.dtype) -> None:
    found = nk.identify(strangers.Llama().to(dtype))
    assert isinstance(found, nk.Identified), found
    assert name_of(found.spec) == "LLAMA"


def test_nothing_of_the_callers_changes() -> None:
    module = strangers.Busy().train()
    fired: list[str] = []
    module.register_forward_hook(lambda *_: fired.append("forward"))
    module.register_forward_pre_hook(lambda *_: fired.append("pre"))
    module.weight.grad = torch.ones_like(module.weight)
    before = copy.deepcopy({k: v for k, v in vars(module).items() if "hooks" not in k})
    state, rng = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    weight = module.weight
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: fired.append("global"))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the caller's mode is none of the probes' business
        assert isinstance(nk.identify(module), nk.Identified)
        assert torch.is_autocast_enabled("cpu")
    everywhere.remove()
    assert torch.is_grad_enabled()
    assert fired == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert module.weight is weight
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert (module.calls, module.seen, module.training) == (0, [], True)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert set(vars(module)) == set(before) | {k for k in vars(module) if "hooks" in k}


def test_a_forward_set_on_the_instance_is_followed_or_refused() -> None:
    module = strangers.Llama()
    module.forward = functools.partial(strangers.Olmo.forward, module)
    found = nk.identify(module)
    assert isinstance(found, nk.Identified), found
    assert name_of(found.spec) == "TORCH_RMS_NORM"
    module.forward = lambda x: strangers.Llama.forward(module, x)
    refused = nk.identify(module)
    assert isinstance(refused, nk.Unidentified)
    assert "replaced on the instance" in refused.reason


def test_a_module_that_fails_on_some_values_is_no_crash() -> None:
    class Touchy(strangers.Llama):
        def forward(self, hidden: Tensor) -> Tensor:
            if float(hidden.abs().max()) > 5:
                raise ValueError("too large for me")
            return super().forward(hidden)

    found = nk.identify(Touchy())
    assert isinstance(found, nk.Unidentified)
    assert found.reason == "takes x, but fails on some values of it: ValueError: too large for me"
    assert len(nk.swap_(nn.ModuleList([Touchy(), nn.LayerNorm(8)])).accepted) == 1


def test_a_double_runs_apart() -> None:
    module = strangers.Llama(8)
    double = StandIn(module)
    x = torch.randn(2, 8)
    y = double(x, values={"weight": torch.zeros(8)})
    assert not y.any()
    assert bool(module(x).any())


def test_only_modules_are_taken() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got builtin"):
        nk.identify(torch.relu)  # type: ignore[arg-type]


def test_sharded_quantised_and_compiled_modules_are_named() -> None:
    class Sharded(torch.Tensor):
        pass

    module = strangers.Llama()
    del module.weight
    module.register_buffer("weight", torch.ones(48).as_subclass(Sharded))
    assert "is a Sharded" in str(nk.identify(module))
    module = strangers.Llama()
    module.weight = nn.Parameter(torch.ones(48, dtype=torch.int8), requires_grad=False)
    assert "torch.int8: quantised" in str(nk.identify(module))
    assert "compiled by torch.compile" in str(nk.identify(torch.compile(strangers.Llama(), backend="eager")))
