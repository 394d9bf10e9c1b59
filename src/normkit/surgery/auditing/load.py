"""From what stands on a command line to a model: a checkpoint folder, a config file, or ``module:callable``.

Nothing is fetched and nothing is unpickled: weights come from safetensors, or from a file that PyTorch reads with
``weights_only=True``. Code that a checkpoint brings along runs only where that was asked for.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.surgery.auditing.checkpoint import RefusedError, dtype_of, read_weights

LARGE = 8 * 2**30  # bytes: random weights beyond this stay on meta


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
        >>> load("torch.nn:Identity").model  # a class is a function that makes a model
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
    state = read_weights(path)
    model_class = _class_of(config, trust)
    dtype = config.dtype if isinstance(getattr(config, "dtype", None), torch.dtype) else dtype_of(state)
    try:
        with _quiet():
            model, said = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
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
        with _quiet(), torch.device("meta"):
            sketch = build(config)
        size = sum(p.numel() * p.element_size() for p in sketch.parameters())
        if size > LARGE:
            note = f"{size / 2**30:.0f} GiB of random weights were not made: the model is on meta"
            return Loaded(sketch, notes=[note])
        with _quiet(), torch.random.fork_rng(devices=[]):
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Generator[None]:
    """Keep transformers' progress bars and reports off the terminal; what they say is in what it returns."""
    said = _transformers().utils.logging
    level, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()
