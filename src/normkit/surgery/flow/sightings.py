"""Norms in a recorded forward, by what was computed and not by anybody's name for it.

A norm is seen where a value is divided by the root of its own mean (or sum, or variance) of squares, or where ATen's
own layer, RMS, group or batch norm runs. One seen in a module that does nothing else is that module's norm; any other
was written as a function call inside a larger forward.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from normkit.surgery.flow.paths import CASTS, ancestors, behind_casts, parameters_behind, passes_on, works
from normkit.surgery.flow.record import LEAVES, Call, Flow, Node, Ref, Told

Kind = Literal["layer", "rms", "l2", "group", "instance", "batch"]

_ROOTS = {"rsqrt", "sqrt", "pow", "linalg_vector_norm", "norm", "std"}
_BATCH = {
    "native_batch_norm": (5, 7),
    "_native_batch_norm_legit": (5, 7),
    "_native_batch_norm_legit_no_training": (None, 6),
    "_batch_norm_with_update": (None, 6),
    "_batch_norm_no_update": (None, 6),
    "cudnn_batch_norm": (5, 7),
    "miopen_batch_norm": (5, 7),
}


@dataclass(frozen=True)
class Sighting:
    """One norm that ran.

    Args:
        kind: what the statistic covers, and whether the mean was taken out.
        eps: read from the operators; None where no number was seen.
        x: what was normalised.
        out: the node that wrote the result.
        size: elements per statistic.
        axes: normalised axes of ``x``, counted from its end, e.g. (-1,).
        nodes: everything between ``x`` and the result.
        call: the call it ran in.
        module: the name of the module whose whole work it is; None for a function call inside a larger forward.
        weights: names of the parameters and buffers that scaled or shifted the result.
    """

    kind: Kind
    eps: float | None
    x: Ref
    out: int
    size: int
    axes: tuple[int, ...]
    nodes: frozenset[int]
    call: int
    module: str | None = None
    weights: tuple[str, ...] = ()


def sightings(flow: Flow) -> list[Sighting]:
    """Return every norm of a recorded forward, in order.

    Example:
        >>> from torch import nn
        >>> from normkit.surgery.flow.record import record
        >>> flow = record(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6)), (torch.randn(2, 4),), {})
        >>> [(s.module, s.kind, s.eps, s.size) for s in sightings(flow)]
        [('1', 'rms', 1e-06, 4)]
    """
    ours = [core for told in flow.told if (core := _told(flow, told)) is not None]
    inside: set[int] = set().union(*(core.nodes for core in ours))
    others = (_core(flow, node) for node in flow.nodes if node.live and node.index not in inside)
    cores = sorted([*ours, *(core for core in others if core is not None)], key=lambda core: core.out)
    by_out = {core.out: core for core in cores}  # sqrt then reciprocal, say, may lead to one product twice
    return [_owned(flow, core, list(by_out.values())) for core in by_out.values()]


def _told(flow: Flow, told: Told) -> Sighting | None:
    """Return a norm of ours, whose formula is in pieces that no pattern of others has (it rescales extreme rows)."""
    if not flow.nodes[told.x.node].live:
        return None
    between = ancestors(flow, told.out, floor=told.x.node + 1)
    weights = {name for i in between for ref in flow.nodes[i].inputs for name in parameters_behind(flow, ref.node)}
    size = math.prod(told.x.shape[a] for a in told.axes)
    return Sighting(
        cast("Kind", told.kind), told.eps, told.x, told.out, size, told.axes, frozenset(between),
        flow.nodes[told.out].call, weights=tuple(sorted(weights)),
    )  # fmt: skip


def _core(flow: Flow, node: Node) -> Sighting | None:
    native = _native(flow, node)
    if native is not None:
        return native
    if node.op not in _ROOTS or (node.op == "pow" and _scalar(node, 1) not in (-0.5, 0.5)):
        return None
    return _written_out(flow, node)


def _native(flow: Flow, node: Node) -> Sighting | None:
    if node.op in ("native_layer_norm", "_fused_rms_norm"):
        x, shape = node.args[0], node.args[1]
        eps = node.args[4] if node.op == "native_layer_norm" else node.args[3]
        if eps is None:
            eps = torch.finfo(torch.float32 if x.dtype.itemsize < 8 else x.dtype).eps
        kind: Kind = "layer" if node.op == "native_layer_norm" else "rms"
        return _seen(flow, node, kind, eps, x, math.prod(shape), tuple(range(-len(shape), 0)))
    if node.op == "native_group_norm":
        x, groups = node.args[0], node.args[6]
        size = math.prod(x.shape[1:]) // groups
        return _seen(flow, node, "group", node.args[7], x, size, tuple(range(1 - len(x.shape), 0)))
    if node.op in _BATCH:
        x = node.args[0]
        axes = tuple(i - len(x.shape) for i in range(len(x.shape)) if i != 1)
        size = math.prod(x.shape) // x.shape[1]
        # instance_norm is a batch norm over one sample whose channels are all channels of all samples.
        alone = x.shape[0] == 1 and node.args[3] is None
        return _seen(flow, node, "instance" if alone else "batch", node.args[_BATCH[node.op][1]], x, size, axes)
    return None


def _seen(flow: Flow, node: Node, kind: Kind, eps: float, x: Ref, size: int, axes: tuple[int, ...]) -> Sighting | None:
    if not flow.nodes[x.node].live:
        return None
    weights = [ref for ref in node.inputs[1:] if flow.nodes[ref.node].op in ("parameter", "buffer")]
    names = tuple(flow.nodes[ref.node].name for ref in weights)
    return Sighting(
        kind, decimal(float(eps)), x, node.index, size, axes, frozenset({node.index}), node.call, weights=names
    )


def _written_out(flow: Flow, root: Node) -> Sighting | None:
    """Recognise x · 1/√(mean(x²) + ε) and its relatives around a root."""
    reduced = _reduction(flow, root)
    if reduced is None:
        return None
    reduction, eps, averaged = reduced
    squared = reduction.inputs[0]
    if reduction.op in ("var", "std", "var_mean", "linalg_vector_norm", "norm"):
        base, _ = _base(flow, squared.node)
    else:
        square = _square(flow, squared.node)
        if square is None:
            return None
        base, _ = _base(flow, square)
    found = _scaled_value(flow, root, base)
    if found is None:
        return None
    product, centred, later = found
    sums = reduction.op in ("sum", "linalg_vector_norm", "norm") and not averaged
    kind: Kind = "layer" if centred else "l2" if sums else "rms"
    out = _weighted(flow, product)
    between = ancestors(flow, out, floor=base + 1)
    read = {ref.node for i in between for ref in flow.nodes[i].inputs}
    weights = tuple(sorted({name for node in read for name in parameters_behind(flow, node)}))
    x = next(r for i in sorted(between) for r in flow.nodes[i].inputs if r.node == base)
    axes = _axes(reduction, len(squared.shape))
    size = math.prod(squared.shape[a] for a in axes)
    return Sighting(
        kind, eps if eps is not None else later, x, out, size, axes, frozenset(between), flow.nodes[product].call,
        weights=weights,
    )  # fmt: skip


def _reduction(flow: Flow, root: Node) -> tuple[Node, float | None, bool] | None:
    """Walk from a root back to the mean, sum or variance under it; return it, the ε met, and whether it was divided."""
    if root.op in ("linalg_vector_norm", "norm", "std"):
        return root, None, False
    node, eps, averaged = root, None, False
    for _ in range(6):
        live = flow.live_inputs(node)
        if len(live) != 1:
            return None
        node = flow.nodes[live[0].node]
        if node.op in ("mean", "sum", "var", "var_mean"):
            return node, eps, averaged
        if node.op in ("add", "clamp_min", "clamp", "maximum"):
            eps = _scalar(node, 1) if eps is None else eps
        elif node.op in ("div", "mul"):
            averaged = True
        elif node.op not in CASTS:
            return None
    return None


def _square(flow: Flow, index: int) -> int | None:
    """Return what was squared: pow(x, 2), x·x, square(x)."""
    node = flow.nodes[behind_casts(flow, index)]
    live = flow.live_inputs(node)
    if node.op == "pow" and _scalar(node, 1) == 2:
        return live[0].node
    if node.op == "square":
        return live[0].node
    if node.op == "mul" and len(live) == 2 and live[0].node == live[1].node:
        return live[0].node
    return None


def _base(flow: Flow, index: int) -> tuple[int, bool]:
    """Return the value behind casts and behind a subtracted mean, and whether there was one."""
    at = behind_casts(flow, index)
    node = flow.nodes[at]
    live = flow.live_inputs(node)
    if node.op == "sub" and len(live) == 2:
        first, mean = behind_casts(flow, live[0].node), flow.nodes[behind_casts(flow, live[1].node)]
        if mean.op in ("mean", "var_mean") and behind_casts(flow, mean.inputs[0].node) == first:
            return first, True
    return at, False


def _scaled_value(flow: Flow, root: Node, base: int) -> tuple[int, bool, float | None] | None:
    """Walk from a root on to where it scales the value it came from; return that product, centred?, ε met there."""
    waiting: list[tuple[int, float | None, int]] = [(root.index, None, 0)]
    while waiting:
        at, eps, depth = waiting.pop(0)
        for reader in flow.consumers(at):
            node = flow.nodes[reader]
            live = flow.live_inputs(node)
            if node.op in ("mul", "div") and len(live) == 2:
                other = live[0] if live[1].node == at else live[1]
                origin, centred = _base(flow, other.node)
                if origin == base:
                    return reader, centred, eps
            elif depth < 6 and len(live) == 1 and (node.op == "reciprocal" or passes_on(flow, node) is not None):
                met = _scalar(node, 1) if node.op in ("add", "clamp_min", "clamp") else None
                waiting.append((reader, met if met is not None else eps, depth + 1))
    return None


def _weighted(flow: Flow, product: int) -> int:
    """Follow a normalised value through its weight, its bias and the casts between, within the same call."""
    at = product
    while len(readers := flow.consumers(at)) == 1:
        node = flow.nodes[readers[0]]
        if node.call != flow.nodes[product].call or len(flow.live_inputs(node)) != 1:
            break
        weighs = node.op in ("mul", "add") and any(parameters_behind(flow, ref.node) for ref in node.inputs)
        if node.op not in CASTS and not weighs:
            break
        at = node.index
    return at


def _owned(flow: Flow, core: Sighting, cores: list[Sighting]) -> Sighting:
    """Give a norm to the module whose whole work it is, if there is one."""
    for call in flow.within(core.call):
        if not call.done or not call.outputs or call.parent < 0 or not _does_nothing_else(flow, call, cores):
            break
        inside = frozenset(range(call.first, call.last))
        x = _entering(flow, call, core)
        if x is None:
            break
        weights = {flow.nodes[r.node].name for i in inside for r in flow.nodes[i].inputs} - {""}
        return replace(
            core, module=call.name, call=call.index, x=x, out=call.outputs[0].node, nodes=inside,
            weights=tuple(sorted(weights | set(core.weights))),
        )  # fmt: skip
    return core


def _does_nothing_else(flow: Flow, call: Call, cores: list[Sighting]) -> bool:
    own = [core for core in cores if call.first <= core.out < call.last]
    return len(own) == 1 and not any(works(node) for node in flow.nodes[call.first : call.last])


def _entering(flow: Flow, call: Call, core: Sighting) -> Ref | None:
    """Return the value from outside that a module's norm was taken of."""
    ref = core.x
    while ref.node >= call.first and flow.nodes[ref.node].op not in LEAVES:
        live = flow.live_inputs(flow.nodes[ref.node])
        if not live:
            return None
        ref = live[0]
    return ref


