"""From a recorded forward, or without one, to the list of a model's norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import TORCH_DEFAULT
from normkit.surgery.auditing.norm import Norm
from normkit.surgery.flow.positions import Position
from normkit.surgery.flow.record import Flow, Ref, module_names
from normkit.surgery.flow.sightings import Sighting

Identify = Callable[..., Any]
_KNOWN: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
    nn.GroupNorm: "group",
    nn.BatchNorm1d: "batch",
    nn.BatchNorm2d: "batch",
    nn.BatchNorm3d: "batch",
    nn.SyncBatchNorm: "batch",
    nn.InstanceNorm1d: "instance",
    nn.InstanceNorm2d: "instance",
    nn.InstanceNorm3d: "instance",
}


def survey(
    model: nn.Module,
    flow: Flow | None,
    found: Sequence[Sighting],
    places: dict[int, Position],
    identify: Identify,
) -> list[Norm]:
    """Return every norm, in the order of the model's modules; function calls after the module they stand in."""
    asked = _Asked(identify)
    modules = dict(model.named_modules())
    names = module_names(model)
    by_module: dict[str, list[Sighting]] = defaultdict(list)
    by_place: dict[tuple[object, ...], list[Sighting]] = defaultdict(list)
    for sighting in found:
        owner = sighting.module or _owner(sighting, modules)
        if owner is not None:
            by_module[owner].append(sighting)
        elif flow is not None:
            place = flow.calls[sighting.call].name
            by_place[place, sighting.kind, sighting.size, sighting.eps, sighting.weights].append(sighting)
    norms: list[Norm] = []
    kinds = {type(modules[name]) for name in by_module if name in modules}
    for name, module in modules.items():
        seen = by_module.get(name, [])
        if seen or _looks_like_one(module, kinds):
            norm = _module_norm(name, module, seen, flow, places, asked, tuple(names[id(module)][1:]))
            if norm is not None:
                norms.append(norm)
        norms += [
            _function_norm(module, list(s), flow, places) for key, s in by_place.items() if key[0] == name and flow
        ]
    return norms


def _owner(sighting: Sighting, modules: dict[str, nn.Module]) -> str | None:
    """Return the module whose weights a function call scales with, if it holds nothing else."""
    owners = {name.rpartition(".")[0] for name in sighting.weights}
    if len(owners) != 1:
        return None
    owner = owners.pop()
    own = {f"{owner}.{name}" for name, _ in modules[owner].named_parameters()} if owner in modules else set[str]()
    return owner if own and own <= set(sighting.weights) else None


def _looks_like_one(module: nn.Module, kinds: set[type[nn.Module]]) -> bool:
    """Return whether a module in which none was seen may be one: of a class seen elsewhere, of PyTorch's, by name."""
    if type(module) in kinds or type(module) in _KNOWN:
        return True
    small = all(p.dim() <= 2 for p in module.parameters()) and not any(True for _ in module.children())
    return small and "norm" in type(module).__name__.lower()


def _module_norm(
    name: str,
    module: nn.Module,
    seen: list[Sighting],
    flow: Flow | None,
    places: dict[int, Position],
    asked: _Asked,
    aliases: tuple[str, ...],
) -> Norm | None:
    calls = len(flow.calls_of(name)) if flow is not None else None
    answer = asked(module, flow, name, seen[0].axes if seen else (-1,))
    identified = bool(answer) and getattr(answer, "spec", None) is not None
    if not seen and not identified and type(module) not in _KNOWN:
        return None  # called a norm, and is none
    spec = answer.spec if identified else None
    first = seen[0] if seen else None
    kind = first.kind if first is not None else spec.kind if spec is not None else _KNOWN.get(type(module))
    eps = first.eps if first is not None else None
    if eps is None:
        eps = _number(answer.eps) if identified else _number(getattr(module, "eps", None))
    parameters = tuple(f"{name}.{p}" if name else p for p, _ in module.named_parameters())
    tensor = next(iter([*module.parameters(), *module.buffers()]), None)
    return Norm(
        name, type(module).__name__, kind, spec,
        "" if identified else str(getattr(answer, "reason", answer)), eps,
        first.size if first is not None else _width(tensor),
        None if tensor is None else tensor.dtype, None if tensor is None else tuple(tensor.shape),
        first.x.dtype if first is not None else None,
        flow.nodes[first.out].outputs[0].dtype if first is not None and flow is not None else None,
        max(calls, len(seen)) if calls is not None else None,
        tuple(dict.fromkeys(places[s.out] for s in seen)),
        parameters=parameters, aliases=aliases, function=bool(seen) and first is not None and first.module is None,
    )  # fmt: skip


def _function_norm(module: nn.Module, seen: list[Sighting], flow: Flow, places: dict[int, Position]) -> Norm:
    first = seen[0]
    return Norm(
        flow.calls[first.call].name, type(module).__name__, first.kind, None,
        "a function call inside a larger forward", first.eps, first.size,
        input_dtype=first.x.dtype, output_dtype=flow.nodes[first.out].outputs[0].dtype, calls=len(seen),
        positions=tuple(dict.fromkeys(places[s.out] for s in seen)), function=True, parameters=first.weights,
    )  # fmt: skip


def _number(eps: Any) -> float | None:
    if eps is TORCH_DEFAULT:
        return torch.finfo(torch.float32).eps
    return float(eps) if isinstance(eps, (int, float)) and not isinstance(eps, bool) else None


def _width(tensor: Tensor | None) -> int | None:
    return tensor.shape[-1] if tensor is not None and tensor.dim() else None


class _Asked:
    """`identify` with a memory: modules of one class with the same attributes and shapes compute the same thing."""

    def __init__(self, identify: Identify) -> None:
        self.identify = identify
        self.known: dict[tuple[object, ...], Any] = {}

    def __call__(self, module: nn.Module, flow: Flow | None, name: str, axes: tuple[int, ...]) -> Any:
        call = next((c for c in flow.calls_of(name) if c.done), None) if flow is not None else None
        refs = tuple(_shortened(r, module, axes) for r in call.positional) if call is not None else ()
        keywords = {n: _shortened(r, module, axes) for n, r in call.keywords.items()} if call is not None else {}
        key = (
            type(module), module.__dict__.get("forward"), tuple(_plain(module)),
            tuple((n, t.shape, t.dtype) for n, t in _tensors(module)),
            tuple(_shape(r) for r in refs), tuple((n, _shape(r)) for n, r in sorted(keywords.items())),
        )  # fmt: skip
        if key not in self.known:
            device = next((t.device for _, t in _tensors(module)), torch.device("cpu"))
            args = [_stand_in(r, device) for r in refs]
            named = {n: _stand_in(r, device) for n, r in keywords.items()}
            self.known[key] = self.identify(module, *args, **named)
        return self.known[key]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a forward may read besides tensors: numbers, names, flags."""
    for part, child in module.named_modules():
        for attribute, value in sorted(vars(child).items()):
            if isinstance(value, (int, float, str, tuple, type(None), torch.dtype)):
                yield f"{part}.{attribute}", repr(value)


def _shortened(value: Any, module: nn.Module, axes: tuple[int, ...]) -> Any:
    """Cut the axes that neither a statistic nor a parameter runs over: a few rows tell as much as thousands."""
    if not isinstance(value, Ref):
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
