"""DyT and Derf: pointwise stand-ins for a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.conventions import TORCH_LAYER_NORM
from normkit.modules.parameters import Affine, check_last, check_width


class DyT(Affine):
    r"""``y = tanh(α·x) · w + b`` with a learned scalar α; see `normkit.dyt`.

    Args:
        dim: width of the last axis.
        alpha: α at the start; 0.5 is the paper's default, large language models want less outside attention.
        bias: learn β.
        device, dtype: of the parameters.

    Example:
        >>> import torch, normkit as nk
        >>> bool((nk.DyT(4)(100 * torch.randn(2, 4)).abs() <= 1).all())
        True
    """

    def __init__(
        self,
        dim: int,
        *,
        alpha: float = 0.5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dim = check_width(dim, "DyT")
        self.alpha_init = float(alpha)
        super().__init__((dim,), spec=TORCH_LAYER_NORM, weight=True, bias=bias, device=device, dtype=dtype)
        self.alpha = nn.Parameter(torch.full((), self.alpha_init, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set γ to 1, β to 0 and α to its starting value."""
        super().reset_parameters()
        if hasattr(self, "alpha"):
            nn.init.constant_(self.alpha, self.alpha_init)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x (…, dim)."""
        check_last(x, self.dim, type(self).__name__)
        return F.dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show width and starting α."""
        return f"{self.dim}, alpha={self.alpha_init}"


class Derf(DyT):
    r"""``y = erf(α·x + s) · w + b`` with learned scalars α and s (0 at the start); see `normkit.derf`.

    Args:
        dim, alpha, bias, device, dtype: as `DyT`.

    Example:
        >>> import torch, normkit as nk
        >>> nk.Derf(4)(torch.zeros(1, 4)).detach()
        tensor([[0., 0., 0., 0.]])
    """

    def __init__(
        self,
        dim: int,
        *,
        alpha: float = 0.5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, alpha=alpha, bias=bias, device=device, dtype=dtype)
        self.shift = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set γ to 1, β and s to 0, α to its starting value."""
        super().reset_parameters()
        if hasattr(self, "shift"):
            nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x (…, dim)."""
        check_last(x, self.dim, "Derf")
        return F.derf(x, self.alpha, self.shift, self.weight, self.bias)
