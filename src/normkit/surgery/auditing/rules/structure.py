"""What is normalised over, and what stands next to what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection, role_of
from normkit.surgery.flow.paths import CASTS, passes_on, readers
from normkit.surgery.flow.positions import attention_role
from normkit.surgery.flow.record import Flow, Node, Ref
from normkit.surgery.flow.sightings import Sighting
from normkit.surgery.flow.stream import Join

_ON_STREAM = {"branch input", "branch output", "on the sum", "final"}


def wrong_axis(seen: Inspection) -> Iterator[Finding]:
    """Row norms on a stream whose statistic is not over the channels that a linear layer then contracts."""
    if seen.flow is None:
        return
    verdicts: dict[tuple[int, int], list[tuple[str, bool, int]]] = defaultdict(list)
    for sighting in seen.sightings:
        if sighting.kind not in ("layer", "rms", "l2") or seen.positions.get(sighting.out) not in _ON_STREAM:
            continue
        for size, right in _contractions(seen.flow, sighting):
            verdicts[sighting.size, len(sighting.axes)].append((_name(seen.flow, sighting), right, size))
    for (size, axes), entries in verdicts.items():
        if any(right for _, right, _ in entries):
            continue  # a mixer's norm feeds a product over tokens too; somewhere else it feeds one over channels
        channels = Counter(channel for _, _, channel in entries).most_common(1)[0][0]
        over = f"{axes} axes ({size} values)" if axes > 1 else f"an axis of size {size}"
        yield Finding(
            "danger", "wrong-axis", _names(entries),
            f"normalises over {over}; the layers that read it have {channels} channels",
            "positions are mixed into each other's statistics: padding and, in a causal model, the future leak in",
            f"normalise over the {channels} channels: check the transpose before the norm and its normalized_shape",
        )  # fmt: skip


def _contractions(flow: Flow, sighting: Sighting) -> Iterator[tuple[int, bool]]:
    """For each weight that multiplies a norm's result: the channels it contracts, and whether they are the norm's.

    An axis is known by its stride: views keep it, and a copy says which axis it became.
    """
    out = flow.nodes[sighting.out].outputs[0]
    if not out.stride or max(-a for a in sighting.axes) > len(out.shape):
        return
    waiting = [(sighting.out, out.stride[sighting.axes[-1]])]
    while waiting:
        at, stride = waiting.pop()
        for consumer in flow.consumers(at):
            node = flow.nodes[consumer]
            ref = _multiplied(flow, node, at)
            if ref is not None and ref.stride:
                # Flattened, a whole normalised axis and more are contracted.
                yield ref.shape[-1], ref.stride[-1] == stride and ref.shape[-1] % sighting.size == 0
            elif node.op in CASTS and len(node.inputs) == 1 and node.inputs[0].shape == node.out.shape:
                copied = zip(node.inputs[0].stride, node.out.stride, strict=False)
                waiting += [(consumer, new) for old, new in copied if old == stride][:1]


def _multiplied(flow: Flow, node: Node, source: int) -> Ref | None:
    if node.op not in ("mm", "addmm", "bmm") or len(flow.live_inputs(node)) != 1:
        return None
    operand = node.args[1 if node.op == "addmm" else 0]
    return operand if isinstance(operand, Ref) and operand.node == source else None


def two_in_a_row(seen: Inspection) -> Iterator[Finding]:
    """A norm whose result nothing reads but another norm."""
    if seen.flow is None or seen.flow.error is not None:
        return
    by_node = {node: s for s in seen.sightings for node in s.nodes}
    for first in seen.sightings:
        following = [by_node.get(r) for r in readers(seen.flow, first.out)]
        seconds = {s.out: s for s in following if s is not None}
        if not following or None in following or len(seconds) != 1:
            continue
        second = next(iter(seconds.values()))
        if second.size != first.size or second.out == first.out or _behind(seen.flow, second.x.node) != first.out:
            continue
        yield Finding(
            "warning", "two-in-a-row", (_name(seen.flow, first), _name(seen.flow, second)),
            "two norms in a row: nothing but the second reads the first",
            "the second takes the first's scale out again; in a post-norm stack this is a final norm too many",
            "drop one of them, unless a checkpoint was trained with both",
        )  # fmt: skip


def _behind(flow: Flow, index: int) -> int:
    while (source := passes_on(flow, flow.nodes[index])) is not None and not flow.nodes[index].name:
        if flow.nodes[index].op in ("mul", "add", "div"):
            break
        index = source.node
    return index


def query_key(seen: Inspection) -> Iterator[Finding]:
    """Query and key norms of one attention that do not match."""
    if seen.flow is None:
        return
    pairs: dict[int, dict[str, Sighting]] = defaultdict(dict)
    for sighting in seen.sightings:
        if seen.positions.get(sighting.out) in ("query", "key"):
            role = attention_role(seen.flow, sighting)
            assert role is not None
            pairs[role[1].index].setdefault(role[0], sighting)
    for attention, sides in pairs.items():
        where = tuple(_name(seen.flow, s) for s in sides.values())
        if len(sides) == 1:
            side = next(iter(sides))
            other = "key" if side == "query" else "query"
            yield Finding(
                "warning", "query-key", where, f"the {side} is normalised, the {other} is not",
                f"logits still grow with the {other}'s size, which is what QK-norm is for",
                f"normalise the {other} too, unless the family leaves it out",
            )  # fmt: skip
            continue
        query, key = sides["query"], sides["key"]
        head = seen.flow.nodes[attention].inputs[0].shape[-1]
        per_head = len(query.x.shape), len(key.x.shape)  # with one key head the whole width is a head's: tell by layout
        if query.size != key.size and head in (query.size, key.size) and per_head[0] != per_head[1]:
            yield Finding(
                "danger", "query-key", where, f"the query's norm covers {query.size} values, the key's {key.size}",
                "one has its scale taken out per head, the other over all heads: logits depend on the head's size",
                "use one width for both: the head's, or each projection's whole width",
            )  # fmt: skip
        elif query.kind != key.kind:
            yield Finding(
                "danger", "query-key", where, f"the query's norm is a {query.kind} norm, the key's a {key.kind} norm",
                "the mean is taken out on one side only", "use the same norm for both",
            )  # fmt: skip
        elif query.eps != key.eps:
            yield Finding(
                "warning", "query-key", where, f"ε is {query.eps:g} for the query and {key.eps:g} for the key",
                "small queries and keys come out at different scales", "use the same ε for both",
            )  # fmt: skip


def odd_one_out(seen: Inspection) -> Iterator[Finding]:
    """A layer whose sublayer joins the stream in another way than its kind does elsewhere."""
    for stream in seen.streams:
        kinds: dict[tuple[str, object, int], list[Join]] = defaultdict(list)
        counted: Counter[str] = Counter()
        for join in stream.joins:
            kinds[role_of(join.where), type(seen.modules.get(join.where)), counted[join.where]].append(join)
            counted[join.where] += 1
        for joins in kinds.values():
            counts = Counter(join.shape for join in joins)
            usual, often = counts.most_common(1)[0]
            if len(counts) == 1 or 2 * often <= len(joins):
                continue
            example = next(join for join in joins if join.shape == usual)
            for join in (j for j in joins if j.shape != usual):
                start_is_normed = join is stream.joins[0] and join.shape[1:] == usual[1:]
                yield Finding(
                    "info" if start_is_normed else "warning", "odd-one-out", (join.where,),
                    f"{join.formula}, where {often} others of its kind do {example.formula}",
                    "the stream enters normalised already" if start_is_normed
                    else "this layer's residual is taken at another place than its neighbours'",
                    "nothing, if it is meant" if start_is_normed
                    else "compare where this layer takes its residual and calls its norms",
                )  # fmt: skip


def no_final_norm(seen: Inspection) -> Iterator[Finding]:
    """A stream that grows with depth and leaves its stack as it is."""
    if seen.flow is None or seen.flow.error is not None:
        return
    pieces = Counter(role_of(stream.where) for stream in seen.streams)
    for stream in seen.streams:
        if pieces[role_of(stream.where)] > 1:
            continue  # one stack in several pieces: something else mixes the stream between them
        grows = len(stream.joins) > 1 and not stream.joins[-1].after
        if grows and stream.final is None and any(join.before or join.branch for join in stream.joins):
            yield Finding(
                "warning", "no-final-norm", (stream.where or type(seen.model).__name__,),
                f"{stream.commonest.formula}: the stream leaves the stack without a norm",
                "its size grows with depth, and whatever reads it sees another scale for every depth",
                "put a norm between the last layer and the head, unless this is a part that another stack continues",
            )  # fmt: skip


def _name(flow: Flow, sighting: Sighting) -> str:
    return sighting.module if sighting.module is not None else flow.calls[sighting.call].name


def _names(entries: list[tuple[str, bool, int]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _, _ in entries))
