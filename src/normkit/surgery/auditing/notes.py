"""What an audit cannot look into, said per module."""

from __future__ import annotations

import inspect
from collections import defaultdict

from torch import nn

from normkit.surgery.flow.record import Flow

_META = "on meta, without values (weights are not judged; where the forward asks for a value the answer is yes)"


def notes_on(model: nn.Module) -> list[str]:
    """Return what is on meta, compiled, quantised or sharded, with the names of the modules.

    Example:
        >>> import torch
        >>> notes_on(torch.nn.Linear(2, 2, device="meta"))[0][:28]
        'on meta, without values (wei'
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            kinds["compiled (run as Python here)"].append(name)
        own = list(module._parameters.values())  # pyright: ignore[reportPrivateUsage]
        tensors = [p for p in own if p is not None]
        if any(p.is_meta for p in tensors):
            kinds[_META].append(name)
        if any(not p.is_floating_point() and not p.is_complex() for p in tensors) or _quantised(module):
            kinds["quantised (its own arithmetic is not looked into)"].append(name)
        if any(type(p).__name__ == "DTensor" or hasattr(p, "device_mesh") for p in tensors) or hasattr(
            module, "_fsdp_wrapped_module"
        ):
            kinds["sharded (weights are gathered to be looked at; wiring is this rank's)"].append(name)
    holders = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    return [f"{kind}: {_few(names, holders)}" for kind, names in kinds.items()]


def _quantised(module: nn.Module) -> bool:
    path = type(module).__module__
    return ".quantized" in path or path.startswith(("bitsandbytes", "gptqmodel", "awq", "torchao.quantization"))


def _few(names: list[str], holders: int) -> str:
    if len(names) == holders > 1:
        return "every module with parameters"
    shown = [name or "the model itself" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def what_failed(model: nn.Module, flow: Flow, given: bool) -> str:
    """Say where a forward stopped and what to do."""
    error = str(flow.error).strip().splitlines()
    first = error[0] if error else ""
    text = f"the forward stopped in {flow.failed_in or 'the model itself'}: {type(flow.error).__name__}: {first}"
    missing = _required(model) if isinstance(flow.error, TypeError) and flow.failed_in == type(model).__name__ else []
    if missing:
        example = ", ".join(f"{name}=…" for name in missing)
        return f"{text}; pass what it needs: normkit.audit(model, {example})"
    if not given:
        return f"{text}; pass an input that it takes: normkit.audit(model, …)"
    return f"{text}; what follows it is not in this report"


def _required(model: nn.Module) -> list[str]:
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.default is empty and p.kind in kinds]
