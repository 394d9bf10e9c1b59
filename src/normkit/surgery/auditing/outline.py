"""A model's norms as a tree of names, with layers that are alike drawn once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from normkit.surgery.auditing.norm import Norm


@dataclass
class Branch:
    """A module name's part, the norms that bear exactly this name, and what lies below."""

    label: str
    norms: list[Norm] = field(default_factory=list[Norm])
    below: dict[str, Branch] = field(default_factory=dict[str, "Branch"])
    mark: str = ""

    @property
    def likeness(self) -> tuple[object, ...]:
        """What two layers must share to be drawn as one: everything but their numbers."""
        own = tuple((title(norm), norm.function, *details(norm)) for norm in self.norms)
        return (self.mark, *own, *((part, branch.likeness) for part, branch in self.below.items()))


def outline(norms: Iterable[Norm], marks: Mapping[str, str] = MappingProxyType({})) -> Branch:
    """Return the tree, like layers merged: ``0–3`` stands for four. ``marks`` go with names; unlike marks do not merge.

    Example:
        >>> tree = outline([Norm(f"layers.{i}.norm", "RMSNorm", eps=1e-6) for i in range(4)])
        >>> [branch.label for branch in tree.below["layers"].below.values()]
        ['0–3']
    """
    root = Branch("")
    for norm in norms:
        at = root
        for part in norm.name.split(".") if norm.name else ():
            at = at.below.setdefault(part, Branch(part))
        at.norms.append(norm)
        at.mark = marks.get(norm.name, "")
    return _merged(root)


def _merged(branch: Branch) -> Branch:
    runs: list[list[Branch]] = []
    for below in (_merged(child) for child in branch.below.values()):
        last = runs[-1] if runs else None
        if last and _follows(last[-1], below) and below.likeness == last[0].likeness:
            last.append(below)
        else:
            runs.append([below])
    merged = [replace(run[0], label=_range(run)) for run in runs]
    return replace(branch, below={child.label: child for child in merged})


def _follows(first: Branch, second: Branch) -> bool:
    return first.label.isdigit() and second.label.isdigit() and int(second.label) == int(first.label) + 1


def _range(run: list[Branch]) -> str:
    return run[0].label if len(run) == 1 else f"{run[0].label}–{run[-1].label}"


def details(norm: Norm) -> tuple[str, ...]:
    """Return what is worth saying of a norm, in the order in which it is said."""
    return tuple(_details(norm))


def _details(norm: Norm) -> Iterator[str]:
    if norm.width is not None:
        yield f"{norm.width} wide"
    if norm.eps is not None:
        yield f"ε {norm.eps:.6g}" + (" (PyTorch's default)" if norm.eps_is_default else "")
    if norm.weight_dtype is not None:
        yield short(norm.weight_dtype)
    elif norm.input_dtype is not None:
        yield f"no weight, {short(norm.input_dtype)}"
    if norm.positions:
        yield " / ".join(norm.positions)
    if norm.calls is not None and norm.calls != 1:
        yield "never runs" if norm.calls == 0 else f"runs {norm.calls} times"
    if norm.aliases:
        yield f"also {', '.join(norm.aliases)}"


def short(dtype: object) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``.

    Example:
        >>> import torch
        >>> short(torch.float16)
        'float16'
    """
    return str(dtype).removeprefix("torch.")


def title(norm: Norm) -> str:
    """Return what a norm computes in a word: its convention, or its kind where that is unknown.

    Example:
        >>> title(Norm("norm", "MyNorm", kind="rms"))
        'rms norm'
    """
    if norm.spec is None:
        return f"{norm.kind} norm" if norm.kind else "norm of unknown kind"
    return norm.convention
