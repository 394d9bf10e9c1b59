"""γ and β of a norm into the linear layers that read it: W ← W·diag(γ), b ← b + W·β."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.surgery.folding.flow import Flow
from normkit.surgery.folding.linears import Linear
from normkit.surgery.folding.norms import Norm
from normkit.surgery.folding.permission import Permission, join
from normkit.surgery.folding.unseen import idle_beside
from normkit.surgery.folding.values import Values


@dataclass(frozen=True)
class WeightFold:
    """One norm and its readers, each with the norm's channel at each of its inputs."""

    norm: str
    shape: Norm
    readers: tuple[tuple[str, Linear, Tensor], ...]
    kind: str = "weight"

    @property
    def into(self) -> tuple[str, ...]:
        """Paths of the linear layers."""
        return tuple(name for name, _, _ in self.readers)

    def apply(self, values: Values) -> None:
        """Compute the new values."""
        module = values.model.get_submodule(self.norm)
        gain, shift = self.shape.gain(module), self.shape.shift(module)
        for name, linear, channels in self.readers:
            weight = values[join(name, "weight")]
            index = channels.to(weight.device)
            if shift is not None and bool(shift.any()):
                bias = join(name, "bias")
                values[bias] = values[bias] + linear.response(weight, shift.reshape(-1)[index])
            if gain is not None:
                values[join(name, "weight")] = weight * linear.along_inputs(gain.reshape(-1)[index])
        for name, rest in ((self.shape.weight, self.shape.rest), (self.shape.bias, 0.0)):
            if name is not None:
                values[join(self.norm, name)] = torch.full_like(values[join(self.norm, name)], rest)

    def convert(self, model: nn.Module) -> None:
        """Nothing but values changes."""


def weight_fold(
    name: str, norm: Norm, model: nn.Module, flow: Flow, linears: dict[str, Linear], allowed: Permission
) -> WeightFold | str:
    """Return the fold of this norm's parameters, or why it cannot be proved."""
    module = model.get_submodule(name)
    shift = norm.shift(module)
    shifted = shift is not None and bool(shift.any())
    if why := allowed.of_module(name, norm.weight, norm.bias):
        return why
    reads = flow.readers[name]
    if all(read.kind == "scale" for read in reads):
        return "nothing reads its output"
    for read in reads:
        if read.kind == "scale":  # what reads the scaled value is in the list as well, and knows
            continue
        if read.kind != "linear":
            return f"its output is read by {read.name}, which is no linear layer"
        if read.channels is None or not read.alone:
            return f"{read.name} reads it mixed with other values, so its inputs are no fixed channels of the norm"
        if read.scaled and shifted:
            return f"its output is multiplied before {read.name} reads it, and its bias is not zero"
    readers: dict[str, Tensor] = {}
    for read in reads:
        if read.kind == "linear" and read.channels is not None:
            readers[read.name] = read.channels
    for reader, channels in readers.items():
        if why := _reader(reader, name, channels, shifted, model, flow, linears[reader], allowed):
            return why
    if (idle := idle_beside(readers, linears, flow.called, inputs=True)) is not None:
        return f"{idle} was not called on this example and may read it on another; give one that calls it"
    return WeightFold(name, norm, tuple((reader, linears[reader], channels) for reader, channels in readers.items()))


def _reader(
    reader: str, norm: str, channels: Tensor, shifted: bool, model: nn.Module, flow: Flow, linear: Linear,
    allowed: Permission,
) -> str | None:  # fmt: skip
    for entry in flow.entries[reader]:
        if entry.sources != frozenset((norm,)) or entry.channels is None:
            return f"{reader} also reads values that do not come from this norm"
        if not torch.equal(entry.channels, channels):
            return f"{reader} reads its channels in one order in one call and in another in the next"
    if shifted and getattr(model.get_submodule(reader), "bias", None) is None:
        return f"its bias is not zero and {reader} has no bias to take it; give {reader} a bias of zeros first"
    if shifted and linear.pads_zero:
        return f"its bias is not zero and {reader} pads with zeros, so a bias of its own is not the same at the border"
    return allowed.of_module(reader, "weight", "bias")
