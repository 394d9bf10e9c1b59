"""`swap_`: what must go on working when the forward of an instance changes, and the rule of accuracy."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.surgery import proof, swap
from normkit.surgery.fused import Fused
from normkit.surgery.report import SwapReport
from rows import randn
from surgery import strangers

WIDTH = 48


class Model(nn.Module):
    """Two blocks and a tied pair of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = strangers.Block()
        self.ln_f = nn.LayerNorm(WIDTH)
        self.tied = strangers.Llama()
        self.tied.weight = self.first.norm.weight
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(self.ln_f(self.first(x))))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    for p in made.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return made


@pytest.fixture
def x() -> Tensor:
    return randn(4, 7, WIDTH, seed=9)


def fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Fused)


def test_what_is_swapped_and_what_is_not(model: Model, x: Tensor) -> None:
    before = model(x)
    report = nk.swap_(model)
    assert [(e.name, e.spec, e.kernel) for e in report.accepted] == [
        ("first.norm", "LLAMA", "cpu"),
        ("ln_f", "TORCH_LAYER_NORM", "cpu"),
        ("tied", "LLAMA", "cpu"),
    ]
    assert report.rejected == []
    assert report.passed_over == 4  # the model, its block, two linears
    assert all(map(fused, (model.first.norm, model.ln_f, model.tied)))
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    report.undo()
    assert torch.equal(model(x), before)
    assert not any("forward" in vars(m) or "extra_repr" in vars(m) for m in model.modules())
    report.undo()  # a second time does nothing


def test_class_names_state_and_hooks_stay(model: Model, x: Tensor) -> None:
    kinds = {n: type(m) for n, m in model.named_modules()}
    keys, parameters = list(model.state_dict()), {n: id(p) for n, p in model.named_parameters()}
    fired: list[str] = []
    model.ln_f.register_forward_hook(lambda *_: fired.append("after"))
    model.ln_f.register_forward_pre_hook(lambda *_: fired.append("before"))
    model.ln_f.register_full_backward_hook(lambda *_: fired.append("back"))
    nk.swap_(model)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert isinstance(model.ln_f, nn.LayerNorm)
    assert list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert model.tied.variance_epsilon == 1e-6
    model(x).sum().backward()
    assert fired == ["before", "after", "back"]


def test_other_models_of_the_class_are_untouched(model: Model) -> None:
    other, kinds = Model(), (nn.LayerNorm, strangers.Llama)
    forwards = [vars(kind)["forward"] for kind in kinds]
    nk.swap_(model)
    assert not any(map(fused, other.modules()))
    assert not any(map(fused, Model().modules()))
    assert [vars(kind)["forward"] for kind in kinds] == forwards


def test_tied_and_loaded_weights_are_what_counts(model: Model, x: Tensor) -> None:
    nk.swap_(model)
    with torch.no_grad():
        model.tied.weight.fill_(2.0)
    assert torch.equal(model.first.norm(x), 2 * nk.rms_norm(x, spec=nk.WEIGHTLESS_RMS))
    fresh = Model()
    for assign in (False, True):
        model.load_state_dict(fresh.state_dict(), assign=assign)
        assert torch.equal(model.tied(x), nk.rms_norm(x, fresh.tied.weight.detach(), spec=nk.LLAMA))
    model.tied.weight = nn.Parameter(torch.zeros(WIDTH))
    assert not model.tied(x).any()


def test_copies_and_pickles_are_bound_to_themselves(model: Model, x: Tensor) -> None:
    nk.swap_(model)
    before = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(copied(x), before)
        assert vars(copied.ln_f)["forward"].module is copied.ln_f
        assert copied.tied.weight is copied.first.norm.weight
        with torch.no_grad():
            copied.ln_f.weight.zero_()
            copied.ln_f.bias.zero_()
        assert not copied.ln_f(x).any()
        assert torch.equal(model(x), before)
        assert nk.unswap_(copied) == 3
        assert not any(map(fused, copied.modules()))
    alone = copy.deepcopy(model.ln_f)
    assert vars(alone)["forward"].module is alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_modules_own_rule_holds_after_to(model: Model, x: Tensor, dtype: torch.dtype) -> None:
    reference = copy.deepcopy(model).to(dtype)
    nk.swap_(model)
    model.to(dtype)
    for name in ("first.norm", "ln_f", "tied"):
        ours, own = model.get_submodule(name)(x.to(dtype)), reference.get_submodule(name)(x.to(dtype))
        assert ours.dtype == own.dtype
        assert float((ours == own).double().mean()) >= 0.995
    mixed, own = model.tied.float()(x.bfloat16()), reference.tied.float()(x.bfloat16())
    assert mixed.dtype == own.dtype == torch.float32  # Llama's rule: a float32 weight promotes


def test_gradients_checkpointing_and_modes(model: Model, x: Tensor) -> None:
    def gradients(run: nn.Module) -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = checkpoint(run, given, use_reentrant=False)
        y.square().sum().backward()
        found = [given.grad, *(p.grad for p in run.parameters())]
        run.zero_grad()
        return [g.clone() for g in found]

    expected = gradients(model)
    nk.swap_(model)
    for mode in (True, False):
        model.train(mode)
        assert model.ln_f.training is mode
        for ours, own in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


