"""What a check found, and how it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent, wrap

from normkit.testing.inputs import Inputs
from normkit.testing.judges import Problem
from normkit.testing.ulp import Error

LONGEST = 2000  # characters of an input before it is left to `Failure.inputs`


@dataclass(frozen=True)
class Failure:
    """One check that does not hold.

    Args:
        id, line, bound: the check.
        label: the input on which it was noticed; ``others`` more failed alike.
        problem: what came and what was right on the smallest failing input.
        inputs: that input.
    """

    id: str
    line: str
    bound: str
    label: str
    problem: Problem
    inputs: Inputs
    others: int = 0

    def __str__(self) -> str:
        more = f" (and {self.others} more)" if self.others else ""
        at = f"at {self.problem.where}" if self.problem.where else ""
        facts = [f"noticed on {self.label}{more}" if self.label else "", f"{self.problem.kind}: {at}".rstrip(": ")]
        text = str(self.inputs)
        if len(text) > LONGEST:
            shapes = ", ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in self.inputs.tensors().items())
            text = f"# {shapes}, eps = {self.inputs.eps!r}: too long to print; see Failure.inputs"
        lines = [
            f"FAILS {self.id}: {self.line}",
            *[f"  {fact}" for fact in facts if fact],
            f"  got       {self.problem.got}",
            f"  expected  {self.problem.expected}",
            *wrap(f"bound: {' '.join(self.bound.split())}", 110, initial_indent="  ", subsequent_indent="  "),
            "  smallest failing input:",
            indent(text, "    "),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Conformance:
    """What holds, what does not, and what is worth knowing.

    Args:
        passed: id → line of the checks that hold.
        failures: those that do not.
        notes: bits that depend on batch or layout, and inputs refused with an error where that is allowed.
        skipped: id → line of what does not apply.
        errors: dtype → quantity → error in ULP on random rows.

    Example:
        >>> import torch, normkit as nk
        >>> found = nk.testing.check(lambda x, w, eps: x * w, spec=nk.OLMO2, backward=False, dtypes=(torch.float32,))
        >>> found.ok, found.failures[0].id
        (False, 'V1')
    """

    passed: Mapping[str, str]
    failures: tuple[Failure, ...]
    notes: tuple[Failure, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=lambda: {})
    errors: Mapping[str, Mapping[str, Error]] = field(default_factory=lambda: {})

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return not self.failures

    @property
    def failed(self) -> tuple[str, ...]:
        """The ids of the checks that do not hold."""
        return tuple(f.id for f in self.failures)

    def __str__(self) -> str:
        parts = [f"{len(self.passed)} checks hold, {len(self.failures)} fail, {len(self.skipped)} do not apply."]
        if self.passed:
            parts.append("\n".join(f"holds {id}: {line}" for id, line in self.passed.items()))
        parts += [str(f) for f in self.failures]
        if self.notes:
            parts.append("\n".join(f"note {n.id}: {n.line} Not so: {_once(n)}" for n in self.notes))
        if self.errors:
            parts.append(self._table())
        return "\n\n".join(parts)

    def report(self) -> str:
        """Return the text without what holds: what a test prints when it fails."""
        parts = [
            f"{len(self.failures)} of {len(self.failures) + len(self.passed)} checks fail: {', '.join(self.failed)}"
        ]
        return "\n\n".join([*parts, *map(str, self.failures)])

    def _table(self) -> str:
        names = list(dict.fromkeys(name for row in self.errors.values() for name in row))
        lines = [
            "error on random rows in ULP, largest (mean)",
            "".join(["".ljust(12), *(n.ljust(18) for n in names)]).rstrip(),
        ]
        for dtype, row in self.errors.items():
            cells = [f"{row[n].largest:.2f} ({row[n].mean:.3f})".ljust(18) if n in row else "".ljust(18) for n in names]
            lines.append("".join([dtype.ljust(12), *cells]).rstrip())
        return "\n".join(lines)


def _once(note: Failure) -> str:
    where = f", {note.problem.where}" if note.problem.where else ""
    return f"{note.label}: got {note.problem.got}, expected {note.problem.expected}{where}"
