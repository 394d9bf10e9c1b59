"""Tiny random models of many families of transformers, and the wiring that each one's residual streams follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_LM = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEAD = {**_LM, "head_dim": 8}
_BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A model type and what an audit must say of it.

    ``wirings``: of its streams, the longest first; None where no row of `normkit.WIRINGS` fits.
    """

    kind: str
    wirings: tuple[str | None, ...]
    base: dict[str, Any] = field(default_factory=lambda: _HEAD)
    more: dict[str, Any] = field(default_factory=dict)
    auto: str = ""

    def config(self) -> Any:
        import transformers

        return transformers.CONFIG_MAPPING[self.kind](**{**self.base, **self.more})

    def model(self) -> nn.Module:
        import transformers

        config = self.config()
        autos = (self.auto,) if self.auto else ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for auto in autos:
                if type(config) in getattr(transformers, auto)._model_mapping:
                    return getattr(transformers, auto).from_config(config)
        raise AssertionError(f"no model class for {self.kind}")


PRE, POST, SANDWICH, REORDERED, PARALLEL = ("pre",), ("post",), ("sandwich",), ("reordered",), ("parallel",)

QUICK = [
    Family("llama", PRE),
    Family("gemma2", SANDWICH),
    Family("olmo2", REORDERED),
    Family("bert", POST, _LM, auto="AutoModel"),
    Family("phi", PARALLEL, _LM),
    Family("gpt_neox", PARALLEL, _LM),
    Family("t5", ("pre", "pre"), _LM, {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    Family("vit", PRE, _VISION),
]
REST = [
    *(Family(kind, PRE) for kind in ("mistral", "qwen2", "qwen3", "gemma", "granite", "helium", "arcee", "apertus")),
    *(Family(kind, PRE) for kind in ("bitnet", "hunyuan_v1_dense", "smollm3", "lfm2", "olmo", "nanochat")),
    *(Family(kind, PRE, _LM) for kind in ("gpt2", "phi3", "stablelm", "starcoder2", "opt", "bloom", "nemotron")),
    *(Family(kind, SANDWICH) for kind in ("gemma3_text", "glm4")),
    *(Family(kind, REORDERED) for kind in ("olmo3", "exaone4")),
    *(Family(kind, PARALLEL) for kind in ("cohere", "cohere2")),
    *(Family(kind, POST, _LM, auto="AutoModel") for kind in ("roberta", "albert", "electra")),
    Family("afmoe", SANDWICH, _HEAD, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    Family("falcon", PARALLEL, _LM),
    Family("gptj", PARALLEL, {**_LM, "rotary_dim": 4}),
    Family("mixtral", PRE, _HEAD, _MOE),
    Family("phimoe", PRE, _LM, _MOE),
    Family("gpt_oss", PRE, _HEAD, _MOE),
    Family("olmoe", PRE, _LM, {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("llama4_text", PRE, _HEAD, {**_MOE, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}),
    Family(
        "deepseek_v3", PRE, _LM,
        {
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16, "num_key_value_heads": 4,
        },
    ),
    Family(
        "qwen3_next", PRE, _HEAD,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
            "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
    ),
    Family(
        "bamba", PRE, _LM,
        {
            "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2,
            "attn_layer_indices": [1], "mamba_chunk_size": 4,
        },
    ),
    Family(
        "mamba2", PRE, _LM,
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 4},
    ),
    Family("modernbert", PRE, _LM),
    Family("mamba", PRE, _LM),
    Family("gemma4_text", SANDWICH, _HEAD, {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}),
    Family(
        "gemma3n_text", ("sandwich",) * 3, _HEAD,
        {
            "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
            "intermediate_size": [64] * 3, "activation_sparsity_pattern": [0.0] * 3, "altup_num_inputs": 2,
        },
    ),
    Family(
        "gemma3n_text", ("sandwich",) * 3, _HEAD,
        {
            "num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
            "intermediate_size": [64] * 3, "activation_sparsity_pattern": [0.0] * 3, "altup_num_inputs": 2,
        },
    ),
    # Its residual is the normed value, so by its data it is post-norm with an extra norm at the start.
    Family("minimax", POST, _HEAD, {**_MOE, "block_size": 4}),
    # Hyper-connections: streams are mixed by a matrix, nothing is simply added.
    Family("deepseek_v4", (), _HEAD, {"n_routed_experts": 4, "num_experts_per_tok": 2}),
    Family("bart", ("post", "post"), _BART, auto="AutoModel"),
    Family("pegasus", ("pre", "pre"), _BART, auto="AutoModel"),
    Family(
        "whisper", ("pre", "pre"), _BART,
        {
            "max_source_positions": 20, "num_mel_bins": 8, "decoder_start_token_id": 1, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        auto="AutoModel",
    ),
    Family("dinov2", PRE, _VISION),
    Family("siglip_vision_model", PRE, _VISION),
    Family("swin", PRE, _SWIN),
    Family("swinv2", REORDERED, _SWIN),
    # One norm inside the branch, behind the convolution over positions.
    Family("convnext", (None,), {}, {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 32}),
]  # fmt: skip
