"""An audit for people (a tree or a table, through rich) and for programs (plain data)."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from normkit.surgery.auditing.finding import SEVERITIES, Finding
from normkit.surgery.auditing.norm import Norm, role_of
from normkit.surgery.auditing.outline import Branch, details, outline, short, title
from normkit.surgery.flow.stream import Join, Stream

_MARK = {"danger": ("✖", "bold red"), "warning": ("▲", "yellow"), "info": ("·", "cyan")}
_NAMES_SHOWN = 4


class Audited(Protocol):
    """What a report reads of a `normkit.Audit`."""

    @property
    def model(self) -> str:
        """The model's class."""
        ...

    @property
    def norms(self) -> Sequence[Norm]:
        """Every norm."""
        ...

    @property
    def streams(self) -> Sequence[Stream]:
        """The residual streams."""
        ...

    @property
    def findings(self) -> Sequence[Finding]:
        """What is wrong."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was not looked at."""
        ...

    @property
    def dangerous(self) -> bool:
        """Whether any finding is a danger."""
        ...


def text(audit: Audited, width: int = 100, color: bool = False) -> str:
    """Return the report as text of at most ``width`` columns."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None,
        legacy_windows=False,
    )  # fmt: skip
    console.print(report(audit))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def report(audit: Audited, as_table: bool = False) -> RenderableType:
    """Return the whole report for a rich console: headline, wiring, norms, notes, findings last, where the eye is."""
    parts: list[RenderableType] = [_headline(audit), Text()]
    if audit.streams:
        parts += [*_wirings(audit), Text()]
    if audit.norms:
        parts += [_table(audit) if as_table else _tree(audit), Text()]
    for note in audit.notes:
        parts.append(_hanging(Text("note  ", "magenta"), Text(note)))
    if audit.notes:
        parts.append(Text())
    for finding in audit.findings:
        parts += [_finding(finding), Text()]
    parts.append(_verdict(audit))
    return Group(*parts)


def _headline(audit: Audited) -> Text:
    functions = sum(norm.function for norm in audit.norms)
    line = Text.assemble((audit.model, "bold"), f"  {len(audit.norms)} norm{'s' if len(audit.norms) != 1 else ''}")
    if functions:
        line.append(f", {functions} of them function calls")
    return line


def _wirings(audit: Audited) -> Iterator[RenderableType]:
    """Draw streams of one kind and place once."""
    alike: dict[tuple[object, ...], list[Stream]] = {}
    for stream in audit.streams:
        formulas = tuple(sorted(Counter(join.formula for join in stream.joins).items()))
        alike.setdefault((role_of(stream.where), formulas), []).append(stream)
    for (where, _), streams in alike.items():
        yield _wiring(streams[0], str(where) if len(streams) > 1 else streams[0].where, len(streams))


def _wiring(stream: Stream, place: str, times: int) -> RenderableType:
    common = stream.commonest
    name = stream.wiring or "no named wiring"
    rest = Counter(join.formula for join in stream.joins if join.shape != common.shape)
    alike = sum(join.shape == common.shape for join in stream.joins)
    line = Text.assemble((name, "bold green" if stream.wiring else "bold yellow"), f"  {common.formula}  ×{alike}")
    for formula, count in rest.items():
        line.append(f",  {formula}  ×{count}")
    if stream.final is not None:
        line.append("; final norm after it")
    where = f"in {place}" if place else "in the model itself"
    where += f", {times} streams alike" if times > 1 else ""
    return _hanging(Text("wiring  ", "magenta"), Text.assemble(line, "  ", (where, "dim")))


def _tree(audit: Audited) -> Tree:
    tree = Tree(Text(audit.model, "bold"), guide_style="dim")
    top = outline(audit.norms, _marks(audit))
    for norm in top.norms:
        tree.add(_Line("", norm, top.mark))
    _grow(tree, top)
    return tree


def _marks(audit: Audited) -> dict[str, str]:
    """Return the gravest severity, above a remark, of the findings that name a norm."""
    marks: dict[str, str] = {}
    for finding in audit.findings:
        if finding.severity != "info":
            for name in finding.where:
                marks.setdefault(name, finding.severity)
    return marks


def _grow(tree: Tree, branch: Branch) -> None:
    for below in branch.below.values():
        label = below.label
        at, part = tree, below
        while not part.norms and len(part.below) == 1:  # model.layers.0–31 on one line
            part = next(iter(part.below.values()))
            label = f"{label}.{part.label}"
        whole = [norm for norm in part.norms if not norm.function or not part.below]
        if whole:
            for norm in part.norms:
                at = tree.add(_Line(label, norm, part.mark))
        else:
            at = tree.add(Text(label))
            for norm in part.norms:
                at.add(_Line("", norm, part.mark))
        _grow(at, part)


@dataclass(frozen=True)
class _Line:
    """A name and what stands there: side by side where there is room, one under the other where there is not."""

    label: str
    norm: Norm
    mark: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        said = Text(title(self.norm), "green" if self.norm.spec is not None else "yellow")
        if self.norm.function:
            said.append(" as a function call", "yellow")
        said.append("  " + " · ".join(details(self.norm)), "dim")
        if self.mark:
            sign, style = _MARK[self.mark]
            said = Text.assemble((f"{sign} ", style), said)
        if options.max_width - len(self.label) >= 40 or not self.label:
            yield _hanging(Text(self.label + "  " if self.label else ""), said)
        else:
            yield Group(Text(self.label), Padding(said, (0, 0, 0, 2)))


def _table(audit: Audited) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for heading, right in (("norm", False), ("computes", False), ("width", True), ("ε", True), ("dtype", False)):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    table.add_column("runs", justify="right")
    table.add_column("place", overflow="fold")
    for norm in audit.norms:
        table.add_row(
            norm.name + ("()" if norm.function else ""), title(norm), "" if norm.width is None else str(norm.width),
            "" if norm.eps is None else f"{norm.eps:.6g}",
            "" if norm.weight_dtype is None else short(norm.weight_dtype),
            "" if norm.calls is None else str(norm.calls), " / ".join(norm.positions),
        )  # fmt: skip
    return table


def _finding(finding: Finding) -> RenderableType:
    mark, style = _MARK[finding.severity]
    shown = list(finding.where[:_NAMES_SHOWN])
    more = len(finding.where) - len(shown)
    names = ", ".join(name or "the model itself" for name in shown) + (f" and {more} more" if more else "")
    head = Text.assemble((f"{mark} {finding.severity}", style), f"  {finding.code}  ", (names, "bold"))
    body: list[RenderableType] = [Text(finding.what), _hanging(Text("so   ", "dim"), Text(finding.consequence))]
    if finding.remedy != "nothing":
        body.append(_hanging(Text("do   ", "dim"), Text(finding.remedy)))
    return Group(head, Padding(Group(*body), (0, 0, 0, 2)))


def _hanging(head: Text, body: Text) -> Table:
    """Return two columns, so that wrapped text stays clear of its heading."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, body)
    return grid


