"""A batch norm in eval mode into the layer before it: W ← s·W, b ← s·b + t with s = γ/√(σ² + ε), t = β − μ·s."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.surgery.folding.flow import Flow
from normkit.surgery.folding.forwards import as_identity_
from normkit.surgery.folding.linears import Linear
from normkit.surgery.folding.norms import Norm, affine_of_batch
from normkit.surgery.folding.permission import Permission, join
from normkit.surgery.folding.values import Values


@dataclass(frozen=True)
class BatchFold:
    """One batch norm and the layer that writes what it reads.

    A layer without a bias gets none: the norm goes on adding t.
    """

    norm: str
    shape: Norm
    writer: str
    linear: Linear
    keeps_shift: bool
    kind: str = "batch norm"

    @property
    def into(self) -> tuple[str, ...]:
        """Path of the layer."""
        return (self.writer,)

    def apply(self, values: Values) -> None:
        """Compute the new values. The variance becomes 1 − ε, so that the norm's own formula divides by one."""
        eps = self.shape.number
        scale, shift = affine_of_batch(values.model.get_submodule(self.norm), eps)
        weight, bias = join(self.writer, "weight"), join(self.writer, "bias")
        values[weight] = values[weight] * self.linear.along_outputs(scale)
        if not self.keeps_shift:
            values[bias] = values[bias] * scale + shift
            shift = torch.zeros_like(shift)
        mean, var = (join(self.norm, name) for name in ("running_mean", "running_var"))
        values[var] = torch.full_like(values[var], 1 - eps)
        values[mean] = torch.zeros_like(shift) if self.shape.bias else -shift
        if self.shape.weight:
            values[join(self.norm, self.shape.weight)] = torch.ones_like(scale)
        if self.shape.bias:
            values[join(self.norm, self.shape.bias)] = shift

    def convert(self, model: nn.Module) -> None:
        """Leave the norm out in eval mode, where nothing of it remains."""
        module = model.get_submodule(self.norm)
        if not self.keeps_shift and "forward" not in vars(module):
            as_identity_(module)


def batch_fold(
    name: str, norm: Norm, model: nn.Module, flow: Flow, linears: dict[str, Linear], allowed: Permission
) -> BatchFold | str:
    """Return the fold of this batch norm, or why it cannot be proved."""
    if norm.number >= 1:
        return f"ε = {norm.eps} leaves no variance 1 − ε to rest at"
    if why := allowed.of_module(name, norm.weight, norm.bias, "running_mean", "running_var"):
        return why
    sources = frozenset[str]().union(*(entry.sources for entry in flow.entries[name]))
    for entry in flow.entries[name]:
        if entry.foreign or entry.scaled or len(sources) != 1 or not entry.sources:
            return f"what it reads is not the output of one linear layer: {entry.foreign or 'it is a sum or scaled'}"
        if entry.channels is None or not torch.equal(entry.channels, torch.arange(norm.shape[0])):
            return "the channels it normalises are not those of the layer before it"
    if not sources:
        return "it was not called"
    (writer,) = sources
    if writer not in linears:
        return f"{writer}, which it reads, is no linear layer"
    for read in flow.readers[writer]:
        if read.kind != "norm" or read.name != name:
            return f"the output of {writer} is also read by {read.name}"
    if why := allowed.of_module(writer, "weight", "bias"):
        return why
    bias = getattr(model.get_submodule(writer), "bias", None)
    return BatchFold(name, norm, writer, linears[writer], keeps_shift=not isinstance(bias, Tensor))
