"""The new values of a model's tensors, kept in float64 until they are written once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Values:
    """Working copies in float64, made when first asked for; several folds of one weight compose without rounding.

    Args:
        model: whose tensors are named ``path.attribute``. It is not written to until `write`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._working: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._working:
            self._working[name] = tensor_of(self.model, name).detach().double()
        return self._working[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self[name]  # only tensors that exist
        assert value.shape == self._working[name].shape
        self._working[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._working)

    def overflow(self) -> str | None:
        """Return the name of a tensor whose new value its dtype cannot hold, if there is one."""
        for name, value in self._working.items():
            old = tensor_of(self.model, name)
            if bool(torch.isfinite(value).all()) and not bool(torch.isfinite(value.to(old.dtype)).all()):
                return name
        return None

    def write(self) -> Written:
        """Round each value once to its tensor's dtype and store it there; return the way back."""
        olds = {name: tensor_of(self.model, name).detach().clone() for name in self._working}
        with torch.no_grad():
            for name, value in self._working.items():
                tensor_of(self.model, name).copy_(value)
        news = {name: tensor_of(self.model, name)._version for name in self._working}
        return Written(self.model, olds, news)


@dataclass(frozen=True)
class Written:
    """What was written: the old values, and the version counter of each tensor afterwards."""

    model: nn.Module
    olds: dict[str, Tensor]
    versions: dict[str, int]

    def changed_since(self) -> list[str]:
        """Return the tensors that somebody else has written to since."""
        return [n for n, version in self.versions.items() if tensor_of(self.model, n)._version != version]

    def restore(self) -> None:
        """Put every old value back, bit for bit."""
        with torch.no_grad():
            for name, old in self.olds.items():
                tensor_of(self.model, name).copy_(old)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer at ``path.attribute``."""
    path, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(path), attribute)
    assert isinstance(value, Tensor)
    return value
