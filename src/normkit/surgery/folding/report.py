"""What `fold_` returns: what was folded into what, what was not and why, and what it changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from normkit.surgery.folding.forwards import own_forward_
from normkit.surgery.folding.values import Written


@dataclass(frozen=True)
class Folded:
    """One fold that was done.

    Args:
        name: path of the norm.
        what: ``"weight"`` (with the bias, where it has one), ``"batch norm"``, or ``"mean"``.
        into: paths of the layers and parameters that were rewritten.
    """

    name: str
    what: str
    into: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.into) - 4} more" if len(self.into) > 4 else ""
        return f"{self.name}: {self.what} into {', '.join(self.into[:4])}{more}"


@dataclass(frozen=True)
class Refused:
    """One fold that was not done.

    Args:
        name: path of the norm.
        what: as in `Folded`; ``"norm"`` where the module is none that is known.
        reason: why.
    """

    name: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what} stays: {self.reason}"


@dataclass(frozen=True)
class FoldError:
    """How far the outputs moved on the example; each figure is a share of the largest output.

    Args:
        float64: between float64 copies of the model, before and after.
        bound: what rounding in float64 may do, from the model's own response to weights changed by that much.
        moved: between the model before and after, in its own dtype.
        before, after: root mean square distance of the model from its float64 copy, before and after.
        dtype: of the first output.
    """

    float64: float
    bound: float
    moved: float
    before: float
    after: float
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"in float64 the outputs moved by {self.float64:.1e} (rounding may move them by {self.bound:.1e}); "
            f"in {name} by {self.moved:.1e}, and their distance from float64 went from {self.before:.1e} "
            f"to {self.after:.1e}"
        )


@dataclass
class FoldReport:
    """What `fold_` did. Printing it reads as a list.

    Args:
        folded: folds that were done.
        refused: folds that were not, each with its reason.
        already: norms whose parameters did nothing before.
        error: how far the outputs moved; None where nothing was folded.
    """

    folded: tuple[Folded, ...] = ()
    refused: tuple[Refused, ...] = ()
    already: tuple[str, ...] = ()
    error: FoldError | None = None
    _written: Written | None = field(default=None, repr=False)
    _converted: tuple[nn.Module, ...] = field(default=(), repr=False)

    def undo(self) -> None:
        """Put every rewritten tensor back, bit for bit, and every forward. A second call does nothing.

        Raises:
            ValueError: if a tensor was written to since the fold; nothing is put back then.
        """
        if self._written is None:
            return
        changed = self._written.changed_since()
        if changed:
            raise ValueError(
                f"undo: {changed[0]} was written to since the fold"
                + (f" (and {len(changed) - 1} more)" if len(changed) > 1 else "")
                + "; load a checkpoint instead"
            )
        self._written.restore()
        for module in self._converted:
            own_forward_(module)
        self._written, self._converted = None, ()

    def __str__(self) -> str:
        lines = [f"folded {len(self.folded)}, refused {len(self.refused)}, nothing to fold in {len(self.already)}"]
        if not self.folded:
            lines[0] = f"nothing folded: {len(self.refused)} refused, {len(self.already)} had nothing left to fold"
        lines += [f"  {entry}" for entry in (*self.folded, *self.refused)]
        if self.error is not None:
            lines.append(f"  {self.error}")
        return "\n".join(lines)
