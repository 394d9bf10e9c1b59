"""A swapped model of the installed transformers, among the libraries that people use with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.fused import Fused

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install normkit[hf])")


# peft asks for a name that transformers is about to drop.
DEPRECATED = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def original() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    return model


@pytest.fixture
def model(original: Any) -> Any:
    return copy.deepcopy(original)


TOKENS = torch.arange(34).view(2, 17) % 99


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def swapped(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), Fused)]


def test_every_norm_of_a_llama(model: Any) -> None:
    before = logits(model)
    report = nk.swap_(model)
    assert len(report.accepted) == 5
    assert {(e.spec, e.plan.eps) for e in report.accepted} == {("LLAMA", 1e-5)}
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    report.undo()
    assert torch.equal(logits(model), before)


def test_saving_and_loading(model: Any, tmp_path: Path) -> None:
    report = nk.swap_(model)
    after = logits(model)
    model.save_pretrained(tmp_path)
    fresh = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert swapped(fresh) == []
    report.undo()
    assert torch.equal(logits(fresh), logits(model))
    nk.swap_(fresh)
    assert torch.equal(logits(fresh), after)


def test_training_with_recomputation(model: Any, original: Any) -> None:
    def gradients(m: Any) -> list[Tensor]:
        m.train()
        m(TOKENS, labels=TOKENS).loss.backward()
        return [p.grad for p in m.parameters()]

    nk.swap_(model)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *a, **k: torch.utils.checkpoint.checkpoint(
            f, *a, use_reentrant=False, **k
        )
    for ours, own in zip(gradients(model), gradients(copy.deepcopy(original)), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-5)


@DEPRECATED
def test_peft_wraps_what_is_swapped(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    nk.swap_(model)
    before = logits(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    assert torch.equal(logits(wrapped), before)
    norm = wrapped.base_model.model.model.norm
    trained = norm.modules_to_save["default"]
    assert vars(trained)["forward"].module is trained
    with torch.no_grad():
        trained.weight.mul_(2)
    torch.testing.assert_close(logits(wrapped), 2 * before)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), before)


@DEPRECATED
def test_swapping_what_peft_has_wrapped(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    before = logits(wrapped)
    report = nk.swap_(wrapped)
    assert len(report.accepted) == 10  # both copies of each norm, never the wrapper that chooses between them
    torch.testing.assert_close(logits(wrapped), before, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        wrapped.base_model.model.model.norm.modules_to_save["default"].weight.mul_(2)
    with wrapped.disable_adapter():
        torch.testing.assert_close(logits(wrapped), before, rtol=1e-4, atol=1e-5)
    assert "normkit: LLAMA, ε=1e-05" in repr(wrapped)


def test_hooks_of_accelerate_go_around(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    report = nk.swap_(model)
    before = logits(model)
    hooks.add_hook_to_module(model.model.norm, hooks.AlignDevicesHook("cpu"))
    assert torch.equal(logits(model), before)
    with pytest.raises(RuntimeError, match=r"model\.norm was replaced after the swap"):
        report.undo()
    hooks.remove_hook_from_module(model.model.norm)
    report.undo()
    assert swapped(model) == []
