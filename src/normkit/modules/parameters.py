"""The affine parameters of a norm: made, reset and described in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import check_nested
from normkit.ops.rows import known, quick, recall
from normkit.ops.watch import watched
from normkit.spec import NormSpec


def check_width(width: object, owner: str, what: str = "dim") -> int:
    """Return a positive int, or raise."""
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"{owner}: {what} must be an int, got {type(width).__name__}")
    if width < 1:
        raise ValueError(f"{owner}: {what} must be at least 1, got {width}")
    return width


def check_last(x: Tensor, width: int, owner: str) -> None:
    """Raise unless x's last axis has the width the module was built for."""
    check_nested(x, owner)
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(
            f"{owner}: built for width {width}, got x of shape {tuple(x.shape)}; "
            "the normalised axis is the last (use the function for another axis)"
        )


class Affine(nn.Module):
    """A module with an optional weight and bias, whose resting values make γ = 1 and β = 0 under ``spec``."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: Any

    def __init__(
        self,
        shape: Sequence[int],
        *,
        spec: NormSpec,
        weight: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.spec = spec

        def parameter(wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)) if wanted else None

        self.register_parameter("weight", parameter(weight and spec.weight != "none"))
        self.register_parameter("bias", parameter(bias))
        self.reset_parameters()

    def held(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias.

        Straight from where nn.Module keeps them: its attribute access takes 0.45 µs each, a tenth of a norm of 4096
        (`python benchmarks/launch.py`).
        Where somebody made them properties or plain attributes (parametrizations, sharding wrappers), by attribute.
        """
        kept = self._parameters
        try:
            return kept["weight"], kept["bias"]
        except KeyError:
            return self.weight, self.bias

    def quickly(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the norm of contiguous rows by the shortest way; None where the function must decide or complain."""
        spec, eps = self.spec, self.eps
        if watched():
            return quick(x, weight, bias, eps, spec)
        remembered = self.__dict__.get("_known")
        if remembered is not None:
            y = recall(x, weight, bias, eps, spec, remembered)
            if y is not None:
                return y
        y = quick(x, weight, bias, eps, spec)
        if y is not None:
            self.__dict__["_known"] = known(x, weight, bias, eps, spec)
        return y

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only remembered: a copy has parameters of its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def reset_parameters(self) -> None:
        """Set γ to 1 (a weight of 1, or 0 where the spec adds 1) and β to 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.spec.weight.startswith("one_plus") else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
