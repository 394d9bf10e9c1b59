"""An input for a model whose config says what it reads: token ids, pixels, sound."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 7  # tokens: no common width, so that no axis is taken for another
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def examples(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield keyword inputs to try, the likeliest first; none for a model without a config.

    Example:
        >>> list(examples(nn.Linear(2, 2)))
        []
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "forward"):
        return
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    makers = {"input_ids": _tokens, "pixel_values": _pixels, "input_values": _wave, "input_features": _spectrum}
    if main in makers:
        given = {main: makers[main](model, config)}
        yield {**given, **_decoder(model, config, names)}
        others = [n for n in ("input_ids", "pixel_values") if n in names and n not in given]
        if others and (hasattr(config, "vision_config") or hasattr(config, "text_config")):
            yield {**given, **{n: makers[n](model, config) for n in others}}
    if "input_ids" in names and main != "input_ids":
        yield {"input_ids": _tokens(model, config), **_decoder(model, config, names)}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _tokens(model: nn.Module, config: Any, length: int = LENGTH) -> Tensor:
    """Return two rows of token ids, none of them a special one that the config names."""
    part = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(part, "vocab_size", None) or getattr(config, "vocab_size", 2))
    special = {getattr(source, name, None) for source in (config, part) for name in _SPECIAL}
    special |= {value for name, value in vars(config).items() if name.endswith("_token_id")}
    special |= {value for name, value in vars(config).items() if name.endswith("_token_index")}
    plain = [i for i in range(min(vocabulary, 4096)) if i not in special] or [0]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, len(plain), (2, length), generator=generator)
    return torch.tensor(plain)[picks].to(_device(model))


def _decoder(model: nn.Module, config: Any, names: set[str]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        extra["decoder_input_ids"] = _tokens(model, config, LENGTH - 2)
    if "use_cache" in names:
        extra["use_cache"] = False  # one forward: a cache would be written and thrown away
    return extra


def _noise(model: nn.Module, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(_device(model), _dtype(model))


def _pixels(model: nn.Module, config: Any) -> Tensor:
    part = getattr(config, "vision_config", None) or config
    size = getattr(part, "image_size", None) or getattr(part, "img_size", None) or 224
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = int(getattr(part, "num_channels", None) or getattr(part, "in_channels", None) or 3)
    return _noise(model, 2, channels, int(height), int(width))


def _wave(model: nn.Module, config: Any) -> Tensor:
    return _noise(model, 2, 4000)


def _spectrum(model: nn.Module, config: Any) -> Tensor:
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
    frames = 2 * int(getattr(config, "max_source_positions", None) or 100)
    return _noise(model, 2, int(bins), frames)
