"""A double of a module that runs on other parameters and leaves the module itself alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class NotRunError(Exception):
    """The module did not compute a tensor of x's shape from these inputs."""


class CannotStandInError(Exception):
    """The module cannot be run on other parameters without touching the module itself."""


class StandIn:
    """Runs a leaf module's ``forward`` on given parameters and buffers.

    The double shares nothing that a forward could write: parameters and buffers are replaced by the caller's,
    containers are copied, hooks left out (they belong to the module's surroundings, not to what it computes). What it
    shares are values nobody writes to: numbers, strings, configurations.

    Raises:
        CannotStandInError: for a module whose forward was replaced by something that holds on to the module.
    """

    def __init__(self, module: nn.Module) -> None:
        double = object.__new__(type(module))
        memo: dict[int, Any] = {id(module): double}
        state = {name: _copied(value, memo) for name, value in vars(module).items() if name not in _HOOKS}
        state |= {name: type(vars(module)[name])() for name in _HOOKS if name in vars(module)}
        for name in ("_parameters", "_buffers"):
            # Floating ones are replaced by what each call gives; only counters and masks keep their values.
            state[name] = {
                k: t if t is None or t.is_floating_point() else _copied(t, memo) for k, t in vars(module)[name].items()
            }
        if "forward" in state:
            state["forward"] = _rebound(vars(module)["forward"], module, double)
        double.__dict__.update(state)
        self._double = double
        self.tensors: dict[str, Tensor] = {
            name: t
            for kind in ("_parameters", "_buffers")
            for name, t in vars(module)[kind].items()
            if t is not None and t.is_floating_point()
        }

    def __call__(self, *inputs: Any, values: Mapping[str, Tensor], **kwargs: Any) -> Tensor:
        """Run ``forward`` with ``values`` in place of the parameters and buffers of those names.

        Raises:
            NotRunError: when it fails or returns something else than a floating tensor of the first input's shape.
        """
        parameters, buffers = vars(self._double)["_parameters"], vars(self._double)["_buffers"]
        for name, value in values.items():
            if name in parameters:
                parameters[name] = nn.Parameter(value.clone(), requires_grad=False)
            else:
                buffers[name] = value.clone()
        copies = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
        try:
            y = self._double.forward(*copies, **kwargs)
        except Exception as error:  # anything a stranger's forward may raise
            raise NotRunError(f"{type(error).__name__}: {_first_line(error)}") from error
        if not isinstance(y, Tensor):
            raise NotRunError(f"it returns {type(y).__name__}, not a tensor")
        if y.shape != inputs[0].shape:
            raise NotRunError(f"it returns shape {tuple(y.shape)} for x of shape {tuple(inputs[0].shape)}")
        if not y.is_floating_point():
            raise NotRunError(f"it returns {y.dtype}")
        return y.detach()

    def in_mode(self, training: bool, inputs: tuple[Tensor | None, ...], values: Mapping[str, Tensor]) -> Tensor:
        """Run as `__call__` does, in training or inference mode."""
        before = self._double.training
        vars(self._double)["training"] = training
        try:
            return self(*(t for t in inputs if t is not None), values=values)
        finally:
            vars(self._double)["training"] = before


@contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """Run somebody's forward without leaving a trace: no graph, no autocast, RNG put back, warnings kept quiet."""
    devices = [device] if device.type not in ("cpu", "meta") else []
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.no_grad(),
        torch.autocast(device.type if devices else "cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy containers and tensors; share leaves; put the double where the module is."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type != "meta" else value
    if type(value) in (list, set, tuple):
        return type(value)(_copied(v, memo) for v in value)
    if type(value) is dict:
        return {k: _copied(v, memo) for k, v in value.items()}
    return value


def _rebound(forward: Any, module: nn.Module, double: nn.Module) -> Any:
    """Bind a forward that was set on the instance to the double instead."""
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return MethodType(forward.__func__, double)
    if isinstance(forward, functools.partial) and any(a is module for a in forward.args):
        held = [double if a is module else a for a in forward.args]
        return functools.partial(forward.func, *held, **forward.keywords)
    rebind = getattr(type(forward), "rebound", None)
    if rebind is not None:
        return rebind(forward, double)
    raise CannotStandInError(
        f"its forward was replaced on the instance by {type(forward).__name__}, which cannot be run apart from it"
    )
