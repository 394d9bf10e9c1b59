"""`fold_` on models that nobody here wrote: tiny random configurations of transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from surgery.fold_models import identified_once, same, state, stirred

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
__all__ = ["identified_once"]

U32 = torch.finfo(torch.float32).eps / 2
IDS = torch.tensor([[3, 7, 1, 40, 9, 22, 5], [8, 8, 30, 2, 11, 4, 60]])
SIZES = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(family: str, **changes: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**(GPT2 if family == "gpt2" else SIZES), **changes})
    torch.manual_seed(0)
    return stirred(transformers.AutoModelForCausalLM.from_config(config))


def names(report: nk.FoldReport, what: str) -> list[str]:
    return [f.name for f in report.folded if f.what == what]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def fold(model: nn.Module) -> nk.FoldReport:
    """Fold and hold the result to what the model computed before: each of its sums has at most 40 terms."""
    before = logits(model)
    report = nk.fold_(model, IDS, use_cache=False)
    unit = torch.finfo(before.dtype).eps / 2
    assert report.error is not None
    assert report.error.float64 <= report.error.bound < 1e-11
    # 2 layers of attention and feed-forward and the head: 9 matrices in a row at most.
    assert float((logits(model) - before).abs().max()) < 9 * 40 * unit * float(before.abs().max())
    assert report.error.after < max(2 * report.error.before, 4 * unit)
    return report


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_every_norm_of_a_pre_norm_model_folds(family: str) -> None:
    model = build(family)
    keys = list(model.state_dict())
    report = fold(model)
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(2) for n in ("input", "post_attention")] + ["model.norm"]
    assert sorted(names(report, "weight")) == sorted(norms)
    assert report.refused == ()
    readers = tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert next(f.into for f in report.folded if f.name == norms[0]) == readers
    rest = 0.0 if family == "gemma" else 1.0
    assert all(bool((model.get_submodule(n).weight == rest).all()) for n in norms)
    assert list(model.state_dict()) == keys


def test_gpt2_becomes_an_rms_model_once_its_table_is_its_own() -> None:
    tied = build("gpt2", tie_word_embeddings=True)
    report = fold(tied)
    assert len(names(report, "weight")) == 4
    assert names(report, "mean") == []
    assert sum("untie them first" in r.reason for r in report.refused) == 5

    model = build("gpt2")
    report = fold(model)
    assert len(names(report, "weight")) == 4
    assert len(names(report, "mean")) == 5
    assert [r.name for r in report.refused] == ["transformer.ln_f"]  # lm_head has no bias to take β
    stream = model.transformer(IDS, output_hidden_states=True, use_cache=False).hidden_states[1].detach()
    assert float(stream.mean(-1).abs().max()) < 3 * 40 * U32 * float(stream.abs().max())


def test_bert_keeps_its_norms_because_the_residual_reads_them() -> None:
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim", "tie_word_embeddings")}
    torch.manual_seed(0)
    model = stirred(transformers.BertModel(transformers.BertConfig(**sizes)))
    report = nk.fold_(model, IDS)
    assert names(report, "weight") == []
    assert names(report, "mean") == ["embeddings.LayerNorm"]  # three tables write to it and nobody else reads them
    kept = {r.name: r.reason for r in report.refused if r.what == "weight"}
    assert len(kept) == 5
    assert "a sum, which is no linear layer" in kept["embeddings.LayerNorm"]


def test_norms_inside_the_residual_and_on_queries_and_keys_stay() -> None:
    model = build("olmo2", num_hidden_layers=1)
    report = fold(model)
    assert names(report, "weight") == ["model.norm"]
    assert {r.name.rsplit(".", 1)[1] for r in report.refused} == {
        "q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm",
    }  # fmt: skip


def test_a_mixture_of_experts_folds_what_its_modules_read() -> None:
    model = build("mixtral", num_hidden_layers=1, num_local_experts=3)
    report = fold(model)
    assert names(report, "weight") == ["model.layers.0.input_layernorm", "model.norm"]
    assert "model.layers.0.mlp.gate, which is no linear layer" in report.refused[0].reason


def test_bfloat16_says_what_it_costs() -> None:
    model = build("llama").to(torch.bfloat16)
    before = state(model)
    report = fold(model)
    assert report.error is not None
    assert report.error.dtype == torch.bfloat16
    assert 1e-4 < report.error.moved < 1e-1
    assert "bfloat16" in str(report)
    report.undo()
    assert same(state(model), before)


def test_hidden_states_that_the_caller_asks_for_are_readers() -> None:
    report = nk.fold_(build("llama"), IDS, output_hidden_states=True)
    assert "model.norm" not in names(report, "weight")  # its output is the last of them
    assert len(names(report, "weight")) == 4


def test_a_vision_model() -> None:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    model = stirred(transformers.ViTForImageClassification(config))
    image = torch.randn(2, 3, 8, 8)
    report = nk.fold_(model, image)
    assert len(names(report, "weight")) == 3
    assert len(names(report, "mean")) == 3
    assert report.refused == ()
