"""InstanceNorm, GroupNorm, and what they share with BatchNorm: norms across positions, channels last by default."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit import functional as F
from normkit.checks import Eps, check_eps, check_float, check_mask
from normkit.conventions import TORCH_LAYER_NORM
from normkit.functional.ragged import is_jagged, refuse_mask
from normkit.modules.parameters import Affine, check_width

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_channels(x: Tensor, channels: int, channel_axis: int, owner: str) -> None:
    check_float(x, owner)
    if x.dim() < 2 or not -x.dim() <= channel_axis < x.dim() or x.shape[channel_axis] != channels:
        raise ValueError(
            f"{owner}: built for {channels} channels on axis {channel_axis}, got x of shape {tuple(x.shape)}; "
            "set channel_axis=1 for (N, C, …)"
        )


class Positions(Affine):
    """What the three have in common: channels, ε, the channel axis and an affine of (C,)."""

    def __init__(
        self,
        channels: int,
        eps: Eps,
        channel_axis: int,
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        owner = type(self).__name__
        self.num_features = check_width(channels, owner, "number of channels")
        self.eps = check_eps(eps, owner)
        self.channel_axis = channel_axis
        super().__init__((channels,), spec=TORCH_LAYER_NORM, weight=affine, bias=affine, device=device, dtype=dtype)

    def _mask(self, x: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
        _check_channels(x, self.num_features, self.channel_axis, type(self).__name__)
        if is_jagged(x):
            refuse_mask(x, lengths if mask is None else mask, type(self).__name__)
            return None
        return mask_from(x, mask, lengths, self.channel_axis, type(self).__name__)

    def extra_repr(self) -> str:
        """Show channels, ε and axis."""
        return f"{self.num_features}, eps={self.eps}, channel_axis={self.channel_axis}"


def mask_from(x: Tensor, mask: Tensor | None, lengths: Tensor | None, channel_axis: int, owner: str) -> Tensor | None:
    """Return the mask given, or the one that ``lengths`` (N,) mean for x (N, L, C) or (N, C, L).

    A length beyond L means all of L, one below 0 means nothing: asking for their extremes would stall a device.
    """
    if lengths is None:
        if mask is not None:
            check_mask(mask, x, channel_axis % x.dim(), owner)
        return mask
    if mask is not None:
        raise ValueError(f"{owner}: give mask or lengths, not both")
    if x.dim() != 3:
        raise ValueError(f"{owner}: lengths need x with one position axis, got shape {tuple(x.shape)}; give a mask")
    if not isinstance(lengths, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{owner}: lengths must be a tensor of {x.shape[0]} integers, got {type(lengths).__name__}")
    if lengths.dtype not in _INTEGERS or lengths.shape != (x.shape[0],):
        raise ValueError(
            f"{owner}: lengths must be {x.shape[0]} integers, one per sample, "
            f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    positions = x.shape[1] if channel_axis % 3 == 2 else x.shape[2]
    return torch.arange(positions, device=x.device) < lengths.to(x.device).unsqueeze(1)


class InstanceNorm(Positions):
    r"""Instance normalization of (N, L, C) over positions; see `normkit.instance_norm`. No running statistics.

    Args:
        num_features: C.
        eps: 1e-5, as torch's.
        channel_axis: −1 for (N, …, C), 1 for (N, C, …).
        affine: learn γ and β (torch's InstanceNorm1d does not unless asked).
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: as `normkit.instance_norm`.

    Example:
        >>> import torch, normkit as nk
        >>> nk.InstanceNorm(3)(torch.randn(2, 7, 3)).shape
        torch.Size([2, 7, 3])
    """

    def __init__(
        self,
        num_features: int,
        eps: Eps = 1e-5,
        *,
        channel_axis: int = -1,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, channel_axis, affine, device, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """Normalise x; masked-out positions count nowhere and come out as 0."""
        mask = self._mask(x, mask, lengths)
        return F.instance_norm(x, self.weight, self.bias, eps=self.eps, channel_axis=self.channel_axis, mask=mask)


class GroupNorm(Positions):
    r"""Group normalization of (N, L, C) over positions and C/G channels; see `normkit.group_norm`.

    Args:
        groups: G, which must divide C (torch's order: groups first).
        num_features: C.
        eps: 1e-5, as torch's.
        channel_axis: −1 for (N, …, C), 1 for (N, C, …).
        affine: learn γ and β.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: as `normkit.group_norm`.

    Example:
        >>> import torch, normkit as nk
        >>> nk.GroupNorm(3, 6)(torch.randn(2, 7, 6)).shape
        torch.Size([2, 7, 6])
    """

    def __init__(
        self,
        groups: int,
        num_features: int,
        eps: Eps = 1e-5,
        *,
        channel_axis: int = -1,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.groups = check_width(groups, "GroupNorm", "groups")
        if check_width(num_features, "GroupNorm", "num_features") % groups:
            raise ValueError(f"GroupNorm: groups must divide {num_features} channels, got {groups}")
        super().__init__(num_features, eps, channel_axis, affine, device, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """Normalise x; masked-out positions count nowhere and come out as 0."""
        mask = self._mask(x, mask, lengths)
        return F.group_norm(
            x, self.groups, self.weight, self.bias, eps=self.eps, channel_axis=self.channel_axis, mask=mask
        )

    def extra_repr(self) -> str:
        """Show groups, channels, ε and axis."""
        return f"{self.groups}, {super().extra_repr()}"
