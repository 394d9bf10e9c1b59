"""nGPT: a Transformer whose stream, embeddings and weights live on a sphere.

Written with rms 1 in the place of length 1: a vector of rms 1 has length √d, and then the factors √d by which nGPT
scales gates and logits up are there already. Attention's queries and keys are normalised per head with a learnt gain
(`normkit.QKNorm`), which makes softmax's scale √d_k. Two things are simpler than in nGPT: α is learnt as it is, not
through a rescaled parameter, and one gain per channel before the head stands for nGPT's gain per byte.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from normkit.functional import rms_norm
from normkit.lab.draws import Draws
from normkit.lab.model.training import whole_batch
from normkit.lab.model.transformer import Transformer, TransformerConfig, build
from normkit.lab.model.zoo import Interpolated
from normkit.modules import RMSNorm

EPS = 1e-12  # a sphere has none; this one keeps a zero vector finite


class Sphere(nn.Module):
    """x / rms(x), with nothing to learn."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x (…, width)."""
        return rms_norm(x, eps=EPS)


def build_ngpt(config: TransformerConfig, draws: Draws) -> Transformer:
    """Return an nGPT with the same draws for its weights as any network of this config, brought to the sphere.

    Source: Loshchilov et al. 2024, arXiv 2410.01131.
    """
    model = build(replace(config, wiring="pre", qk_norm=True), draws)
    sublayers = [f for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]
    model.steps = nn.ModuleList(Interpolated(f, Sphere(), Sphere(), config.width) for f in sublayers)
    model.final_norm = RMSNorm(config.width, eps=EPS)
    to_sphere(model)
    return model


@torch.no_grad()
def to_sphere(model: Transformer) -> None:
    """Rescale, in place, every vector of the stream's width among the weights: embeddings to rms 1, others to length 1.

    A map that reads the stream holds such vectors as rows, one that writes to it as columns.
    """
    model.embedding.weight.copy_(rms_norm(model.embedding.weight, eps=EPS))
    for name, linear in model.weights().items():
        axis = 0 if name.endswith(("/output", "/down")) else 1
        length = linear.weight.double().norm(dim=axis, keepdim=True)
        linear.weight.copy_(linear.weight / length.clamp_min(EPS))


def on_sphere(model: nn.Module, window: Tensor) -> Tensor:
    """Bring the weights back to the sphere, then differentiate: a ``backward`` for `train_model`."""
    assert isinstance(model, Transformer)
    to_sphere(model)
    return whole_batch(model, window)


@contextmanager
def ending_on_sphere(model: Transformer) -> Generator[None]:
    """Bring the weights back once more when training is over."""
    yield
    to_sphere(model)
