"""The norms people know, as specs. Families in comments use the same arithmetic under other class names.

ε is not part of a spec; the usual value stands in the comment, and the model's config has the last word.
"""

from __future__ import annotations

from dataclasses import replace

from normkit.spec import NormSpec

# torch.nn.LayerNorm (1e-5): float32 statistics, one rounding, x's dtype out. Weight and bias optional.
TORCH_LAYER_NORM = NormSpec(centered=True)
# torch.nn.RMSNorm (None: see TORCH_DEFAULT): float32, weight before the one rounding.
TORCH_RMS_NORM = NormSpec()
# OLMo 2/3, GPT-OSS, Helium, Nemotron-H (1e-6): float32, weight before the one rounding.
OLMO2 = NormSpec()
# Llama, Mistral, Qwen 2/3, DeepSeek V2/V3, GLM, Granite, … (1e-6 or 1e-5): round to x's dtype, then weight.
LLAMA = NormSpec(cast="first", output="promote")
# Gemma 1/2/3, RecurrentGemma, Qwen3-Next (1e-6): weight stored around 0, 1 added in float32.
GEMMA = NormSpec(weight="one_plus")
# Gemma 3n, Gemma 4 (1e-6): v^(−1/2) by a power instead of a root.
GEMMA3N = NormSpec(root="power")
# A zero-centred weight whose 1 + w is rounded to the weight's dtype before it is used (Muse Spark, 1e-6).
MUSE_SPARK = NormSpec(weight="one_plus_rounded")
# T5, mT5, UMT5, LongT5, Switch, Idefics (1e-6): called LayerNorm, is an RMSNorm; a half weight decides the dtype.
T5 = NormSpec(cast="t5", output="promote")
# nanochat, HRM-Text, Llama 4's q/k norm (called L2Norm), Falcon-Mamba on dt, B, C: no weight.
WEIGHTLESS_RMS = NormSpec(weight="none")
# DeepSeek V4 and GLM-5 latents: no weight, the inverse root rounded to x's dtype and multiplied there.
ROUNDED_ROOT_RMS = NormSpec(weight="none", root_rounding="input")
# ImageGPT (1e-5): no upcast, divides by the root.
IMAGE_GPT = NormSpec(statistic_dtype="input", root="divide", cast="first", output="promote")
# Nemotron's LayerNorm1P (1e-5): centred, zero-centred weight, 1 + w in the weight's dtype.
NEMOTRON = NormSpec(centered=True, weight="one_plus_rounded")
# Cohere's LayerNorm (1e-5, no bias): as PyTorch's, under another class.
COHERE = TORCH_LAYER_NORM
# DeBERTa (1e-12): divide by the root, round, then weight and bias.
DEBERTA = NormSpec(centered=True, root="divide", cast="first", output="promote")
# OLMo 1 (1e-5): LayerNorm without any parameter.
OLMO = NormSpec(centered=True, weight="none")
# x / √(Σx² + ε) (linear attention's l2norm, 1e-6).
L2_NORM = NormSpec(statistic="sum", weight="none")
# ScaleNorm (1e-5 in its authors' code): one scalar gain over max(‖x‖, ε).
SCALE_NORM = NormSpec(statistic="sum", eps="max")
# Mamba 2, Bamba, Nemotron-H, Zamba 2 (1e-5): gate, then norm, then round, then weight.
MAMBA2 = NormSpec(gate="before", activation="silu", cast="first", output="promote")
# Qwen3-Next, Qwen 3.5 gated delta net (1e-6): norm, round, weight, then gate in float32 and round again.
QWEN3_NEXT_GATED = NormSpec(gate="after", activation="silu", cast="first")
# Kimi Linear, GLM-5 (1e-6): norm, weight, sigmoid gate, all float32, one rounding.
KIMI_GATED = NormSpec(gate="after", activation="sigmoid")
# normkit's default gated norm: as Kimi's with SiLU; one rounding.
GATED_RMS = replace(KIMI_GATED, activation="silu")


def _named() -> dict[str, NormSpec]:
    return {name: value for name, value in globals().items() if isinstance(value, NormSpec)}


NAMED: dict[str, NormSpec] = _named()
