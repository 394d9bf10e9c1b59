"""A Llama of width 1024 and 8 layers on the CPU, before and after ``swap_``: prefill, decode, training step.

Three models share their random weights: the model as transformers runs it, the same swapped, and one whose norms return
their input, which shows what share of the time norms take at all. Every round times all three in an order drawn anew;
ratios are taken within a round, and their median is shown with the least and the largest.

Minutes of work: a training step takes seconds. On a busy machine only the spread says anything.

    python benchmarks/swapped_llama.py [THREADS] [ROUNDS]
"""

from __future__ import annotations

import copy
import statistics
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import normkit as nk
from normkit.bench.timing import Contender, interleave

TOKENS, VOCABULARY = 512, 4096
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


def sharing(model: nn.Module) -> nn.Module:
    """Return a copy that holds the very same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def without_norms(model: nn.Module, names: list[str]) -> nn.Module:
    """Return a copy whose norms return their input."""
    bare = sharing(model)
    for name in names:
        vars(bare.get_submodule(name))["forward"] = _same
    return bare


def _same(x: Tensor) -> Tensor:
    return x


def prefill(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    """Return a call that reads all tokens."""

    def call() -> object:
        with torch.no_grad():
            return model(tokens, use_cache=False, logits_to_keep=1)

    return call


def decode(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    """Return a call that reads one token behind all the others, over and over at the same place."""
    with torch.no_grad():
        cache = model(tokens, past_key_values=DynamicCache(config=CONFIG), use_cache=True).past_key_values
    one = tokens[:, -1:]

    def call() -> object:
        with torch.no_grad():
            out = model(one, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return out

    return call


def training(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    """Return a call with forward, backward and a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def call() -> object:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss

    return call


def shown(values: list[float]) -> str:
    """Return median, least and largest."""
    return f"{statistics.median(values):5.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming past_key_values
    given = [int(argument) for argument in sys.argv[1:]]
    torch.set_num_threads(given[0] if given else torch.get_num_threads())
    rounds = given[1] if len(given) > 1 else 5
    print(f"{TOKENS} tokens, {torch.get_num_threads()} threads, {rounds} rounds (decode: {8 * rounds})")
    print(f"{'':18} {'own, ms':>8}  {'swapped / own':24} {'without norms / own':24}")
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        own = LlamaForCausalLM(CONFIG).to(dtype)
        swapped = sharing(own)
        report = nk.swap_(swapped)
        assert len(report.accepted) == 17, report
        bare = without_norms(own, [name for name, *_ in report.accepted])
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
        for what, make in {"decode": decode, "prefill": prefill, "training step": training}.items():
            models = {"own": own, "swapped": swapped, "without": bare}
            contenders = [Contender(name, make(model, tokens)) for name, model in models.items()]
            found = interleave(contenders, 8 * rounds if what == "decode" else rounds, seed=0)
            base = found["own"].seconds
            swap, none = ([a / b for a, b in zip(found[n].seconds, base, strict=True)] for n in ("swapped", "without"))
            label = f"{what}, {'bf16' if dtype == torch.bfloat16 else 'f32'}"
            print(f"{label:18} {statistics.median(base) * 1e3:8.1f}  {shown(swap):24} {shown(none):24}", flush=True)


if __name__ == "__main__":
    main()
