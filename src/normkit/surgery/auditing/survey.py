"""From a recorded forward, or without one, to the list of a model's norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor, nn

from normkit.checks import TORCH_DEFAULT
from normkit.surgery.auditing.asked import Asked, number
from normkit.surgery.auditing.norm import Norm
from normkit.surgery.findings import Identified, Unidentified
from normkit.surgery.flow.positions import Position
from normkit.surgery.flow.record import Flow, module_names
from normkit.surgery.flow.sightings import Sighting

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
    asked: Asked,
) -> list[Norm]:
    """Return every norm, in the order of the model's modules; function calls after the module they stand in."""
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
    asked: Asked,
    aliases: tuple[str, ...],
) -> Norm | None:
    calls = _calls(flow, name, seen)
    answer = asked(module, flow, name, seen[0].axes if seen else (-1,))
    if not seen and not isinstance(answer, Identified) and type(module) not in _KNOWN:
        return None  # called a norm, and is none
    spec = answer.spec if isinstance(answer, Identified) else None
    first = seen[0] if seen else None
    kind = first.kind if first is not None else spec.kind if spec is not None else _KNOWN.get(type(module))
    if isinstance(answer, Identified):
        eps = number(answer.eps)
    else:
        eps = first.eps if first is not None else number(getattr(module, "eps", None))
    parameters = tuple(f"{name}.{p}" if name else p for p, _ in module.named_parameters())
    tensor = next(iter([*module.parameters(), *module.buffers()]), None)
    return Norm(
        name, type(module).__name__, kind, spec,
        answer.reason if isinstance(answer, Unidentified) else "", eps,
        first.size if first is not None else _width(tensor),
        None if tensor is None else tensor.dtype, None if tensor is None else tuple(tensor.shape),
        first.x.dtype if first is not None else None,
        flow.nodes[first.out].outputs[0].dtype if first is not None and flow is not None else None,
        calls,
        tuple(dict.fromkeys(places[s.out] for s in seen)),
        parameters=parameters, aliases=aliases, function=first is not None and first.module is None,
        eps_is_default=isinstance(answer, Identified) and answer.eps is TORCH_DEFAULT,
    )  # fmt: skip


def _calls(flow: Flow | None, name: str, seen: list[Sighting]) -> int | None:
    """Count calls; a forward that stopped proves nothing about what it did not reach."""
    if flow is None:
        return None
    calls = max(len(flow.calls_of(name)), len(seen))
    return None if flow.error is not None and calls == 0 else calls


def _function_norm(module: nn.Module, seen: list[Sighting], flow: Flow, places: dict[int, Position]) -> Norm:
    first = seen[0]
    return Norm(
        flow.calls[first.call].name, type(module).__name__, first.kind, None,
        "a function call inside a larger forward", first.eps, first.size,
        input_dtype=first.x.dtype, output_dtype=flow.nodes[first.out].outputs[0].dtype, calls=len(seen),
        positions=tuple(dict.fromkeys(places[s.out] for s in seen)), function=True, parameters=first.weights,
    )  # fmt: skip


def _width(tensor: Tensor | None) -> int | None:
    return tensor.shape[-1] if tensor is not None and tensor.dim() else None
