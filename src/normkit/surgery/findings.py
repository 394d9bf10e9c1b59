"""What `identify` returns: a spec with its numbers and the evidence, or a reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from normkit.checks import Eps
from normkit.conventions import NAMED
from normkit.spec import NormSpec

DtypePair = tuple[torch.dtype, torch.dtype | None]


def name_of(spec: NormSpec) -> str:
    """Return the name people know a spec by, such as ``LLAMA``, or its code.

    Example:
        >>> import normkit as nk
        >>> name_of(nk.LLAMA), name_of(nk.NormSpec(root="divide"))[:8]
        ('LLAMA', 'rms.mean')
    """
    return next((name for name, named in NAMED.items() if named == spec), spec.code)


def short(dtype: torch.dtype | None) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``, and ``none`` where there is no parameter."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Evidence:
    """Why an `Identified` says what it says.

    Args:
        matched: whose bits the module's are: ``"the formula"``, or an operator such as ``"torch.layer_norm"`` whose
            sums have an order of their own.
        dtypes: pairs of dtypes (of x, of the parameters) in which every bit agreed. Elsewhere nothing is claimed.
        equivalent: further specs that no probe could tell apart on this device, in these dtypes.
        eps_from: where ε's digits come from: an attribute's name, or how they were read off the output.
        shape: of the probes.
        notes: what else the reader should know.
    """

    matched: str
    dtypes: tuple[DtypePair, ...]
    equivalent: tuple[NormSpec, ...] = ()
    eps_from: str = ""
    shape: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = ", ".join(short(x) if w in (x, None) else f"{short(x)} with {short(w)} weight" for x, w in self.dtypes)
        parts = [
            f"every bit as {self.matched} computes it, on rows with exact sums: {pairs}",
            f"ε from {self.eps_from}",
        ]
        if self.equivalent:
            parts.append("cannot be told from " + ", ".join(map(name_of, self.equivalent)))
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class Identified:
    """What a module computes.

    Args:
        spec: the conventions.
        eps: ε, or `normkit.TORCH_DEFAULT` where the module leaves it to PyTorch.
        axes: the axes that a statistic runs over: counted from the end (``(-1,)``) where they end there, from the
            front (``(1,)`` for channels first) otherwise.
        weight, bias: names of the parameter or buffer of the module that is γ (or what γ is made of) and β; None where
            there is none.
        evidence: why.
        groups: into how many groups of its own statistic the channels are split.
        channel_axis: the axis that is split, and that weight and bias belong to.

    Example:
        >>> import torch, normkit as nk
        >>> found = nk.identify(torch.nn.LayerNorm(8))
        >>> found.spec == nk.TORCH_LAYER_NORM, found.eps, found.axes, found.weight, found.bias
        (True, 1e-05, (-1,), 'weight', 'bias')
    """

    spec: NormSpec
    eps: Eps
    axes: tuple[int, ...]
    weight: str | None
    bias: str | None
    evidence: Evidence = field(compare=False)
    groups: int = 1
    channel_axis: int = -1

    def __str__(self) -> str:
        what = f"{name_of(self.spec)}, ε={self.eps}, axes {self.axes}"
        return what if self.groups == 1 else f"{what}, {self.groups} groups"


@dataclass(frozen=True)
class Unidentified:
    """Why a module is none of the norms known here; false in a condition.

    Args:
        reason: what was seen.
        statistic: whether y divides x by a statistic of itself, so that it is some norm, only none known here.

    Example:
        >>> import torch, normkit as nk
        >>> print(nk.identify(torch.nn.ReLU()).reason)
        pointwise: y depends on its own x alone, so there is no statistic (an activation, DyT, Derf)
        >>> bool(nk.identify(torch.nn.ReLU()))
        False
    """

    reason: str
    statistic: bool = False

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason
