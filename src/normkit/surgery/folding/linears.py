"""Linear layers as one matrix, whatever their layout: scaled from the input side, from the output side, centred."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True)
class Linear:
    """How a linear layer's weight lies.

    Args:
        inputs, outputs: numbers of channels.
        input_axis: the channel axis of what comes in and goes out, from the right.
        output_last: weight is (in, out), as in GPT-2's Conv1D; else (out, in, …).
        spatial: kernel axes behind (out, in).
        groups: of a convolution.
        pads_zero: the layer appends zeros to its input, so that a constant added before it is no constant behind it.
        taps: products behind each output.
    """

    inputs: int
    outputs: int
    input_axis: int = -1
    output_last: bool = False
    spatial: int = 0
    groups: int = 1
    pads_zero: bool = False
    taps: int = 1

    def along_inputs(self, channel: Tensor) -> Tensor:
        """Return a value per input channel, shaped to multiply the weight."""
        if self.output_last:
            return channel.unsqueeze(1)
        rows = channel.reshape(self.groups, 1, -1).expand(-1, self.outputs // self.groups, -1)
        return rows.reshape(self.outputs, -1, *[1] * self.spatial)

    def along_outputs(self, channel: Tensor) -> Tensor:
        """Return a value per output channel, shaped to multiply the weight."""
        return channel.unsqueeze(0) if self.output_last else channel.reshape(-1, 1, *[1] * self.spatial)

    def response(self, weight: Tensor, channel: Tensor) -> Tensor:
        """Return what a constant per input channel, at every position, adds to each output: W·β."""
        product = weight * self.along_inputs(channel)
        return product.sum(0) if self.output_last else product.flatten(1).sum(1)

    def centre(self, weight: Tensor) -> Tensor:
        """Return W less its mean over the outputs: the layer's result then has mean zero for every input."""
        return weight - weight.mean(1 if self.output_last else 0, keepdim=True)


def linear_layer(module: nn.Module) -> Linear | None:
    """Return how ``module`` computes a linear map, or None if it is not one of the layers whose forward is known.

    The forward must be the class's own: a subclass or instance that computes something else is not taken.
    """
    if "forward" in vars(module) or hasattr(module, "parametrizations"):
        return None
    forward = type(module).forward
    if forward is nn.Linear.forward and isinstance(module, nn.Linear):
        return Linear(module.in_features, module.out_features, taps=module.in_features)
    for kind, spatial in _CONVOLUTIONS.items():
        if forward is kind.forward and isinstance(module, kind):
            return Linear(
                module.in_channels,
                module.out_channels,
                input_axis=-1 - spatial,
                spatial=spatial,
                groups=module.groups,
                pads_zero=module.padding_mode == "zeros" and _pads(module.padding),
                taps=module.in_channels // module.groups * torch.Size(module.kernel_size).numel(),
            )
    # GPT-2's layer lives in transformers; whoever has an instance of it has the module loaded.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if conv1d is not None and isinstance(module, conv1d) and forward is conv1d.forward:
        weight = module.weight
        assert isinstance(weight, Tensor)
        rows, columns = weight.shape
        return Linear(rows, columns, output_last=True, taps=rows)
    return None


def _pads(padding: str | tuple[int, ...]) -> bool:
    return padding == "same" if isinstance(padding, str) else any(padding)