def _axes(reduction: Node, rank: int) -> tuple[int, ...]:
    values = [v for v in reduction.args[1:] if isinstance(v, (list, tuple)) or (isinstance(v, int) and v < 0)]
    dims = next((v for v in values if isinstance(v, (list, tuple))), values[0] if values else None)
    if dims is None or dims == []:
        return tuple(range(-rank, 0))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted((d % rank) - rank for d in dims))


def _scalar(node: Node, position: int) -> float | None:
    value = node.args[position] if position < len(node.args) else None
    return decimal(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def decimal(value: float) -> float:
    """Return the number that was written down where it passed through float32 on its way, as ATen's RMS norm's ε does.

    Example:
        >>> decimal(9.999999974752427e-07), decimal(1e-5)
        (1e-06, 1e-05)
    """
    if not math.isfinite(value) or _float32(value) != value:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((s for s in shorter if _float32(s) == value), value)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3e38 else math.inf


def unique_modules(found: list[Sighting]) -> Iterator[tuple[str, list[Sighting]]]:
    """Yield each norm module's name with all its sightings, in the order in which they first ran."""
    table: dict[str, list[Sighting]] = {}
    for sighting in found:
        if sighting.module is not None:
            table.setdefault(sighting.module, []).append(sighting)
    yield from table.items()
