"""What must hold of a module before a fold may write to its tensors."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from normkit.surgery.folding.flow import Flow, Key, memory

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Permission:
    """Answers for one model whether tensors may be rewritten: None if they may, else why not."""

    def __init__(self, model: nn.Module, flow: Flow) -> None:
        self._model, self._flow = model, flow
        self._owners: dict[Key, list[str]] = defaultdict(list)
        for path, module in model.named_modules():
            for name, tensor in own_tensors(module):
                key = memory(tensor)
                if key is not None:
                    self._owners[key].append(join(path, name))

    def of_module(self, path: str, *names: str | None) -> str | None:
        """Answer for the named parameters of a followed module."""
        module = self._model.get_submodule(path)
        if any(vars(module).get(hooks) for hooks in _HOOKS):
            return f"{path} carries forward hooks, which may read or change what passes; remove them first"
        if path in self._flow.broken:
            return f"{path}: {self._flow.broken[path]}"
        given = [join(path, name) for name in names if name is not None and getattr(module, name, None) is not None]
        if why := next((why for name in given if (why := self.of_tensor(name))), None):
            return why
        if path in self._flow.strays:
            return f"a parameter of {path} is also read by {self._flow.strays[path]}"
        return None

    def of_tensor(self, name: str) -> str | None:
        """Answer for one tensor."""
        path, _, attribute = name.rpartition(".")
        module = self._model.get_submodule(path)
        tensor = getattr(module, attribute)
        if attribute not in dict(own_tensors(module)):
            return f"{name} is computed from other tensors: it is no parameter and no buffer of its module"
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in _DTYPES:
            return f"{name} is a {type(tensor).__name__} of {tensor.dtype}; only plain floating tensors are rewritten"
        if tensor.is_inference():
            return f"{name} was made in inference mode and cannot be written outside it"
        key = memory(tensor)
        others = [o for o in self._owners.get(key, ()) if o != name] if key is not None else []
        if others:
            return f"{name} shares its memory with {others[0]}; untie them first"
        return None


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers registered on the module itself, every name of each."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


def join(path: str, name: str) -> str:
    """Return the name of a tensor or module below ``path``."""
    return f"{path}.{name}" if path else name
