"""QKNorm: queries and keys normalised between their projections and the rotary embedding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import Eps, check_eps, check_nested
from normkit.conventions import TORCH_RMS_NORM
from normkit.modules.parameters import Affine, check_width
from normkit.spec import NormSpec


class HeadNorm(Affine):
    """The norm of one of q and k: statistics per head or over all heads, weight shared, per head or absent.

    Made by `QKNorm`; x is (…, heads, head_dim).
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        coverage: str,
        weight: str,
        eps: Eps,
        spec: NormSpec,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        self.axes = (-1,) if coverage == "head" else (-2, -1)
        # A full-width weight is stored flat, as checkpoints of models that normalise before the split into heads
        # have it.
        shape = {
            "shared": (head_dim,),
            "per-head": (heads, head_dim),
            "full": (heads * head_dim,),
            "none": (head_dim,),
        }[weight]
        super().__init__(shape, spec=spec, weight=weight != "none", bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, heads, head_dim)."""
        check_nested(x, "QKNorm")
        if x.dim() < 2 or tuple(x.shape[-2:]) != (self.heads, self.head_dim):
            raise ValueError(
                f"QKNorm: expected (…, heads {self.heads}, head_dim {self.head_dim}), got {tuple(x.shape)}; "
                "split the projection into heads first, e.g. q.view(B, L, H, D)"
            )
        weight = self.weight
        if weight is not None and weight.dim() == 1 and len(self.axes) == 2:
            weight = weight.unflatten(0, (self.heads, self.head_dim))
        return F.normalize(x, self.spec, weight, axes=self.axes, eps=self.eps)

    def extra_repr(self) -> str:
        """Show sizes, axes, ε and spec."""
        return f"{self.heads}, {self.head_dim}, axes={self.axes}, eps={self.eps}, spec={self.spec.code}"


class QKNorm(nn.Module):
    r"""Normalise queries and keys, after their projections and **before** RoPE.

    Before, because a weight per dimension does not commute with the rotation: normed after it, a logit at a fixed
        offset
    depends on the absolute position.

    ======================  ===========================  ==========================================
    statistics over         weight                       models
    ======================  ===========================  ==========================================
    head_dim (default)      shared by the heads          Qwen3, Gemma 3 (spec=GEMMA), GLM-4.5
    head_dim                per head                     Cohere, Chameleon (spec=TORCH_LAYER_NORM)
    heads × head_dim        full width                   OLMo 2 and 3, MiniMax-M2
    head_dim                none                         nanochat, Llama 4 (spec=WEIGHTLESS_RMS)
    ======================  ===========================  ==========================================

    Args:
        head_dim: D.
        num_heads: H, heads of q.
        num_kv_heads: heads of k; H by default.
        coverage: ``"head"`` or ``"full"`` (all heads share a statistic).
        per_head_weight: weights (H, D) instead of (D,); with ``coverage="head"`` only.
        eps: 1e-6 unless given.
        spec: an ungated convention.
        device, dtype: of the weights.

    Shapes: q (…, H, D), k (…, H_kv, D); returned alike, in their own dtypes unless the spec promotes.

    Raises:
        TypeError, ValueError: sizes below 1, eps=None, a gated spec, per-head weights with full coverage; in
            ``forward``, q or k not split into heads.

    Source: Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442.

    Example:
        >>> import torch, normkit as nk
        >>> q, k = nk.QKNorm(16, 4, num_kv_heads=2)(torch.randn(1, 7, 4, 16), torch.randn(1, 7, 2, 16))
        >>> q.shape, k.shape
        (torch.Size([1, 7, 4, 16]), torch.Size([1, 7, 2, 16]))
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        coverage: Literal["head", "full"] = "head",
        per_head_weight: bool = False,
        eps: Eps = 1e-6,
        spec: NormSpec = TORCH_RMS_NORM,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if coverage not in ("head", "full"):
            raise ValueError(f"QKNorm: coverage must be 'head' or 'full', got {coverage!r}")
        if spec.gate != "none":
            raise ValueError(f"QKNorm: expected an ungated spec, got {spec.code}")
        if per_head_weight and coverage == "full":
            raise ValueError("QKNorm: full coverage has a weight per head and dimension already; drop per_head_weight")
        check_width(head_dim, "QKNorm", "head_dim")
        eps = check_eps(eps, "QKNorm")
        weight = "full" if coverage == "full" else "per-head" if per_head_weight else "shared"
        weight = "none" if spec.weight == "none" else weight

        def norm(heads: int, what: str) -> HeadNorm:
            return HeadNorm(
                check_width(heads, "QKNorm", what),
                head_dim,
                coverage=coverage,
                weight=weight,
                eps=eps,
                spec=spec,
                device=device,
                dtype=dtype,
            )

        self.q_norm = norm(num_heads, "num_heads")
        self.k_norm = norm(num_heads if num_kv_heads is None else num_kv_heads, "num_kv_heads")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised q and k; rotate them afterwards."""
        return self.q_norm(q), self.k_norm(k)
