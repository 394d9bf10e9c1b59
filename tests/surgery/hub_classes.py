"""The norm classes of the installed transformers, built standalone; found by name, one for each distinct code."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

WIDTH = 64
# What a constructor's required arguments are called, and a value that fits all of them together.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "normalized_shape", "num_channels", "num_features", "n", "d_model"), WIDTH),
    **dict.fromkeys(
        ("embed_dim", "channels", "size", "width", "c_in", "feat_size", "in_channels", "out_channels"), WIDTH
    ),
    **dict.fromkeys(("num_heads", "n_heads", "n_groups", "num_groups"), 4),
    **dict.fromkeys(("head_dim", "group_size"), 16),
    **dict.fromkeys(("eps", "layer_norm_eps"), 1e-6),
    "feature_dims": (),
}
# Classes whose constructors take their arguments through *args, or want a shape.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ChameleonLayerNorm": ((4, 16),),
    "DINOv3ConvNextLayerNorm": (WIDTH,),
    "MuseGlimmerRMSNorm": (WIDTH,),
    "MuseSparkRMSNorm": (WIDTH,),
    "EsmcLayerNorm": (WIDTH,),
    "EsmFold2LayerNorm": (WIDTH,),
    "VideoPrismLayerNorm": (WIDTH,),
    "SqueezeBertLayerNorm": (WIDTH,),
}


class NotBuiltError(Exception):
    """The class needs more than a width: a configuration, a layer number, …"""


def families() -> list[str]:
    """Return the modeling modules that mention a norm."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    paths = sorted(root.glob("*/modeling_*.py"))
    return [f"transformers.models.{p.parent.name}.{p.stem}" for p in paths if "orm" in p.read_text()]


def classes(modules: list[str]) -> Iterator[type[nn.Module]]:
    """Yield the classes of these modules whose names say norm."""
    for name in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module = importlib.import_module(name)
            except ImportError:  # a family with a dependency of its own
                continue
        for kind in vars(module).values():
            own = inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name
            if own and "norm" in kind.__name__.lower():
                yield kind


def build(kind: type[nn.Module]) -> nn.Module:
    """Make an instance of width 64 with random parameters.

    Raises:
        NotBuiltError: where that takes more than the usual arguments, or makes more than a norm.
    """
    given = ARGUMENTS.get(kind.__name__, ())
    named: dict[str, Any] = {}
    for p in [] if given else list(inspect.signature(kind.__init__).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or (p.default is not p.empty and p.name not in ("hidden_size",)):
            continue
        if p.name == "config":
            named["config"] = _config(kind)
        elif p.name in VALUES:
            named[p.name] = VALUES[p.name]
        else:
            raise NotBuiltError(f"needs {p.name}")
    try:
        with torch.device("meta"):
            size = sum(t.numel() for t in kind(*given, **named).parameters())
        if size > 1 << 20:
            raise NotBuiltError("is a block, not a norm")
        module = kind(*given, **named)
    except (TypeError, AttributeError, NotImplementedError, ValueError) as why:
        raise NotBuiltError(f"{type(why).__name__}: {why}") from why
    source = torch.Generator().manual_seed(7)
    for t in [*module.parameters(), *module.buffers()]:
        if t.is_floating_point():
            t.data = t.data + 0.3 * torch.rand(t.shape, generator=source)
    return module.eval()


def _config(kind: type[nn.Module]) -> Any:
    module = importlib.import_module(kind.__module__)
    for p in inspect.signature(kind.__init__).parameters.values():
        hint = getattr(module, str(p.annotation).split("|")[0].strip(), p.annotation)
        if p.name == "config" and inspect.isclass(hint) and hint is not p.empty:
            return hint()
    for name, value in vars(module).items():
        if inspect.isclass(value) and name.endswith("Config") and kind.__name__.startswith(name.removesuffix("Config")):
            return value()
    raise NotBuiltError("needs a configuration of unknown class")


def code_of(module: nn.Module) -> Any:
    """Return what two instances share that compute alike: the code of every method, and their attributes."""
    methods: list[Any] = []
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        for name, f in vars(kind).items():
            if isinstance(f, FunctionType) and name not in ("__init__", "extra_repr", "_load_from_state_dict"):
                methods.append((name, *_code(f)))
    values = {k: str(v) for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
    eps = sorted(v for k, v in values.items() if "eps" in k)
    rest = sorted((k, v) for k, v in values.items() if "eps" not in k)
    return (*sorted(map(str, methods)), str(eps), str(rest), str([tuple(p.shape) for p in module.parameters()]))


def _code(f: FunctionType) -> tuple[Any, ...]:
    names = tuple("eps" if n in ("variance_epsilon", "epsilon", "norm_eps") else n for n in f.__code__.co_names)
    constants = tuple(c for c in f.__code__.co_consts[0 if f.__doc__ is None else 1 :] if not hasattr(c, "co_code"))
    return f.__code__.co_code, names, constants
