"""The residual stream as the data really flows: where branches join it, and where the norms sit around each join.

A join is an addition s + F(s): one operand is what the other was computed from, and work (a weight, an attention) was
done on the way. Joins whose stream operand leads back to one another, through norms too, are one stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from normkit.placement import WIRINGS, Wiring
from normkit.surgery.flow.paths import ancestors, passes_on, readers, works
from normkit.surgery.flow.record import Flow, Node
from normkit.surgery.flow.sightings import Sighting

_ADDS = frozenset({"add", "addcmul", "lerp"})


@dataclass
class Join:
    """One place where a branch joins the stream.

    Args:
        node: the addition.
        stream: the node whose value the stream carries into it.
        branches: the other operands; several where sublayers run in parallel.
        path: the nodes between the stream and the branches' ends.
        before, branch, after: norms on the branch's input, on its output, on the sum.
        unnormed: some of the branch reads the stream without a norm although some of it has one.
        scaled: the stream was multiplied by a number other than 1 on its way in.
        parallel: several sublayers, one of them attending, read the same stream.
        where: name of the module that adds.
    """

    node: int
    stream: int
    branches: list[int]
    path: frozenset[int]
    where: str = ""
    before: list[Sighting] = field(default_factory=list[Sighting])
    branch: list[Sighting] = field(default_factory=list[Sighting])
    after: list[Sighting] = field(default_factory=list[Sighting])
    unnormed: bool = False
    scaled: bool = False
    parallel: bool = False

    @property
    def shape(self) -> tuple[bool, bool, bool, bool, bool]:
        """What a row of `normkit.WIRINGS` says about norms: before, branch, after, parallel, scaled."""
        before, branch, after = bool(self.before), bool(self.branch), bool(self.after)
        return before, branch, after, self.parallel and not branch and not after, self.scaled and after

    @property
    def wiring(self) -> str | None:
        """The name of this wiring in `normkit.WIRINGS`; None if the table has no such row."""
        for row in WIRINGS.values():
            if (row.before, row.branch, row.after, row.parallel, row.scaled_residual) == self.shape:
                return row.name
        return None

    @property
    def formula(self) -> str:
        """The update in one line."""
        before, branch, after, parallel, scaled = self.shape
        row = Wiring("", "", False, "", "", before, branch, after, parallel, scaled)
        return row.formula


@dataclass
class Stream:
    """Joins that follow one another, in order."""

    joins: list[Join]
    where: str
    final: Sighting | None = None

    @property
    def commonest(self) -> Join:
        """A join of the kind that occurs most; among equals the one with more norms, then the earliest."""
        counts = Counter(join.shape for join in self.joins)
        return max(self.joins, key=lambda join: (counts[join.shape], sum(join.shape[:3])))

    @property
    def wiring(self) -> str | None:
        """The wiring that most joins follow."""
        return self.commonest.wiring


def streams(flow: Flow, found: list[Sighting]) -> list[Stream]:
    """Return the residual streams of a recorded forward, the longest first; those inside a branch are left out.

    Example:
        >>> import torch, normkit as nk
        >>> from torch import nn
        >>> from normkit.surgery.flow.record import record
        >>> from normkit.surgery.flow.sightings import sightings
        >>> block = lambda: nk.PreNorm(8, nn.Linear(8, 8), norm=nn.LayerNorm)
        >>> flow = record(nn.Sequential(block(), block()), (torch.randn(2, 8),), {})
        >>> [s.wiring for s in streams(flow, sightings(flow))]
        ['pre']
    """
    norms = _Norms(found)
    joins = _joins(flow, norms)
    before_it = {join.node: _previous(flow, join, joins, norms) for join in joins.values()}
    chains: dict[int, list[Join]] = {}
    heads: dict[int, int] = {}
    for node in sorted(joins):
        previous = before_it[node]
        heads[node] = heads[previous] if previous is not None else node
        chains.setdefault(heads[node], []).append(joins[node])
    kept: list[Stream] = []
    for chain in sorted(chains.values(), key=len, reverse=True):
        if any(chain[0].node in join.path for stream in kept for join in stream.joins):
            continue  # a skip inside a sublayer
        held = {join.node for stream in kept for join in stream.joins}
        if len(chain) == 1 and held & chain[0].path:
            continue  # a skip over a whole stack
        joined = _outermost(chain)
        _place(flow, joined, norms)
        kept.append(Stream(joined, _common([join.where for join in joined]), _final(flow, joined[-1], norms)))
    return kept


def _outermost(chain: list[Join]) -> list[Join]:
    """Leave out additions over several joins that follow one another, then skips inside another join's branch."""
    nodes = {join.node for join in chain}
    links = {(join.stream, join.node) for join in chain if join.stream in nodes}
    single = [join for join in chain if not any(a in join.path and b in join.path for a, b in links)]
    return [join for join in single if not any(join.node in other.path for other in single)]


class _Norms:
    """Where the norms are among the nodes."""

    def __init__(self, found: list[Sighting]) -> None:
        self.out = {s.out: s for s in found}
        self.at = {node: s for s in found for node in s.nodes}


def _joins(flow: Flow, norms: _Norms) -> dict[int, Join]:
    joins: dict[int, Join] = {}
    for node in flow.nodes:
        if node.op not in _ADDS or node.index in norms.at:
            continue
        live = flow.live_inputs(node)
        if len(live) != 2 or live[0].node == live[1].node:
            continue
        for stream, branch in ((live[0], live[1]), (live[1], live[0])):
            if node.out.shape not in (stream.shape, branch.shape) or stream.shape[-1:] != branch.shape[-1:]:
                continue
            join = _joined(flow, node, stream.node, branch.node, joins, norms)
            if join is not None:
                joins[node.index] = join
                break
    return joins