def test_compiles_without_a_break(model: Model, x: Tensor) -> None:
    nk.swap_(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="already compiled; swap the model first"):
        nk.swap_(compiled)


def test_what_was_not_verified_runs_the_modules_own_forward(x: Tensor) -> None:
    norm = strangers.Llama()
    own = copy.deepcopy(norm)
    nk.swap_(norm)
    assert norm(hidden=x).shape == x.shape
    assert torch.equal(norm(hidden=x), norm(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        norm(x, mask=None)
    with pytest.raises(TypeError, match="positional argument"):
        norm(x, x)
    with pytest.raises(RuntimeError, match="must match the size"):
        norm(randn(3, 5))
    norm.variance_epsilon = own.variance_epsilon = 0.5  # changed afterwards: the plan no longer knows it
    assert torch.equal(norm(x), own(x))


def test_an_autocast_that_changes_the_module_is_left_to_it(x: Tensor) -> None:
    class Cast(strangers.Weighted):
        def forward(self, hidden: Tensor) -> Tensor:
            f = hidden.float()
            total = (f[..., None, :] @ f[..., :, None]).squeeze(-1)  # a product that autocast takes to bfloat16
            return self.weight * (f * torch.rsqrt(total / f.shape[-1] + self.epsilon)).to(hidden.dtype)

    norm, own = Cast(), Cast()
    assert len(nk.swap_(norm).accepted) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x), own(x))
    plain = strangers.Llama()
    nk.swap_(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vars(plain)["forward"].plan.autocast
        assert torch.equal(plain(x), nk.rms_norm(x, plain.weight, spec=nk.LLAMA))


def test_filter_and_dry_run(model: Model) -> None:
    seen: list[str] = []

    def only_final(name: str, module: nn.Module) -> bool:
        seen.append(name)
        return name == "ln_f"

    report = nk.swap_(model, only_final, dry_run=True)
    assert [e.name for e in report.accepted] == ["ln_f"]
    assert str(report).startswith("would swap 1")
    assert "tied" in seen
    assert not any(map(fused, model.modules()))
    report.undo()


def test_as_a_context_manager(model: Model, x: Tensor) -> None:
    before = model(x)
    with nk.swap_(model) as report:
        assert isinstance(report, SwapReport)
        assert fused(model.ln_f)
    assert not fused(model.ln_f)

    def failing() -> None:
        with nk.swap_(model):
            assert fused(model.ln_f)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not fused(model.ln_f)
    assert torch.equal(model(x), before)


def test_a_failure_half_way_changes_nothing(model: Model, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    before, shown = model(x), repr(model)
    made: list[nn.Module] = []

    class Failing(Fused):
        def __init__(self, module: nn.Module, plan: object) -> None:
            made.append(module)
            if len(made) == 3:
                raise MemoryError
            super().__init__(module, plan)  # type: ignore[arg-type]

    monkeypatch.setattr("normkit.surgery.report.Fused", Failing)
    with pytest.raises(MemoryError):
        nk.swap_(model)
    assert len(made) == 3
    assert torch.equal(model(x), before)
    assert repr(model) == shown
    assert not any("forward" in vars(m) for m in model.modules())


def test_print_shows_it(model: Model) -> None:
    plain = repr(model)
    report = nk.swap_(model)
    assert "(ln_f): LayerNorm((48,), eps=1e-05, elementwise_affine=True, bias=True, normkit: TORCH_LAYER_NORM" in repr(
        model
    )
    assert "(tied): Llama(normkit: LLAMA, ε=1e-06)" in repr(model)
    report.undo()
    assert repr(model) == plain


def test_others_who_set_a_forward(model: Model, x: Tensor) -> None:
    model.ln_f.forward = functools.partial(nn.LayerNorm.forward, model.ln_f)
    report = nk.swap_(model)
    assert [(r.name, r.reason.split(" (")[0]) for r in report.rejected] == [
        ("ln_f", "its forward was replaced on the instance")
    ]
    again = nk.swap_(model)
    assert {r.reason for r in again.rejected if r.name != "ln_f"} == {"already swapped"}
    ours = vars(model.tied)["forward"]
    model.tied.forward = functools.partial(ours)  # as accelerate wraps what it finds
    with pytest.raises(RuntimeError, match="the forward of tied was replaced after the swap"):
        report.undo()
    assert not fused(model.first.norm)
    model.tied.forward = ours
    report.undo()
    assert not fused(model.tied)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nk.RMSNorm(8), "one of normkit's own modules"),
        (nn.BatchNorm1d(8), "the batch"),
        (strangers.OnePass(), "outside the error bound"),
        (nn.LayerNorm(8, device="meta"), "on the meta device"),
        (strangers.RootOfMean(), "no fused kernel: ε is not inside the root"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_what_is_left_alone_gets_its_reason(module: nn.Module, reason: str) -> None:
    report = nk.swap_(nn.Sequential(module))
    assert report.accepted == []
    assert [r.name for r in report.rejected] == ["0"]
    assert reason in report.rejected[0].reason


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got Tensor"):
        nk.swap_(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="filter must be a callable"):
        nk.swap_(nn.LayerNorm(8), "ln_f")  # type: ignore[arg-type]


def test_a_less_accurate_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule looks at the fused result itself: spoil it in three ways and see each one named."""
    real = proof.normalized

    def spoiled(change: object) -> str:
        monkeypatch.setattr(proof, "normalized", lambda *a: change(real(*a)))  # type: ignore[operator]
        (entry,) = nk.swap_(nn.ModuleList([strangers.Llama()])).rejected
        return entry.reason

    assert "leaves the interval" in spoiled(lambda y: y * (1 + 3e-5))
    assert "less accurate" in spoiled(lambda y: y * (1 + 2.0**-23) if y.dtype == torch.float32 else y)
    assert "it returns float32, the fused operator float64" in spoiled(lambda y: y.double())

    def every_hundredth(y: Tensor) -> Tensor:
        if y.dtype == torch.float32:
            return y
        up = torch.nextafter(y, torch.full_like(y, torch.inf))
        return torch.where(torch.arange(y.numel()).view(y.shape) % 100 == 0, up, y)

    monkeypatch.setattr(proof, "normalized", lambda *a: every_hundredth(real(*a)))
    (entry,) = nk.swap_(strangers.Llama()).accepted
    assert {held for _, held in entry.plan.executed} == {torch.float32}  # and so is then every result
    assert any("identical, 99.5% needed" in note for note in entry.elsewhere)


def test_modules_share_a_judgement_only_if_they_are_alike() -> None:
    same = [strangers.Llama(16), strangers.Llama(16)]
    assert swap._key(same[0]) == swap._key(same[1])
    for other in (strangers.Llama(17), strangers.Llama(16, 1e-5), strangers.Olmo(16), strangers.Llama(16).half()):
        assert swap._key(same[0]) != swap._key(other)
    flagged = strangers.Llama(16)
    flagged.flag = True
    assert swap._key(same[0]) != swap._key(flagged)


def test_weightless_norms_keep_the_widths_they_take(x: Tensor) -> None:
    free, fixed = nn.Module(), nn.LayerNorm(WIDTH, elementwise_affine=False)
    free = strangers.Free()
    nk.swap_(nn.ModuleList([free, fixed]))
    assert vars(free)["forward"].plan.width is None
    assert torch.equal(free(x[..., :20]), nk.rms_norm(x[..., :20], spec=nk.WEIGHTLESS_RMS))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fixed(x[..., :20])


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) for k in (strangers.Gated, strangers.Insistent)]
)
def test_gated_norms_with_and_without_their_gate(kind: type[nn.Module], x: Tensor) -> None:
    norm, own = kind(), kind()
    report = nk.swap_(norm)
    if not report.accepted:
        assert "gated norms have no kernel" in report.rejected[0].reason
        pytest.skip("no kernel takes a gate")
    gate = randn(*x.shape, seed=4)
    for dtype in (torch.float32, torch.bfloat16):
        given = (x.to(dtype), gate.to(dtype))
        norm, own = norm.to(dtype), own.to(dtype)
        torch.testing.assert_close(norm(*given), own(*given))
        assert torch.equal(norm(given[0], gate=given[1]), norm(*given))
        assert torch.equal(norm(hidden=given[0], gate=given[1]), norm(*given))
        if kind is strangers.Gated:
            torch.testing.assert_close(norm(given[0]), own(given[0]))
        else:
            with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'float'"):
                norm(given[0])


def test_a_norm_that_takes_some_ranks_is_fused_for_those(x: Tensor) -> None:
    class Picky(strangers.Llama):
        def forward(self, hidden: Tensor) -> Tensor:
            if hidden.dim() > 3:
                raise ValueError("2 or 3 axes, please")
            return super().forward(hidden)

    norm = Picky()
    nk.swap_(norm)
    assert vars(norm)["forward"].plan.ranks == (2, 3)
    torch.testing.assert_close(norm(x[0]), norm(x)[0])
    with pytest.raises(ValueError, match="2 or 3 axes, please"):
        norm(x[None])
    free = strangers.Llama()
    nk.swap_(free)
    assert vars(free)["forward"].plan.ranks is None
    assert torch.equal(free(x[None, None])[0, 0], free(x))


def test_a_norm_that_changes_with_its_mode_is_left_alone(x: Tensor) -> None:
    class Moody(strangers.Llama):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * 2 if self.training else hidden)

    (entry,) = nk.swap_(Moody().eval()).rejected
    assert entry.reason == "it computes something else in training than in inference"


def test_a_plan_travels_as_it_is() -> None:
    norm = strangers.Llama()
    nk.swap_(norm)
    plan = vars(norm)["forward"].plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert replace(plan, width=1) != plan