def _verdict(audit: Audited) -> Text:
    counts = Counter(finding.severity for finding in audit.findings)
    if not counts:
        return Text("nothing found", "bold green")
    plural = {"danger": "dangers", "warning": "warnings", "info": "remarks"}
    single = {"danger": "danger", "warning": "warning", "info": "remark"}
    parts = [(f"{counts[s]} {plural[s] if counts[s] > 1 else single[s]}", _MARK[s][1]) for s in SEVERITIES if counts[s]]
    return Text(", ").join(Text(words, style) for words, style in parts)


def as_data(audit: Audited) -> dict[str, Any]:
    """Return an audit as what JSON can hold."""
    return {
        "model": audit.model,
        "dangerous": audit.dangerous,
        "norms": [_norm_data(norm) for norm in audit.norms],
        "streams": [_stream_data(stream) for stream in audit.streams],
        "findings": [asdict(finding) for finding in audit.findings],
        "notes": list(audit.notes),
    }


def _norm_data(norm: Norm) -> dict[str, Any]:
    return {
        "name": norm.name,
        "class": norm.class_name,
        "kind": norm.kind,
        "convention": norm.convention or None,
        "spec": None if norm.spec is None else norm.spec.code,
        "unidentified": norm.unidentified or None,
        "eps": norm.eps,
        "eps_is_default": norm.eps_is_default,
        "width": norm.width,
        "weight_dtype": None if norm.weight_dtype is None else short(norm.weight_dtype),
        "weight_shape": norm.weight_shape,
        "input_dtype": None if norm.input_dtype is None else short(norm.input_dtype),
        "output_dtype": None if norm.output_dtype is None else short(norm.output_dtype),
        "calls": norm.calls,
        "positions": norm.positions,
        "function": norm.function,
        "parameters": norm.parameters,
        "aliases": norm.aliases,
    }


def _stream_data(stream: Stream) -> dict[str, Any]:
    return {
        "where": stream.where,
        "wiring": stream.wiring,
        "formula": stream.commonest.formula,
        "final": None if stream.final is None else stream.final.module,
        "joins": [_join_data(join) for join in stream.joins],
    }


def _join_data(join: Join) -> dict[str, Any]:
    names: Iterator[tuple[str, Any]] = (
        (side, [s.module for s in norms])
        for side, norms in (("before", join.before), ("branch", join.branch), ("after", join.after))
    )
    return {"where": join.where, "wiring": join.wiring, "formula": join.formula, **dict(names)}
