"""LayerNorm, RMSNorm, ScaleNorm: norms of the last axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import Eps, check_eps
from normkit.conventions import SCALE_NORM, TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.modules.parameters import Affine, check_last, check_width
from normkit.spec import NormSpec


class LayerNorm(Affine):
    r"""``y = (x − μ) / √(σ² + ε) · w + b`` over the last axis; see `normkit.layer_norm` for dtypes and rounding.

    State dict: ``weight``, ``bias``, each (dim,), as torch.nn.LayerNorm's.

    Args:
        dim: width of the last axis.
        eps: 1e-5, as torch's.
        spec: a centred convention.
        bias: learn β.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: a dim below 1, eps=None, a spec that is not centred; in ``forward``, x of another width.

    Example:
        >>> import torch, normkit as nk
        >>> nk.LayerNorm(4)(torch.randn(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        dim: int,
        eps: Eps = 1e-5,
        *,
        spec: NormSpec = TORCH_LAYER_NORM,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dim = check_width(dim, "LayerNorm")
        self.eps = check_eps(eps, "LayerNorm")
        if spec.kind != "layer":
            raise ValueError(f"LayerNorm: expected a centred spec, got {spec.code}; use RMSNorm")
        super().__init__((dim,), spec=spec, weight=True, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (…, dim)."""
        weight, bias = self.held()
        if weight is not None:  # which no row of another width can pass
            y = self.quickly(x, weight, bias)
            if y is not None:
                return y
        check_last(x, self.dim, "LayerNorm")
        return F.layer_norm(x, weight, bias, eps=self.eps, spec=self.spec)

    def extra_repr(self) -> str:
        """Show width, ε and spec."""
        return f"{self.dim}, eps={self.eps}, spec={self.spec.code}"


class RMSNorm(Affine):
    r"""``y = x / √(mean(x²) + ε) · w`` over the last axis; see `normkit.rms_norm` for dtypes and rounding.

    State dict: ``weight`` (dim,) and, if asked for, ``bias``. A ``spec`` with ``weight="one_plus"`` (Gemma) stores w
        = γ − 1
    and starts at 0.

    Args:
        dim: width of the last axis.
        eps: 1e-6; nn.RMSNorm's None is `TORCH_DEFAULT`.
        spec: an rms convention: ``nk.LLAMA``, ``nk.GEMMA``, ``nk.OLMO2``, ``nk.T5``, ``nk.WEIGHTLESS_RMS``, …
        bias: learn β (off, as in nearly every model).
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: a dim below 1, eps=None, a spec that is no rms norm; in ``forward``, x of another width.

    Example:
        >>> import torch, normkit as nk
        >>> norm = nk.RMSNorm(4, spec=nk.GEMMA)
        >>> norm.weight.detach()
        tensor([0., 0., 0., 0.])
    """

    def __init__(
        self,
        dim: int,
        eps: Eps = 1e-6,
        *,
        spec: NormSpec = TORCH_RMS_NORM,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dim = check_width(dim, "RMSNorm")
        self.eps = check_eps(eps, "RMSNorm")
        if spec.kind != "rms" or spec.gate != "none":
            raise ValueError(f"RMSNorm: expected an ungated rms spec, got {spec.code}")
        super().__init__((dim,), spec=spec, weight=True, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (…, dim)."""
        weight, bias = self.held()
        if weight is not None:  # which no row of another width can pass
            y = self.quickly(x, weight, bias)
            if y is not None:
                return y
        check_last(x, self.dim, "RMSNorm")
        return F.rms_norm(x, weight, bias, eps=self.eps, spec=self.spec)

    def extra_repr(self) -> str:
        """Show width, ε and spec."""
        return f"{self.dim}, eps={self.eps}, spec={self.spec.code}"


class ScaleNorm(nn.Module):
    r"""``y = g · x / max(‖x‖, ε)`` over the last axis with one learned scalar g, √dim at the start.

    Args:
        dim: width of the last axis.
        eps: lower bound of the length.
        device, dtype: of g.

    Raises:
        TypeError, ValueError: a dim below 1, eps=None; in ``forward``, x of another width.

    Source: Nguyen and Salazar 2019, arXiv 1910.05895.

    Example:
        >>> import torch, normkit as nk
        >>> nk.ScaleNorm(4)(torch.tensor([3.0, 4.0, 0.0, 0.0])).detach()
        tensor([1.2000, 1.6000, 0.0000, 0.0000])
    """

    def __init__(
        self,
        dim: int,
        eps: Eps = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = check_width(dim, "ScaleNorm")
        self.eps = check_eps(eps, "ScaleNorm")
        self.spec = SCALE_NORM
        self.weight = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set g to √dim."""
        nn.init.constant_(self.weight, self.dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (…, dim)."""
        check_last(x, self.dim, "ScaleNorm")
        return F.scale_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        """Show width and ε."""
        return f"{self.dim}, eps={self.eps}"
