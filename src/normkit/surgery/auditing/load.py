"""From what stands on a command line to a model: a checkpoint folder, a config file, or ``module:callable``.

Nothing is fetched and nothing is unpickled: weights come from safetensors, or from a file that PyTorch reads with
``weights_only=True``. Code that a checkpoint brings along runs only where that was asked for.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

LARGE = 8 * 2**30  # bytes: random weights beyond this stay on meta


class RefusedError(ValueError):
    """A model that cannot or must not be loaded; the message names the file and what to do."""


@dataclass
class Loaded:
    """A model, what to call it with, and what loading it brought to light.

    Args:
        model: the model.
        args, kwargs: an example input; empty where the model's config is enough.
        missing: parameters that the checkpoint lacks.
        unexpected: tensors of the checkpoint that the model has no place for.
        notes: what the reader should know.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list[str])


def load(source: str, trust_remote_code: bool = False) -> Loaded:
    """Return the model that ``source`` names.

    Args:
        source: a folder with ``config.json`` and weights; a config file, whose model gets random weights; or
            ``module:callable``, called without arguments, returning a model or a model and an example (a tuple of
            arguments or a dict of keywords).
        trust_remote_code: run the Python files that a checkpoint brings along.

    Raises:
        RefusedError: for anything that cannot be loaded, with the file's name and what to do.

    Example:
        >>> load("torch.nn:Identity").model
        Identity()
    """
    path = Path(source)
    if path.is_dir():
        return _folder(path, trust_remote_code)
    if path.is_file():
        if path.suffix == ".json":
            return _config_file(path, trust_remote_code)
        raise RefusedError(f"{path}: expected a checkpoint folder or a config .json; pass the folder that it lies in")
    if ":" in source and not path.exists():
        return _callable(source)
    raise RefusedError(f"{source}: no such folder or file; for a function that returns a model write module:function")


def _callable(source: str) -> Loaded:
    module_name, _, attribute = source.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        made: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            made = getattr(made, part)
        made = made() if not isinstance(made, nn.Module) else made
    except (ImportError, AttributeError) as error:
        raise RefusedError(f"{source}: {error}; expected an importable module and a function in it") from error
    except Exception as error:
        raise RefusedError(
            f"{source}: the function raised {type(error).__name__}: {error}; call it in Python to see"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, nn.Module):
        raise RefusedError(
            f"{source}: expected a torch.nn.Module, or one and an example input, got {type(model).__name__}"
        )
    if isinstance(example, dict):
        return Loaded(model, kwargs=example)
    return Loaded(model, example if isinstance(example, tuple) else (example,))


def _folder(path: Path, trust: bool) -> Loaded:
    if not (path / "config.json").is_file():
        raise RefusedError(f"{path}: no config.json in it; pass a folder that a model was saved to")
    config = _config(path / "config.json", trust)
    state = _weights(path)
    model_class = _class_of(config, trust)
    dtype = config.dtype if isinstance(getattr(config, "dtype", None), torch.dtype) else _dtype_of(state)
    try:
        model, said = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except Exception as error:
        raise RefusedError(f"{path}: transformers could not build it: {_first_line(error)}") from error
    wrong = sorted(str(key[0] if isinstance(key, tuple) else key) for key in said.get("mismatched_keys", ()))
    if wrong:
        raise RefusedError(
            f"{path}: {wrong[0]} has another shape in the weights than config.json says; they do not belong together"
        )
    return Loaded(model, missing=tuple(sorted(said["missing_keys"])), unexpected=tuple(sorted(said["unexpected_keys"])))


def _config_file(path: Path, trust: bool) -> Loaded:
    config = _config(path, trust)
    model_class = _class_of(config, trust)
    build = getattr(model_class, "_from_config", None) or model_class.from_config
    try:
        with torch.device("meta"):
            sketch = build(config)
        size = sum(p.numel() * p.element_size() for p in sketch.parameters())
        if size > LARGE:
            note = f"{size / 2**30:.0f} GiB of random weights were not made: the model is on meta"
            return Loaded(sketch, notes=[note])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build(config)
    except Exception as error:
        raise RefusedError(f"{path}: transformers could not build it: {_first_line(error)}") from error
    return Loaded(model, notes=["weights are random: only a config was given"])


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise RefusedError(
            "reading a config or a checkpoint folder needs transformers: pip install transformers"
        ) from error


