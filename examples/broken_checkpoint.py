"""A checkpoint broken on purpose in three ways: audited, mended by what the findings say, and swapped.

A tiny Gemma is saved by a converter that adds the 1 of ``1 + w`` to the stored weights, and is then loaded by code that
sets one ε wrong and rewrites one layer without its second norm. Needs ``pip install normkit[hf]``; takes seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import GemmaConfig, GemmaForCausalLM
from transformers.utils import logging

import normkit as nk

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def healthy() -> GemmaForCausalLM:
    """Return a Gemma whose norm weights are stored around 0, as Gemma's are."""
    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(0, 0.1)
            else:
                parameter.mul_(4)
    return model


def convert(model: GemmaForCausalLM, folder: Path) -> None:
    """Save the model as a converter does that takes its norms for plain ones: fault 1."""
    state = {name: t + 1 if "norm" in name else t for name, t in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


def without_second_norm(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(hidden_states)


def load(folder: Path) -> GemmaForCausalLM:
    """Load the checkpoint and patch it: faults 2 and 3."""
    model = GemmaForCausalLM.from_pretrained(folder).eval()
    layers = model.model.layers
    layers[1].input_layernorm.eps = 1e-3
    layers[2].forward = MethodType(without_second_norm, layers[2])
    return model


def mend(model: GemmaForCausalLM, finding: nk.Finding) -> None:
    """Do what the finding's remedy says."""
    for name in finding.where:
        norm = model.get_submodule(name)
        if finding.code == "one-plus-doubled":
            norm.weight.data -= 1
        elif finding.code == "eps-differs":
            norm.eps = model.config.rms_norm_eps
        elif finding.code == "never-called":
            del model.get_submodule(name.rpartition(".")[0]).forward


def listed(report: nk.Audit) -> None:
    print(f"{len(report.norms)} norms, wiring {report.streams[0].wiring}, {len(report.findings)} findings")
    for finding in report.findings:
        more = f" and {len(finding.where) - 1} more" if len(finding.where) > 1 else ""
        print(f"  {finding.severity}, {finding.code}: {finding.where[0]}{more}")
        print(f"    {finding.what}")
        print(f"    → {finding.remedy}")


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    original = healthy()
    tokens = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = original(tokens).logits

        def distance(model: GemmaForCausalLM) -> str:
            return f"{((model(tokens).logits - expected).norm() / expected.norm()).item():.1g}"

        convert(original, Path(folder))
        model = load(Path(folder))
        print(f"as loaded, logits are off by {distance(model)}")
        report = nk.audit(model)
        listed(report)
        for finding in report.findings:
            mend(model, finding)
        print(f"mended, they are off by {distance(model)}")
        listed(nk.audit(model))
        swapped = nk.swap_(model)
        print(str(swapped).partition("\n")[0])
        print(f"swapped, they are off by {distance(model)}")


if __name__ == "__main__":
    main()
