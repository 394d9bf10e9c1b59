"""Weights from files, without running anything that a file says.

Safetensors, whole or in shards, or a PyTorch file that holds tensors alone (``weights_only=True``).
"""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path

import torch


class RefusedError(ValueError):
    """A model that cannot or must not be loaded; the message names the file and what to do."""


def read_weights(path: Path) -> dict[str, torch.Tensor]:
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


def dtype_of(state: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the floating dtype that most tensors have.

    Example:
        >>> dtype_of({"w": torch.ones(2, dtype=torch.bfloat16)})
        torch.bfloat16
    """
    floating = [t.dtype for t in state.values() if t.is_floating_point()]
    return max(set(floating), key=floating.count) if floating else torch.float32
