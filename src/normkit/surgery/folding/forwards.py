"""What a folded norm computes from then on, set on the instance: class, parameters and state dict stay as they are.

Whoever loads a checkpoint into the module gets its own forward back: that is right for folded weights and for others.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from normkit.checks import Eps
from normkit.functional import rms_norm
from normkit.spec import NormSpec

_HANDLE = "_normkit_fold_hook"


def as_rms_(
    module: nn.Module, *, spec: NormSpec, eps: Eps, weight: str | None, bias: str | None
) -> functools.partial[Tensor]:
    """Let a norm whose input has mean zero leave the mean out. ``spec`` is the uncentred convention."""
    return _set(module, functools.partial(_rms, module, spec=spec, eps=eps, weight=weight, bias=bias))


def as_identity_(module: nn.Module) -> functools.partial[Tensor]:
    """Let a batch norm that does nothing any more do nothing in eval mode; in training mode it is what it was."""
    return _set(module, functools.partial(_identity, module))


def own_forward_(module: nn.Module) -> None:
    """Give a module its class's forward back and leave nothing behind."""
    if folded_forward(module) is not None:
        del module.forward
    handle = vars(module).pop(_HANDLE, None)
    if handle is not None:
        handle.remove()


def folded_forward(module: nn.Module) -> functools.partial[Tensor] | None:
    """Return the forward that a fold set on this instance, if one did."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, functools.partial) and forward.func in (_rms, _identity) else None


def is_identity(module: nn.Module) -> bool:
    """Whether an earlier fold left nothing of this batch norm."""
    forward = folded_forward(module)
    return forward is not None and forward.func is _identity


def _set(module: nn.Module, forward: functools.partial[Tensor]) -> functools.partial[Tensor]:
    assert "forward" not in vars(module)
    module.forward = forward
    if _HANDLE not in vars(module):
        vars(module)[_HANDLE] = module.register_load_state_dict_pre_hook(_loading)
    return forward


def _loading(module: nn.Module, *_: Any) -> None:
    # The hook itself stays: PyTorch is going through the module's hooks just now.
    if folded_forward(module) is not None:
        del module.forward


def _rms(
    module: nn.Module, *args: Any, spec: NormSpec, eps: Eps, weight: str | None, bias: str | None, **kwargs: Any
) -> Tensor:
    given = (*args, *kwargs.values())
    if len(given) != 1:
        return type(module).forward(module, *args, **kwargs)
    gain, shift = (None if name is None else getattr(module, name) for name in (weight, bias))
    return rms_norm(given[0], gain, shift, eps=eps, spec=spec)


def _identity(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    # A mask beside the input makes masked positions zero: that is the module's own affair.
    given = (*args, *kwargs.values())
    if module.training or len(given) != 1:
        return type(module).forward(module, *args, **kwargs)
    return given[0]
