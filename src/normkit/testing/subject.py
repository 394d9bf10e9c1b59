"""Whatever is being checked, behind one call: a function, a module, or a module's class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import TORCH_DEFAULT, eps_value
from normkit.spec import NormSpec
from normkit.testing.inputs import Inputs, replace

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")


class Subject:
    """A norm under test.

    Args:
        fn: a function (x, weight, eps); with ``bias`` (x, weight, bias, eps); with ``residual`` the residual comes
            second and the result is y or (y, sum). Or an ``nn.Module``, whose parameters are replaced call by call
            and whose width and ε stay; or a module's class (or a ``functools.partial`` of one), built for each
            width and ε.
        spec: what it is meant to compute.
        residual, bias: the form of ``fn``.
        eps: ε of a module that does not show its own.

    Raises:
        TypeError: ``fn`` is none of these.
        ValueError: a gated spec; a module whose ε or parameters cannot be told.
    """

    def __init__(
        self,
        fn: object,
        spec: NormSpec,
        *,
        residual: bool = False,
        bias: bool = False,
        eps: float | None = None,
        device: str = "cpu",
    ) -> None:
        if spec.gate != "none":
            raise ValueError(f"check: {spec.code} has a gate; the kit checks norms of one input, or with a residual")
        self.spec, self.residual, self.device = spec, residual, torch.device(device)
        self.corrected = True
        self.width: int | None = None
        self.eps = eps
        self.takes_weight, self.takes_bias = spec.weight != "none", bias
        self._make: Callable[[int, float], nn.Module] | None = None
        if isinstance(fn, nn.Module):
            module = fn
            self._read(module, fixed=True)
            self._make = lambda width, eps: module
        elif isinstance(fn, type) or (isinstance(fn, partial) and isinstance(fn.func, type)):
            self._make = self._factory(fn)
            self._read(self._make(8, 1e-6), fixed=False)
        elif not callable(fn):
            raise TypeError(f"check: expected a function, an nn.Module or a module's class, got {type(fn).__name__}")
        self.fn: Any = fn

    def held_to(self, *, corrected: bool) -> Subject:
        """Return the same subject, held to a corrected or to a plain two-pass (see `normkit.testing.truth`)."""
        same = copy.copy(self)
        same.corrected = corrected
        return same

    def _factory(self, fn: Any) -> Callable[[int, float], nn.Module]:
        cls: Any = fn.func if isinstance(fn, partial) else fn
        if not issubclass(cls, nn.Module):
            raise TypeError(
                f"check: expected a function, an nn.Module or a module's class, got the class {cls.__name__}"
            )
        return lambda width, eps: fn(width, eps=eps)

    def _read(self, module: nn.Module, *, fixed: bool) -> None:
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight") if "weight" in parameters else next(iter(parameters.values()), None)
        self.takes_weight, self.takes_bias = weight is not None, "bias" in parameters
        if not fixed:
            return
        if weight is None or weight.dim() != 1:
            raise ValueError(
                f"check: cannot tell the width of {type(module).__name__} without a one-dimensional weight; "
                "pass its class, or a function (x, weight, eps)"
            )
        self.width = weight.shape[0]
        found = [getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)]
        if self.eps is None:
            if not found:
                raise ValueError(f"check: {type(module).__name__} shows no ε; pass eps= with the value it uses")
            self.eps = eps_value(TORCH_DEFAULT if found[0] is None else found[0], torch.float32)

    def fit(self, given: Inputs) -> Inputs | None:
        """Return the inputs as this subject can take them, or None where its width forbids them."""
        width = given.x.shape[-1]
        if self.width is not None and width != self.width:
            return None
        weight, bias, residual = given.weight, given.bias, given.residual
        if not self.takes_weight:
            weight = None
        elif weight is None and self._make is not None:
            weight = torch.full((width,), 0.0 if self.spec.weight.startswith("one_plus") else 1.0, dtype=given.x.dtype)
        if not self.takes_bias:
            bias = None
        elif bias is None and self._make is not None:
            bias = torch.zeros(width, dtype=given.x.dtype)
        if not self.residual:
            residual = None
        elif residual is None:
            residual = torch.zeros_like(given.x)
        fitted = Inputs(given.x, weight, bias, residual, given.eps if self.eps is None else self.eps, given.dy)
        if self.device.type == "cpu":
            return fitted
        return replace(fitted, **{name: t.to(self.device) for name, t in fitted.tensors().items()})

    def __call__(self, given: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return y, and the sum where the subject gives one."""
        streams = (given.x, given.residual) if self.residual else (given.x,)
        if self._make is not None:
            module = self._make(given.x.shape[-1], given.eps).to(self.device)
            result = torch.func.functional_call(module, self._parameters(module, given), streams)
        else:
            parameters = (given.weight, given.bias) if self.takes_bias else (given.weight,)
            result = self.fn(*streams, *parameters, given.eps)
        if isinstance(result, (tuple, list)):
            return result[0], result[1] if len(result) > 1 else None
        return result, None

    def _parameters(self, module: nn.Module, given: Inputs) -> dict[str, Tensor]:
        names = [name for name, _ in module.named_parameters()]
        found: dict[str, Tensor] = {}
        if given.bias is not None and "bias" in names:
            found["bias"] = given.bias
        if given.weight is not None and names:
            found["weight" if "weight" in names else names[0]] = given.weight
        return found
