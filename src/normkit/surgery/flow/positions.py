"""What each norm of a recorded forward is for."""

from __future__ import annotations

from typing import Literal

from normkit.surgery.flow.paths import PASSING, ancestors, passes_on
from normkit.surgery.flow.record import Flow, Node
from normkit.surgery.flow.sightings import Sighting
from normkit.surgery.flow.stream import Stream

Position = Literal[
    "branch input",
    "branch output",
    "on the sum",
    "final",
    "embedding",
    "query",
    "key",
    "value",
    "inside",
    "head",
    "elsewhere",
]

# What rotary embeddings and head layouts do between a query or key norm and its attention.
_ROTATING = PASSING | {"cat", "stack", "index", "repeat_interleave", "expand", "view_as_complex", "view_as_real"}
_OPERANDS: tuple[Literal["query"], Literal["key"], Literal["value"]] = ("query", "key", "value")
_REACH = 600  # operators looked at after a norm


def positions(flow: Flow, found: list[Sighting], stream_list: list[Stream]) -> dict[int, Position]:
    """Return what each sighting, by the node of its result, is for.

    Example:
        >>> import torch, normkit as nk
        >>> from torch import nn
        >>> from normkit.surgery.flow.record import record
        >>> from normkit.surgery.flow.sightings import sightings
        >>> from normkit.surgery.flow.stream import streams
        >>> flow = record(
        ...     nn.Sequential(nk.PreNorm(8, nn.Linear(8, 8), norm=nn.LayerNorm), nn.RMSNorm(8)),
        ...     (torch.randn(2, 8),),
        ...     {},
        ... )
        >>> seen = sightings(flow)
        >>> list(positions(flow, seen, streams(flow, seen)).values())
        ['branch input', 'final']
    """
    result: dict[int, Position] = {}
    inside: set[int] = set()
    for stream in stream_list:
        for join in stream.joins:
            inside |= join.path
            groups: tuple[tuple[Position, list[Sighting]], ...] = (
                ("branch input", join.before),
                ("branch output", join.branch),
                ("on the sum", join.after),
            )
            for position, norms in groups:
                result.update((s.out, position) for s in norms)
        if stream.final is not None:
            result.setdefault(stream.final.out, "final")
    starts = {above for stream in stream_list for above in ancestors(flow, stream.joins[0].stream)}
    ends = {stream.joins[-1].node for stream in stream_list}
    for sighting in found:
        if sighting.out in result:
            continue
        role = attention_role(flow, sighting)
        if role is not None:
            result[sighting.out] = role[0]
        elif sighting.out in inside:
            result[sighting.out] = "inside"
        elif sighting.out in starts:
            result[sighting.out] = "embedding"
        else:
            result[sighting.out] = "head" if ends & ancestors(flow, sighting.x.node) else "elsewhere"
    return result


def attention_role(flow: Flow, sighting: Sighting) -> tuple[Literal["query", "key", "value"], Node] | None:
    """Return which operand of which attention a norm feeds, rotations and layouts between; None if it feeds none."""
    reached = {sighting.out}
    for node in flow.nodes[sighting.out + 1 : sighting.out + _REACH]:
        live = flow.live_inputs(node)
        mine = [i for i, ref in enumerate(live) if ref.node in reached]
        if not mine:
            continue
        if "attention" in node.op:
            return _OPERANDS[min(mine[0], 2)], node
        if node.op in ("bmm", "baddbmm") and len(live) >= 2:
            operands = live[-2:]
            first = operands[0].node in reached
            if _scores(flow, node):
                return ("query" if first else "key"), node
            if not first and _is_probability(flow, operands[0].node):
                return "value", node
        elif node.op in _ROTATING and len(mine) == len(live):
            reached.add(node.index)
    return None


def _scores(flow: Flow, product: Node) -> bool:
    """Return whether a softmax reads this product, scales and masks between."""
    waiting, seen = [product.index], set[int]()
    while waiting:
        for reader in flow.consumers(waiting.pop()):
            node = flow.nodes[reader]
            if "softmax" in node.op:
                return True
            if reader not in seen and (passes_on(flow, node) is not None or node.op in ("add", "tanh", "where")):
                seen.add(reader)
                waiting.append(reader)
        if len(seen) > 30:
            return False
    return False


def _is_probability(flow: Flow, index: int) -> bool:
    node = flow.nodes[index]
    while (source := passes_on(flow, node)) is not None:
        node = flow.nodes[source.node]
    return "softmax" in node.op
