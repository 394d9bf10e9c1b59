"""Where numbers stopped being finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection
from normkit.surgery.flow.paths import ancestors
from normkit.surgery.flow.record import Flow, Node, Ref


def first_not_finite(seen: Inspection) -> Iterator[Finding]:
    """Name the operator whose inputs were finite and whose result was not, when that reached a norm or the output."""
    if seen.flow is None:
        return
    reached = _reached(seen)
    if reached is None:
        return
    where_to, above = reached
    culprit = next((node for node in seen.flow.nodes if node.index in above and _broke(seen, node)), None)
    if culprit is None:
        return
    where = seen.flow.where(culprit)
    dtype = str(culprit.out.dtype).removeprefix("torch.")
    inside = next((s for s in seen.sightings if culprit.index in s.nodes), None)
    if inside is not None:
        consequence = "the norm squares in this dtype: rows of large values come out as 0 or NaN"
        remedy = "take the statistic in float32 (normkit.RMSNorm does), or rescale the row"
    else:
        consequence = f"reaches {where_to}; a norm is where it shows, not where it starts"
        remedy = f"run {where or 'this operator'} in bfloat16 or float32, or clamp its output"
    yield Finding(
        "danger", "not-finite", (where,),
        f"{culprit.op} is the first operator with a result that is not finite ({dtype})",
        consequence, remedy,
    )  # fmt: skip


def _reached(seen: Inspection) -> tuple[str, set[int]] | None:
    """Return what a value that is not finite reached, and the nodes above it."""
    flow = seen.flow
    assert flow is not None
    for sighting in seen.sightings:
        nodes = [flow.nodes[i] for i in (sighting.x.node, *sorted(sighting.nodes))]
        spoilt = next((n for n in nodes if n.finite is False), None)
        if spoilt is not None:
            return sighting.module or flow.calls[sighting.call].name, ancestors(flow, spoilt.index)
    for ref in flow.outputs:
        if flow.nodes[ref.node].finite is False:
            return "the model's output", ancestors(flow, ref.node)
    return None


def _broke(seen: Inspection, node: Node) -> bool:
    """Return whether finite values went in and others came out; -inf that a mask puts in is meant."""
    if node.finite is not False or any(_infinite(value) for value in node.args):
        return False
    return all(_was_finite(seen, ref) for ref in node.inputs)


def _was_finite(seen: Inspection, ref: Ref) -> bool:
    flow = seen.flow
    assert flow is not None
    source = flow.nodes[ref.node]
    if source.op == "parameter":
        value = seen.value(source.name)
        return value is None or bool(value.isfinite().all())
    return _dead_and_finite(flow, source) if not source.live else source.finite is not False


def _dead_and_finite(flow: Flow, node: Node) -> bool:
    """Return whether a value made without the input is free of infinities that were written into it."""
    return not any(_infinite(value) for value in node.args) and all(
        _dead_and_finite(flow, flow.nodes[ref.node]) for ref in node.inputs if ref.node < node.index
    )


def _infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