def _config(path: Path, trust: bool) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RefusedError(f"{path}: not readable as JSON ({error}); save the config again") from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind is None:
        raise RefusedError(f"{path}: no model_type in it; expected a config as transformers writes it")
    library = _transformers()
    known = kind in library.CONFIG_MAPPING
    remote = "auto_map" in data and (trust or not known)
    if remote and not trust:
        files = ", ".join(sorted({f"{v}".partition(".")[0] + ".py" for v in data["auto_map"].values()}))
        raise RefusedError(
            f"{path}: model type {kind!r} comes with code of its own ({files}), which was not run; "
            "read it, then pass --trust-remote-code"
        )
    if not known and not remote:
        raise RefusedError(f"{path}: transformers {library.__version__} does not know the model type {kind!r}")
    try:
        if remote:
            return library.AutoConfig.from_pretrained(path.parent, trust_remote_code=True, local_files_only=True)
        return library.CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:
        raise RefusedError(f"{path}: not a valid config: {' '.join(str(error).split())}") from error


def _class_of(config: Any, trust: bool) -> Any:
    library = _transformers()
    for name in getattr(config, "architectures", None) or ():
        if hasattr(library, name):
            return getattr(library, name)
    remote = getattr(config, "auto_map", None) if trust else None
    autos = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
    if remote:
        dynamic = importlib.import_module("transformers.dynamic_module_utils")
        name = next((a for a in autos if a in remote), None)
        if name is not None:
            return dynamic.get_class_from_dynamic_module(remote[name], config.name_or_path, local_files_only=True)
    for name in autos:
        auto = getattr(library, name)
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise RefusedError(f"transformers has no model for a config of type {type(config).__name__}")


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a folder: one safetensors file, shards with their index, or a file without pickled code."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.is_file():
        files = _shards(index)
    elif single.is_file():
        files = [single]
    elif found := sorted(path.glob("*.safetensors")):
        raise RefusedError(
            f"{found[0]}: neither model.safetensors nor an index beside it; write model.safetensors.index.json"
        )
    else:
        return _pickled(path)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(_safetensors(file))
    if index.is_file():
        promised = set(json.loads(index.read_text())["weight_map"])
        if lost := sorted(promised - set(state)):
            raise RefusedError(
                f"{index}: {len(lost)} tensors that it lists are in no shard, {lost[0]} first; copy it again"
            )
    return state


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RefusedError(f"{index}: not a readable index ({error}); copy it again") from error
    files = [index.parent / str(name) for name in names]
    if outside := [f for f in files if f.resolve().parent != index.parent.resolve()]:
        raise RefusedError(f"{index}: names a file outside its folder, {outside[0]}; it was not read")
    if absent := [f.name for f in files if not f.is_file()]:
        raise RefusedError(
            f"{index.parent / absent[0]}: missing, and {len(absent)} of {len(files)} shards are; copy them again"
        )
    return files


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        reader = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise RefusedError(f"{file}: reading it needs safetensors: pip install safetensors") from error
    try:
        return reader.load_file(str(file), device="cpu")
    except Exception as error:
        raise RefusedError(f"{file}: not a whole safetensors file ({error}); copy it again") from error


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    """Read a PyTorch file that holds tensors and nothing else."""
    files = [
        f for pattern in ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for f in sorted(path.glob(pattern))
    ]
    if not files:
        raise RefusedError(
            f"{path}: no weights in it; expected model.safetensors (for random weights pass its config.json)"
        )
    index = path / "pytorch_model.bin.index.json"
    if index.is_file():
        files = _shards(index)
    state: dict[str, torch.Tensor] = {}
    for file in files if index.is_file() else files[:1]:
        try:
            held = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise RefusedError(
                f"{file}: a pickle that holds more than tensors, or is damaged; it was not run. "
                "Convert it to safetensors where you trust it"
            ) from error
        if not isinstance(held, dict) or not all(isinstance(v, torch.Tensor) for v in held.values()):
            raise RefusedError(f"{file}: expected a mapping of names to tensors; save the model's state_dict()")
        state.update(held)
    return state


def _dtype_of(state: dict[str, torch.Tensor]) -> torch.dtype:
    floating = [t.dtype for t in state.values() if t.is_floating_point()]
    return max(set(floating), key=floating.count) if floating else torch.float32


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
