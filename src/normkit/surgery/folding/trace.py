"""One forward, watched: modules of interest are taken whole, everything between them operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.surgery.folding.flow import Flow, Key, last_axis, memory, tensors_in
from normkit.surgery.folding.linears import Linear
from normkit.surgery.folding.norms import Norm
from normkit.surgery.folding.rules import see


def trace(
    model: nn.Module,
    norms: Mapping[str, Norm],
    linears: Mapping[str, Linear],
    run: Callable[[], object],
) -> Flow:
    """Run the model once without gradient and return what was seen. ``run`` calls it on the example."""
    modules = dict(model.named_modules())
    followed = {name: modules[name] for name in (*norms, *linears)}
    owned: dict[Key, str] = {}
    for name, module in followed.items():
        for tensor in (*module.parameters(), *module.buffers()):
            key = memory(tensor)
            if key is not None:
                owned[key] = name
    free = {name: p for name, p in model.named_parameters() if memory(p) not in owned}
    flow = Flow(free, owned)
    watcher = _Watcher(flow, norms, linears)
    handles = [h for name, module in modules.items() for h in watcher.attach(name, module)]
    try:
        with torch.no_grad(), watcher:
            out = run()
    finally:
        for handle in handles:
            handle.remove()
    for tensor in tensors_in(out):
        flow.read(tensor, "output", "the model's own output")
    return flow


class _Watcher(TorchDispatchMode):
    def __init__(self, flow: Flow, norms: Mapping[str, Norm], linears: Mapping[str, Linear]) -> None:
        super().__init__()
        self.flow, self.norms, self.linears = flow, norms, linears
        self.path = [""]
        self.inside = 0  # how many followed modules the forward is in: their own operators are theirs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.inside:
            see(self.flow, self.path[-1] or "the model's forward", func, args, kwargs, out)
        return out

    def attach(self, name: str, module: nn.Module) -> list[Any]:
        """Hook a module; a followed one is opened and closed as a whole."""
        mine = name in self.norms or name in self.linears

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.path.append(name)
            self.flow.called.add(name)
            self.inside += mine
            if mine and self.inside == 1:
                self._enter(name, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            if mine and self.inside == 1:
                self._leave(name, [*tensors_in(args), *tensors_in(kwargs)], out)
            self.path.pop()
            self.inside -= mine

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        if not given:
            return
        x, others = given[0], given[1:]
        if name in self.norms:
            self.flow.enter(name, "norm", x, self.norms[name].axis)
        else:
            self.flow.enter(name, "linear", x, self.linears[name].input_axis)
        for tensor in others:
            self.flow.read(tensor, "other", f"a further input of {name}")

    def _leave(self, name: str, given: list[Tensor], out: object) -> None:
        if not isinstance(out, Tensor) or memory(out) in {memory(t) for t in given}:
            self.flow.broken[name] = "its output is not one fresh tensor"
            return
        if name in self.norms:
            channels = self.norms[name].channels(out)
            if channels is None:
                self.flow.broken[name] = f"its parameters do not line up with its output {tuple(out.shape)}"
                return
        else:
            axis = self.linears[name].input_axis
            channels = last_axis(out.movedim(axis, -1)).reshape(-1, *[1] * (-1 - axis))
        self.flow.add(out, channels, frozenset({name}), None, False)
