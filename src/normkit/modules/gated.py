"""GatedRMSNorm: the output norm of Mamba-2 and of gated linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit import functional as F
from normkit.checks import Eps, check_eps
from normkit.conventions import GATED_RMS
from normkit.modules.parameters import Affine, check_last, check_width
from normkit.spec import NormSpec


class GatedRMSNorm(Affine):
    r"""``RMS(x)·w·a(g)`` or, gate first, ``RMS(x·a(g))·w``; see `normkit.gated_rms_norm`.

    Args:
        dim: width of the last axis.
        eps: 1e-6 unless given.
        group_size: elements per statistic; dim by default.
        spec: a gated rms convention, which fixes the gate's place, its activation and the roundings.
        device, dtype: of the weight.

    Raises:
        TypeError, ValueError: a dim below 1, a group size that does not divide it, eps=None, an ungated spec.

    Example:
        >>> import torch, normkit as nk
        >>> norm = nk.GatedRMSNorm(8, group_size=4, spec=nk.MAMBA2)
        >>> norm(torch.randn(2, 8), torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        dim: int,
        eps: Eps = 1e-6,
        *,
        group_size: int | None = None,
        spec: NormSpec = GATED_RMS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dim = check_width(dim, "GatedRMSNorm")
        self.eps = check_eps(eps, "GatedRMSNorm")
        if spec.gate == "none" or spec.kind != "rms":
            raise ValueError(f"GatedRMSNorm: expected a gated rms spec, got {spec.code}")
        if group_size is not None and (group_size < 1 or dim % group_size):
            raise ValueError(f"GatedRMSNorm: group_size must divide {dim}, got {group_size}")
        self.group_size = group_size
        super().__init__((dim,), spec=spec, weight=True, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise the last axis of x (…, dim), gated by ``gate`` of the same shape."""
        check_last(x, self.dim, "GatedRMSNorm")
        return F.gated_rms_norm(x, gate, self.weight, group_size=self.group_size, eps=self.eps, spec=self.spec)

    def extra_repr(self) -> str:
        """Show width, ε, groups and spec."""
        return f"{self.dim}, eps={self.eps}, group_size={self.group_size}, spec={self.spec.code}"
