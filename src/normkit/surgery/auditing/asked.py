"""Asking `identify` about the modules of a model, each kind once, and norms that only it can see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import TORCH_DEFAULT
from normkit.surgery.findings import Identified, Unidentified
from normkit.surgery.flow.paths import works
from normkit.surgery.flow.record import Call, Flow, Ref
from normkit.surgery.flow.sightings import Sighting

Identify = Callable[..., Identified | Unidentified]
_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (int, float, str, bytes, type(None), torch.dtype, torch.device)
_REDUCING = frozenset({"mean", "sum", "var", "var_mean", "linalg_vector_norm", "norm", "std", "amax"})


class Asked:
    """`identify` with a memory: modules of one class with the same attributes and shapes compute the same thing."""

    def __init__(self, identify: Identify) -> None:
        self.identify = identify
        self.known: dict[tuple[object, ...], Identified | Unidentified] = {}
        self.held: list[nn.Module] = []  # keeps the objects alive whose identities are in the keys

    def __call__(
        self, module: nn.Module, flow: Flow | None, name: str, axes: tuple[int, ...] | None = (-1,)
    ) -> Identified | Unidentified:
        """Ask about a module, with inputs shaped as those of its first call; only ``axes`` keep their length."""
        call = next((c for c in flow.calls_of(name) if c.done), None) if flow is not None else None
        refs = tuple(_shortened(r, module, axes) for r in call.positional) if call is not None else ()
        keywords = {n: _shortened(r, module, axes) for n, r in call.keywords.items()} if call is not None else {}
        key = (
            type(module), module.__dict__.get("forward"), tuple(_attributes(module)),
            tuple((n, t.shape, t.dtype) for n, t in _tensors(module)),
            tuple(_shape(r) for r in refs), tuple((n, _shape(r)) for n, r in sorted(keywords.items())),
        )  # fmt: skip
        if key not in self.known:
            self.held.append(module)
            device = next((t.device for _, t in _tensors(module)), torch.device("cpu"))
            args = [_stand_in(r, device) for r in refs]
            named = {n: _stand_in(r, device) for n, r in keywords.items()}
            try:
                self.known[key] = self.identify(module, *args, **named)
            except Exception as error:  # one module that cannot be asked must not end the audit of the others
                self.known[key] = Unidentified(f"it could not be run alone: {type(error).__name__}: {error}")
        return self.known[key]


def by_behaviour(flow: Flow, found: Sequence[Sighting], asked: Asked) -> list[Sighting]:
    """Return the norms among modules whose operators follow no known pattern: fused, rescaled, or otherwise their own.

    Asked are modules without submodules in whose call something is summed up and no weight matrix is at work.

    Example:
        >>> import normkit as nk
        >>> from normkit.surgery.flow.record import record
        >>> flow = record(nn.Sequential(nk.RMSNorm(8)), (torch.randn(2, 8),), {})
        >>> [(s.module, s.kind, s.eps) for s in by_behaviour(flow, [], Asked(nk.identify))]
        [('0', 'rms', 1e-06)]
    """
    known = {s.module for s in found}
    seen: list[Sighting] = []
    for call in flow.calls:
        if call.name in known or not call.done or not call.outputs or not _may_be_one(flow, call):
            continue
        answer = asked(call.module, flow, call.name, None)
        x = next((ref for ref in call.inputs if flow.nodes[ref.node].live), None)
        if isinstance(answer, Identified) and x is not None and call.outputs[0].node >= call.first:
            seen.append(_sighting(flow, call, answer, x))
    return seen


def _may_be_one(flow: Flow, call: Call) -> bool:
    nodes = flow.nodes[call.first : call.last]
    small = not any(True for _ in call.module.children())
    return small and any(n.op in _REDUCING for n in nodes) and not any(works(n) for n in nodes)


def _sighting(flow: Flow, call: Call, answer: Identified, x: Ref) -> Sighting:
    rank = len(x.shape)
    axes = tuple(sorted(axis % rank - rank for axis in answer.axes))
    nodes = range(call.first, call.last)
    names = {flow.nodes[ref.node].name for i in nodes for ref in flow.nodes[i].inputs} - {""}
    return Sighting(
        "group" if answer.groups > 1 else answer.spec.kind, number(answer.eps), x, call.outputs[0].node,
        math.prod(x.shape[a] for a in axes) // answer.groups, axes, frozenset(nodes), call.index, call.name,
        tuple(sorted(names)),
    )  # fmt: skip


def number(eps: Any) -> float | None:
    """Return ε as a number; `normkit.TORCH_DEFAULT` is float32's machine epsilon.

    Example:
        >>> number(1e-5), number(None)
        (1e-05, None)
    """
    if eps is TORCH_DEFAULT:
        return torch.finfo(torch.float32).eps
    return float(eps) if isinstance(eps, (int, float)) and not isinstance(eps, bool) else None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what a forward may read besides tensors: values by what they say, other objects by which they are."""
    for part, child in module.named_modules():
        for attribute, value in sorted(vars(child).items()):
            if attribute in _INTERNAL or isinstance(value, Tensor):
                continue
            plain = isinstance(value, _PLAIN) or is_dataclass(value)
            plain |= isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value)
            yield f"{part}.{attribute}", repr(value) if plain else id(value)


def _shortened(value: Any, module: nn.Module, axes: tuple[int, ...] | None) -> Any:
    """Cut the axes that neither a statistic nor a parameter runs over: a few rows tell as much as thousands."""
    if not isinstance(value, Ref) or axes is None:
        return value
    sizes = {size for _, tensor in _tensors(module) for size in tensor.shape}
    rank = len(value.shape)
    shape = tuple(s if i - rank in axes or s in sizes else min(s, 3) for i, s in enumerate(value.shape))
    return replace(value, shape=shape)


def _shape(value: Any) -> object:
    return (value.shape, value.dtype) if isinstance(value, Ref) else repr(value)


def _stand_in(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Ref):
        return value
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(device, value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)
