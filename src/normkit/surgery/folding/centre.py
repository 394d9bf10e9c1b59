"""The mean of a LayerNorm into the layers that write its input: each made to write values of mean zero.

Every layer that adds to a residual stream loses the part of its output that is the same for all channels,
W ← W − mean over outputs. A LayerNorm does not see that part, so all of them compute what they did; and because the
stream then has mean zero, they compute it as an RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from normkit.surgery.folding.flow import Flow
from normkit.surgery.folding.forwards import as_rms_
from normkit.surgery.folding.linears import Linear
from normkit.surgery.folding.norms import Norm
from normkit.surgery.folding.permission import Permission, join
from normkit.surgery.folding.unseen import idle_beside
from normkit.surgery.folding.values import Values, tensor_of


@dataclass(frozen=True)
class CentreFold:
    """One LayerNorm and everything that writes what it reads."""

    norm: str
    shape: Norm
    layers: tuple[tuple[str, Linear], ...]
    tables: tuple[str, ...]
    kind: str = "mean"

    @property
    def into(self) -> tuple[str, ...]:
        """Paths of the layers and parameters."""
        return (*(name for name, _ in self.layers), *self.tables)

    def apply(self, values: Values) -> None:
        """Compute the new values; a layer that several norms read is centred once, the second time is no change."""
        for name, linear in self.layers:
            weight, bias = join(name, "weight"), join(name, "bias")
            values[weight] = linear.centre(values[weight])
            if getattr(values.model.get_submodule(name), "bias", None) is not None:
                values[bias] = values[bias] - values[bias].mean()
        for name in self.tables:
            values[name] = values[name] - values[name].mean(-1, keepdim=True)

    def convert(self, model: nn.Module) -> None:
        """Let the norm leave the mean out."""
        assert self.shape.spec is not None
        spec = replace(self.shape.spec, centered=False)
        as_rms_(
            model.get_submodule(self.norm),
            spec=spec,
            eps=self.shape.eps,
            weight=self.shape.weight,
            bias=self.shape.bias,
        )


def centre_fold(
    name: str, norms: dict[str, Norm], model: nn.Module, flow: Flow, linears: dict[str, Linear], allowed: Permission
) -> CentreFold | str:
    """Return the fold of this LayerNorm's mean, or why it cannot be proved."""
    norm = norms[name]
    if norm.spec is None or norm.spec.statistic != "mean" or norm.spec.gate != "none" or not norm.rows:
        return "only a LayerNorm over the last axis has an RMSNorm to become"
    if "forward" in vars(model.get_submodule(name)):
        return "its forward is set on the instance, by another tool"
    if why := allowed.of_module(name):
        return why
    for entry in flow.entries[name]:
        if entry.foreign or not entry.sources:
            return f"what it reads cannot be made to have mean zero: {entry.foreign}"
    sources = sorted(frozenset[str]().union(*(entry.sources for entry in flow.entries[name])))
    for source in sources:
        if why := _writer(source, norms, model, flow, linears, allowed):
            return why
    width = {_width(source, model, linears) for source in sources}
    if any(e.channels is None or {len(e.channels)} != width for e in flow.entries[name]):
        return "its rows are not the rows that the layers before it write"
    if (idle := idle_beside(sources, linears, flow.called, inputs=False)) is not None:
        return f"{idle} was not called on this example and may write to it on another; give one that calls it"
    layers = tuple((s, linears[s]) for s in sources if s in linears)
    return CentreFold(name, norm, layers, tuple(s for s in sources if s not in linears))


def _width(source: str, model: nn.Module, linears: dict[str, Linear]) -> int:
    return linears[source].outputs if source in linears else tensor_of(model, source).shape[-1]


def _writer(
    source: str, norms: dict[str, Norm], model: nn.Module, flow: Flow, linears: dict[str, Linear], allowed: Permission
) -> str | None:
    """Say why a source cannot lose its mean, or None."""
    if source in norms:
        return f"{source} writes to it, and a norm's own weight cannot give its output mean zero"
    if source in linears:
        if linears[source].groups != 1:
            return f"{source}, which writes to it, is a grouped convolution: its channels have no common input"
        if why := allowed.of_module(source, "weight", "bias"):
            return why
    elif why := allowed.of_tensor(source):
        return why
    width = _width(source, model, linears)
    for read in flow.readers[source]:
        if read.kind in ("sum", "scale"):
            continue
        reader = norms.get(read.name) if read.kind == "norm" else None
        # A norm that an earlier fold made an RMSNorm of sees what rounding left of the mean.
        if reader is None or reader.spec is None or not reader.spec.centered or not reader.rows:
            return f"{source}, which writes to it, is also read by {read.name}, which sees the mean"
        if read.channels is None or not torch.equal(read.channels, torch.arange(width)):
            return f"{read.name} normalises other rows than {source} writes"
    return None
