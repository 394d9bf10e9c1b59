"""The lab's Transformer: bytes in, a distribution of the next byte out, and every choice named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws
from normkit.lab.model.attention import CausalAttention
from normkit.lab.model.feedforward import FEED_FORWARDS, hidden_width
from normkit.lab.model.initial import draw_weights, initial
from normkit.lab.model.norms import norm_factory
from normkit.placement import Wiring, placement

VOCABULARY = 256


@dataclass(frozen=True)
class TransformerConfig:
    """What a network is made of.

    Args:
        layers: blocks; each holds one attention and one feed-forward.
        width: of the residual stream.
        heads: of attention.
        hidden: width inside the feed-forward; None for the usual one of its kind.
        feed_forward: ``"swiglu"`` or ``"relu"``.
        norm: a name of `normkit.lab.model.norms.NORMS`.
        wiring: a name of `normkit.placement.WIRINGS`, or a row of one's own.
        qk_norm: normalise queries and keys per head, before RoPE.
        final_norm: a norm before the head; None for what the wiring's row says.
        init: a name of `normkit.lab.model.initial.INITIALS`.
        context: the longest sequence.
    """

    layers: int = 6
    width: int = 64
    heads: int = 2
    hidden: int | None = None
    feed_forward: str = "swiglu"
    norm: str = "rms"
    wiring: str | Wiring = "pre"
    qk_norm: bool = False
    final_norm: bool | None = None
    init: str = "xavier"
    context: int = CONTEXT


class Transformer(nn.Module):
    """A decoder-only language model over bytes.

    Built, its weights hold no meaning yet: `build` draws them. Linear maps have no bias; the head has weights of
    its own (tied weights would tie the first stream's scale to the logits').

    Raises:
        ValueError: for a name that is not in its table, or sizes that do not divide.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if config.feed_forward not in FEED_FORWARDS:
            raise ValueError(f"unknown feed-forward {config.feed_forward!r}; one of {', '.join(FEED_FORWARDS)}")
        self.config = config
        norm, wire = norm_factory(config.norm), placement(config.wiring)
        self.wiring = wire.wiring
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.attentions = nn.ModuleList()
        self.feed_forwards = nn.ModuleList()
        self.steps = nn.ModuleList()
        for _ in range(config.layers):
            attention, feed_forward = _sublayers(config)
            self.attentions.append(attention)
            self.feed_forwards.append(feed_forward)
            groups = [(attention, feed_forward)] if self.wiring.parallel else [(attention,), (feed_forward,)]
            self.steps.extend(wire(config.width, *group, norm=norm, depth=config.layers) for group in groups)
        wanted = self.wiring.final_norm if config.final_norm is None else config.final_norm
        self.final_norm = norm(config.width) if wanted else None
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def stream(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield the residual stream: the embedded bytes, then the stream after every residual step."""
        x = self.embedding(tokens)
        yield x
        for step in self.steps:
            x = step(x)
            yield x

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (N, T) to logits (N, T, 256); logits at t depend on bytes up to t if the norm lets them."""
        x = self.embedding(tokens)
        for step in self.steps:
            x = step(x)
        return self.head(x if self.final_norm is None else self.final_norm(x))

    def weights(self) -> dict[str, nn.Linear]:
        """Return every linear map as ``"<block>/<role>"``, roles as in the wirings' init rules, and ``"head"``."""
        found: dict[str, nn.Linear] = {}
        for i, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards, strict=True)):
            maps = [*attention.named_children(), *feed_forward.named_children()]
            found |= {f"{i}/{role}": m for role, m in maps if isinstance(m, nn.Linear)}
        return found | {"head": self.head}

    def gains(self) -> dict[str, float]:
        """Return β for every weight that the wiring's row scales, by the names of `weights`."""
        beta = self.wiring.constants(self.config.layers, "decoder-only").beta
        scaled = self.wiring.init.scaled
        return {name: beta for name in self.weights() if name.rpartition("/")[2] in scaled and beta != 1}


def build(config: TransformerConfig, draws: Draws) -> Transformer:
    """Return a network whose weights come from ``draws`` alone: same seed and shapes, same weights in every arm."""
    with torch.random.fork_rng(devices=[]):  # constructors draw too; the caller's generator must not notice
        model = Transformer(config)
    draw_weights(model.weights(), model.embedding, initial(config.init), draws, model.gains())
    return model


def put_norms(model: Transformer, norm: Callable[[int], nn.Module]) -> Transformer:
    """Put norms that ``norm`` makes from a width in place of a Pre-Norm network's own; weights stay; return it."""
    width = model.config.width
    pairs = zip(model.attentions, model.feed_forwards, strict=True)
    model.steps = nn.ModuleList(placement("pre")(width, f, norm=norm) for pair in pairs for f in pair)
    model.final_norm = norm(width)
    return model


def _sublayers(config: TransformerConfig) -> tuple[CausalAttention, nn.Module]:
    hidden = config.hidden or hidden_width(config.feed_forward, config.width)
    return (
        CausalAttention(config.width, config.heads, config.context, config.qk_norm),
        FEED_FORWARDS[config.feed_forward](config.width, hidden),
    )
