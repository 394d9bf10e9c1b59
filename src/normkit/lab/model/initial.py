"""Initial weights: named rules, drawn so that networks that share a shape share their draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.lab.draws import Draws


@dataclass(frozen=True)
class Initial:
    """A rule for initial weights.

    Args:
        text: what it is, in words.
        linear: (fan_in, fan_out, width of the stream) → standard deviation of a linear map's weights.
        embedding: width → standard deviation of the embedding.
        uniform: draw from a uniform distribution of that standard deviation instead of a normal one.
    """

    text: str
    linear: Callable[[int, int, int], float]
    embedding: Callable[[int], float]
    uniform: bool = False


INITIALS: dict[str, Initial] = {
    # Theory's setting: the stream enters with variance 1 and every square map keeps it.
    "xavier": Initial(
        "Xavier normal, N(0, 2/(in + out)); embedding N(0, 1)",
        linear=lambda fan_in, fan_out, width: (2 / (fan_in + fan_out)) ** 0.5,
        embedding=lambda width: 1.0,
    ),
    "normal-0.02": Initial(
        "N(0, 0.02²) throughout, as BERT",
        linear=lambda fan_in, fan_out, width: 0.02,
        embedding=lambda width: 0.02,
    ),
    # Weights as small beside an embedding that is not: the stream then hardly grows.
    "normal-0.02-unit": Initial(
        "N(0, 0.02²); embedding N(0, 1)",
        linear=lambda fan_in, fan_out, width: 0.02,
        embedding=lambda width: 1.0,
    ),
    "normal-1/d": Initial(
        "N(0, 1/width) throughout",
        linear=lambda fan_in, fan_out, width: width**-0.5,
        embedding=lambda width: width**-0.5,
    ),
    "torch": Initial(
        "PyTorch's own: U(±1/√in); embedding N(0, 1)",
        linear=lambda fan_in, fan_out, width: (3 * fan_in) ** -0.5,
        embedding=lambda width: 1.0,
        uniform=True,
    ),
}


def initial(name: str) -> Initial:
    """Return a rule by name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in INITIALS:
        raise ValueError(f"unknown init {name!r}; one of {', '.join(INITIALS)}")
    return INITIALS[name]


@torch.no_grad()
def draw_weights(
    weights: dict[str, nn.Linear], embedding: nn.Embedding, rule: Initial, draws: Draws, gains: dict[str, float]
) -> None:
    """Fill every weight in place.

    Args:
        weights: linear maps by name. The name is the random stream, shared by every arm of the study and seed.
        embedding: the bytes' embedding.
        rule: the distribution.
        draws: the measurement's random streams.
        gains: factors by name, where not 1 (DeepNorm's β). They scale the same draw, so arms stay paired.
    """
    width = embedding.embedding_dim
    embedding.weight.copy_(rule.embedding(width) * _unit(draws, "init/embedding", embedding.weight, uniform=False))
    for name, linear in weights.items():
        std = rule.linear(linear.in_features, linear.out_features, width) * gains.get(name, 1.0)
        linear.weight.copy_(std * _unit(draws, f"init/{name}", linear.weight, rule.uniform))


def independent(draws: Draws, count: int) -> list[Draws]:
    """Return the random streams of ``count`` networks within one measurement, whose results are averaged."""
    return [Draws(f"{draws.study}/network-{i}", draws.arm, draws.seed) for i in range(count)]


def _unit(draws: Draws, stream: str, like: Tensor, uniform: bool) -> Tensor:
    """Draw variance-1 numbers, on the CPU so that a device changes nothing."""
    if uniform:
        return (torch.rand(like.shape, generator=draws.shared(stream)) * 2 - 1) * math.sqrt(3)
    return draws.randn(*like.shape, stream=stream)
