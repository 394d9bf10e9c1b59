"""The model is left as it was, and what cannot be looked at is said."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.audit import inspect_model
from normkit.surgery.auditing.norm import Norm
from normkit.surgery.auditing.outline import outline
from surgery.stacks import WIDTH, PreBlock, Stack, ids, pre, wired

pytestmark = pytest.mark.usefixtures("on_the_reference")


class Restless(nn.Module):
    """Draws random numbers, counts, and rebinds a buffer whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.batch = nn.RMSNorm(WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.cache = torch.ones(3)
        random.random()
        return self.drop(self.norm(x)) + torch.rand(1) + self.batch(x.transpose(1, 2)).transpose(1, 2)


def snapshot(model: nn.Module) -> Any:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return (
        [(name, module.training, *(dict(getattr(module, h)) for h in hooks)) for name, module in model.named_modules()],
        [(name, p.data_ptr(), p.clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()],
        [(name, b.data_ptr(), b.clone()) for name, b in model.named_buffers()],
        torch.get_rng_state(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    model = Stack([PreBlock(), Restless(), PreBlock()], nn.RMSNorm(WIDTH))
    model.train()
    model.layers[0].eval()
    model(ids()).sum().backward()
    model.layers[2].register_forward_hook(lambda *_: None)
    if fails:
        model.head = nn.Linear(3, 3)
    before = snapshot(model)
    report = nk.audit(model, ids())
    assert same(before, snapshot(model))
    assert any("stopped" in note for note in report.notes) is fails


def test_auditing_twice_says_the_same() -> None:
    model = wired("sandwich")
    assert nk.audit(model, ids()).to_json() == nk.audit(copy.deepcopy(model), ids()).to_json()


def test_the_models_own_hooks_run() -> None:
    model, seen = pre(), []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    nk.audit(model, ids())
    assert seen == [1]


def test_without_an_example() -> None:
    report = nk.audit(pre())
    assert "no example input" in report.notes[0]
    assert [norm.calls for norm in report.norms] == [None] * 7
    assert {norm.convention for norm in report.norms} == {"TORCH_RMS_NORM"}
    assert not report.dangerous


def test_a_model_that_needs_keywords() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, *, x: Tensor, shift: Tensor) -> Tensor:
            return self.norm(x) + shift

    report = nk.audit(Needs(), torch.randn(2, 8))
    assert "normkit.audit(model, x=…, shift=…)" in report.notes[0]
    assert report.norms[0].calls is None
    assert nk.audit(Needs(), x=torch.randn(2, 8), shift=torch.ones(8)).notes == ()


def test_a_model_that_fails_half_way_is_reported_as_far_as_it_got() -> None:
    model = pre()
    model.layers[1].mlp = nn.Linear(3, 3)
    report = nk.audit(model, ids())
    assert "the forward stopped in layers.1.mlp" in report.notes[0]
    calls = {norm.name: norm.calls for norm in report.norms}
    assert calls["layers.1.norm2"] == 1
    assert calls["layers.2.norm1"] is None
    assert "never-called" not in [finding.code for finding in report.findings]


def test_on_meta_the_wiring_is_found_and_the_weights_are_not_judged() -> None:
    with torch.device("meta"):
        model = pre()
    report = nk.audit(model, torch.zeros(2, 7, dtype=torch.long, device="meta"))
    assert report.streams[0].wiring == "pre"
    assert "on meta" in report.notes[0]
    assert not report.dangerous


def test_a_compiled_model_is_run_as_python() -> None:
    report = nk.audit(torch.compile(pre()), ids())
    assert "compiled" in report.notes[0]
    assert report.streams[0].wiring == "pre"
    assert report.norms[0].name == "layers.0.norm1"


def test_a_quantised_part_is_named_and_the_rest_goes_on() -> None:
    class Int8(nn.Module):
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.weight = nn.Parameter((linear.weight * 100).to(torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight.float() / 100).t()

    model = pre()
    model.layers[0].mlp[0] = Int8(model.layers[0].mlp[0])
    report = nk.audit(model, ids())
    assert any("quantised" in note and "layers.0.mlp.0" in note for note in report.notes)
    assert report.streams[0].wiring == "pre"


def test_a_module_that_cannot_be_asked_does_not_end_the_audit() -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("no")

    report = inspect_model(pre(), (ids(),), {}, [], refuse)
    assert report.streams[0].wiring == "pre"
    assert {(norm.kind, norm.unidentified) for norm in report.norms} == {
        ("rms", "it could not be run alone: RuntimeError: no")
    }


def test_modules_that_differ_in_an_attribute_alone_are_told_apart() -> None:
    model = nn.Sequential(
        *(nk.RMSNorm(WIDTH, spec=spec, eps=eps) for spec in (nk.LLAMA, nk.GEMMA) for eps in (1e-6, 1e-3))
    )
    report = nk.audit(model, torch.randn(2, WIDTH))
    assert [(norm.convention, norm.eps) for norm in report.norms] == [
        ("LLAMA", 1e-6), ("LLAMA", 1e-3), ("GEMMA", 1e-6), ("GEMMA", 1e-3),
    ]  # fmt: skip


def test_only_modules() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
        nk.audit(3)  # type: ignore[arg-type]


def test_a_norm_of_its_own_kind_is_found_by_behaviour() -> None:
    """normkit's own norms rescale their rows first, which no pattern of operators knows."""
    report = nk.audit(Stack([PreBlock(nk.RMSNorm)], nk.LayerNorm(WIDTH)), ids())
    assert [(norm.kind, norm.convention, norm.calls) for norm in report.norms] == [
        ("rms", "TORCH_RMS_NORM", 1), ("rms", "TORCH_RMS_NORM", 1), ("layer", "TORCH_LAYER_NORM", 1),
    ]  # fmt: skip


def test_a_norm_written_into_a_forward() -> None:
    class Inline(PreBlock):
        def forward(self, x: Tensor) -> Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
            x = x + self.attention(y)
            return x + self.mlp(self.norm2(x))

    report = nk.audit(Stack([Inline(), Inline()], nn.RMSNorm(WIDTH)), ids())
    functions = [norm for norm in report.norms if norm.function]
    assert [(norm.name, norm.kind, norm.eps, norm.width) for norm in functions] == [
        ("layers.0", "rms", 1e-3, WIDTH), ("layers.1", "rms", 1e-3, WIDTH),
    ]  # fmt: skip
    assert {norm.positions for norm in functions} == {("branch input",)}
    assert report.streams[0].wiring == "pre"


@pytest.mark.parametrize("width", [30, 44, 60, 80, 160])
def test_the_text_keeps_to_its_width(width: int) -> None:
    model = wired("sandwich", 4)
    with torch.no_grad():
        model.layers[2].norm_in.weight[0] = float("nan")
    text = nk.audit(model, ids()).text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "weights-not-finite" in text
    assert "1 danger" in text


def test_like_layers_are_drawn_once() -> None:
    text = nk.audit(pre(12), ids()).text(100)
    assert "layers.0–11" in text
    tree = text[text.index("Stack\n├") : text.index("▲")]
    assert tree.count("norm1") == 1
    odd = pre(12)
    odd.layers[5].norm1.eps = 1e-2
    text = nk.audit(odd, ids()).text(100)
    for part in ("0–4", "5", "6–11"):
        assert f"── {part}" in text


def test_norms_with_a_finding_are_marked_in_the_tree_and_not_merged() -> None:
    model = pre(5, norm=lambda width: nn.LayerNorm(width, elementwise_affine=True))
    with torch.no_grad():
        model.layers[2].norm2.weight[0] = float("inf")
    lines = nk.audit(model, ids()).text(100).splitlines()
    assert sum("norm2  ✖" in line for line in lines) == 1
    assert [part for part in ("0–1", "2", "3–4") if any(line.endswith(f"── {part}") for line in lines)] == [
        "0–1", "2", "3–4",
    ]  # fmt: skip


def test_colour_only_where_asked() -> None:
    report = nk.audit(pre(), ids())
    assert "\x1b[" not in report.text()
    assert "\x1b[" in report.text(color=True)


def test_json_holds_everything() -> None:
    data = json.loads(nk.audit(wired("reordered"), ids()).to_json())
    assert set(data) == {"model", "dangerous", "norms", "streams", "findings", "notes"}
    assert data["streams"][0]["joins"][1]["branch"] == ["layers.1.norm_branch"]
    assert data["norms"][0]["spec"] == nk.TORCH_RMS_NORM.code


def test_layers_that_differ_in_eps_alone_are_drawn_apart() -> None:
    norms = [Norm(f"layers.{i}.norm", "RMSNorm", eps=1e-6 if i < 2 else 1e-5) for i in range(4)]
    assert list(outline(norms).below["layers"].below) == ["0–1", "2–3"]
