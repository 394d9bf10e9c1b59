"""Query and key norms on the wrong side of the rotation."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection
from normkit.surgery.flow.paths import works
from normkit.surgery.flow.record import LEAVES, Flow, Node
from normkit.surgery.flow.sightings import Sighting


def norm_after_rotation(seen: Inspection) -> Iterator[Finding]:
    """A query or key norm with a weight for every dimension that reads rotated values.

    A rotation turns pairs of dimensions by an angle that grows with the position, and scores of rotated vectors depend
    on the distance of two positions alone. A weight for every dimension, applied afterwards, stretches the two of a
    pair differently, and the score depends on where both positions are. Before the rotation the same weight does no
    harm; without a weight the order makes no difference.
    """
    if seen.flow is None:
        return
    turned = [
        s for s in seen.sightings
        if seen.positions.get(s.out) in ("query", "key") and _weighted(seen, s) and _rotated(seen.flow, s.x.node)
    ]  # fmt: skip
    names = dict.fromkeys(s.module if s.module is not None else seen.flow.calls[s.call].name for s in turned)
    if names:
        yield Finding(
            "warning", "norm-after-rotation", tuple(names),
            "a weight for every dimension scales queries or keys after their rotation",
            "attention no longer depends on distances alone as soon as the weights differ: positions beyond those "
            "trained on come out wrong",
            "norm first, then rotate (Qwen3, OLMo 2, Gemma 3 do), unless a checkpoint was trained this way",
        )  # fmt: skip


def _weighted(seen: Inspection, sighting: Sighting) -> bool:
    return any(seen.parameters[name].numel() > 1 for name in sighting.weights if name in seen.parameters)


def _rotated(flow: Flow, index: int) -> bool:
    """Return whether a value was rotated since its projection: x·cos + x′·sin, or one complex product."""
    waiting, seen = [index], set[int]()
    while waiting:
        node = flow.nodes[waiting.pop()]
        if node.index in seen or node.op in LEAVES or works(node) or not node.live:
            continue
        seen.add(node.index)
        live = flow.live_inputs(node)
        if node.op in ("add", "sub") and len(live) == 2 and all(_turning(flow, flow.nodes[r.node]) for r in live):
            return True
        if node.op == "mul" and node.out.dtype.is_complex:
            return True
        waiting += [ref.node for ref in live]
    return False


def _turning(flow: Flow, node: Node) -> bool:
    """Return whether a node multiplies a value by a table (cosines, sines) that is neither parameter nor number."""
    dead = [ref for ref in node.inputs if not flow.nodes[ref.node].live]
    return node.op == "mul" and len(dead) == 1 and len(dead[0].shape) > 0 and flow.nodes[dead[0].node].op != "parameter"