def _joined(flow: Flow, node: Node, stream: int, branch: int, joins: dict[int, Join], norms: _Norms) -> Join | None:
    source, scaled = _origin(flow, stream, norms)
    path = _between(flow, source, branch)
    earlier: list[int] = []
    if not path and source in joins:  # x + attention + mlp, added one after the other
        first = joins[source]
        path = _between(flow, first.stream, branch)
        if not path or not _same_place(flow, node, flow.nodes[source]):
            return None
        path, earlier, source, scaled = path | first.path, first.branches, first.stream, first.scaled
        if not _parallel(flow, source, [*earlier, branch]):
            return None
        del joins[first.node]
    if not path:
        return None
    branches = earlier + _summands(flow, node, branch, source, norms)
    join = Join(node.index, source, branches, path, where=flow.where(node), scaled=scaled)
    join.parallel = len(branches) > 1 and _parallel(flow, source, branches)
    return join


def _origin(flow: Flow, index: int, norms: _Norms) -> tuple[int, bool]:
    """Walk back to what made the stream's value; say whether a number scaled it on the way."""
    scaled = False
    while index not in norms.out and (source := passes_on(flow, flow.nodes[index])) is not None:
        node = flow.nodes[index]
        factor = next((a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)), 1)
        scaled |= node.op in ("mul", "div") and factor != 1
        index = source.node
    return index, scaled


def _between(flow: Flow, source: int, end: int) -> frozenset[int]:
    """Return the nodes from ``source`` (excluded) to ``end``; empty unless work is done on a way between them."""
    above = ancestors(flow, end, floor=source)
    if source not in above:
        return frozenset()
    reached = {source}
    for index in sorted(above):
        if any(ref.node in reached for ref in flow.nodes[index].inputs):
            reached.add(index)
    path = frozenset(reached - {source})
    return path if any(works(flow.nodes[i]) for i in path) else frozenset()


def _summands(flow: Flow, add: Node, branch: int, source: int, norms: _Norms) -> list[int]:
    """Split a branch into the sublayers whose outputs were added in the same place as the join itself."""
    end, _ = _origin(flow, branch, norms)
    node = flow.nodes[end]
    live = flow.live_inputs(node)
    if node.op in _ADDS and len(live) == 2 and end not in norms.at and _same_place(flow, add, node):
        parts = [ref.node for ref in live]
        if all(_between(flow, source, part) for part in parts) and _parallel(flow, source, parts):
            return parts
    return [branch]


def _same_place(flow: Flow, a: Node, b: Node) -> bool:
    """Return whether two operators ran in one module's own forward."""
    return a.call == b.call


def _parallel(flow: Flow, source: int, branches: Iterable[int]) -> bool:
    """Return whether one of the branches attends: experts that are summed are not parallel sublayers."""
    return any(_mixes(flow, flow.nodes[i]) for end in branches for i in _between(flow, source, end))


def _mixes(flow: Flow, node: Node) -> bool:
    if "attention" in node.op or node.op in ("convolution", "mkldnn_convolution", "cumsum"):
        return True
    return node.op in ("bmm", "baddbmm") and len(flow.live_inputs(node)) >= 2


def _previous(flow: Flow, join: Join, joins: dict[int, Join], norms: _Norms) -> int | None:
    """Return the join whose sum this one's stream is, directly or through a norm."""
    if join.stream in joins:
        return join.stream
    norm = norms.out.get(join.stream)
    if norm is None:
        return None
    source, _ = _origin(flow, norm.x.node, norms)
    return source if source in joins else None


def _place(flow: Flow, chain: list[Join], norms: _Norms) -> None:
    """Find the norms on each join's branch input, branch output and sum."""
    for join in chain:
        entries = [norms.at.get(r) for r in readers(flow, join.stream) if r in join.path]
        join.before = _distinct(s for s in entries if s is not None and s.out != join.stream)
        join.unnormed = bool(join.before) and any(s is None for s in entries)
        ends = [_origin(flow, end, norms)[0] for end in join.branches]
        closing_them = [norms.out[end] for end in ends if end in norms.out]
        join.branch = _distinct(s for s in closing_them if s not in join.before)
    for join, following in pairwise(chain):
        norm = norms.out.get(following.stream)
        if norm is not None and _origin(flow, norm.x.node, norms)[0] == join.node:
            join.after = [norm]
    last = chain[-1]
    closing = _closing(flow, last, norms)
    others = chain[:-1]
    normed = bool(last.before or last.branch) or any(node in norms.at for node in last.path)
    post = 2 * sum(bool(join.after) for join in others) > len(others) if others else not normed
    if closing is not None and post:
        last.after = [closing]


def _closing(flow: Flow, last: Join, norms: _Norms) -> Sighting | None:
    """Return the one norm that reads the last sum, if nothing else does."""
    reading = [norms.at.get(r) for r in readers(flow, last.node)]
    found = _distinct(s for s in reading if s is not None)
    return found[0] if len(found) == 1 and all(s is not None for s in reading) else None


def _final(flow: Flow, last: Join, norms: _Norms) -> Sighting | None:
    end = last.after[0].out if last.after else last.node
    reading = _distinct(norms.at[r] for r in readers(flow, end) if r in norms.at)
    return reading[0] if reading else None


def _distinct(found: Iterable[Sighting]) -> list[Sighting]:
    return list({s.out: s for s in found}.values())


def _common(names: list[str]) -> str:
    """Return the longest dotted prefix that all names share."""
    parts = [name.split(".") for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
