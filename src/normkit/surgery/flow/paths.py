"""Walking through a recorded forward: which operators pass a value on, and where a value comes from."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.surgery.flow.record import Flow, Node, Ref

# Operators that hand one live value on, scaled, shifted, cast, masked or moved, but mix no channels and no positions.
PASSING = frozenset(
    {
        "mul", "div", "add", "sub", "rsub", "neg", "_to_copy", "clone", "copy", "clamp", "clamp_min", "clamp_max",
        "where", "masked_fill", "native_dropout", "constant_pad_nd", "roll", "_unsafe_view", "slice_scatter",
        "index_select", "repeat", "expand_copy", "nan_to_num", "addcmul",
    }
)  # fmt: skip
CASTS = frozenset({"_to_copy", "clone", "_unsafe_view", "copy"})
# Operators in which a sublayer does its work: a weight, or other positions, meet the value.
WORKING = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_softmax", "embedding", "linear", "mkldnn_linear",
        "_scaled_mm", "_int_mm", "_grouped_mm", "_convert_weight_to_int4pack", "cumsum", "addmv", "mv", "dot",
        "index_add", "scatter_add", "addbmm", "mkldnn_convolution", "_trilinear", "_embedding_bag", "avg_pool2d",
        "fft_r2c", "_fft_r2c", "_weight_int8pack_mm", "_weight_int4pack_mm", "lstm", "gru",
    }
)  # fmt: skip


def works(node: Node) -> bool:
    """Return whether a sublayer's work happens in this operator."""
    return node.op in WORKING or "attention" in node.op or node.op.startswith(("_thnn", "_cudnn_rnn"))


def passes_on(flow: Flow, node: Node) -> Ref | None:
    """Return the one live value that this operator hands on, or None."""
    if node.op not in PASSING:
        return None
    live = flow.live_inputs(node)
    return live[0] if len(live) == 1 else None


def behind_casts(flow: Flow, index: int) -> int:
    """Return the node behind casts and copies."""
    node = flow.nodes[index]
    while node.op in CASTS and len(live := flow.live_inputs(node)) == 1:
        node = flow.nodes[live[0].node]
    return node.index


def upstream(flow: Flow, index: int) -> Iterator[int]:
    """Yield a node and those it hands a value on from, as far as one value is handed on."""
    yield index
    while (source := passes_on(flow, flow.nodes[index])) is not None:
        index = source.node
        yield index


def readers(flow: Flow, index: int) -> Iterator[int]:
    """Yield the operators that do something with a value, looking through those that hand it on."""
    seen: set[int] = set()
    waiting = [index]
    while waiting:
        for consumer in flow.consumers(waiting.pop()):
            if consumer in seen:
                continue
            seen.add(consumer)
            if passes_on(flow, flow.nodes[consumer]) is None:
                yield consumer
            else:
                waiting.append(consumer)


def parameters_behind(flow: Flow, index: int, depth: int = 6) -> set[str]:
    """Return the names of the parameters and buffers that a dead value (one without input) was made from."""
    found: set[str] = set()
    waiting = [(index, depth)]
    while waiting:
        at, left = waiting.pop()
        node = flow.nodes[at]
        if node.op in ("parameter", "buffer"):
            found.add(node.name)
        elif left and not node.live:
            waiting += [(ref.node, left - 1) for ref in node.inputs]
    return found


def ancestors(flow: Flow, index: int, floor: int = 0) -> set[int]:
    """Return the live nodes that a node depends on, itself included, down to ``floor``."""
    found: set[int] = set()
    waiting = [index]
    while waiting:
        at = waiting.pop()
        if at in found or at < floor or not flow.nodes[at].live:
            continue
        found.add(at)
        waiting += [ref.node for ref in flow.nodes[at].inputs]
    return found
