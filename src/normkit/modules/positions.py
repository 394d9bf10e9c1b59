"""BatchNorm, InstanceNorm, GroupNorm: norms across positions, channels last by default."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit import functional as F
from normkit.checks import Eps, check_eps, check_float, check_mask
from normkit.conventions import TORCH_LAYER_NORM
from normkit.functional.positions import check_momentum
from normkit.modules.parameters import Affine, check_width

_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_channels(x: Tensor, channels: int, channel_axis: int, owner: str) -> None:
    check_float(x, owner)
    if x.dim() < 2 or not -x.dim() <= channel_axis < x.dim() or x.shape[channel_axis] != channels:
        raise ValueError(
            f"{owner}: built for {channels} channels on axis {channel_axis}, got x of shape {tuple(x.shape)}; "
            "set channel_axis=1 for (N, C, …)"
        )


class _Positions(Affine):
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


class BatchNorm(_Positions):
    r"""Batch normalization of (N, L, C) over samples and positions; see `normkit.batch_norm`.

    State dict: ``weight``, ``bias``, ``running_mean``, ``running_var``, ``num_batches_tracked``, as
        torch.nn.BatchNorm1d's.

    Args:
        num_features: C.
        eps: 1e-5, as torch's.
        momentum: weight of the new statistic, from 0 to 1; None for the plain average over all batches.
        channel_axis: −1 for (N, …, C), 1 for (N, C, …).
        affine: learn γ and β.
        track_running_stats: remember statistics for inference; without them a batch's own are used in eval mode too.
        device, dtype: of parameters. The running buffers are float32 (float64 for float64) and never become a half
            type, not even under ``half()`` or ``to(torch.bfloat16)``: 8 bits cannot hold a slowly moving mean.

    Raises:
        TypeError, ValueError: as `normkit.batch_norm`; a training batch with one value per channel leaves everything
            untouched.

    Example:
        >>> import torch, normkit as nk
        >>> norm = nk.BatchNorm(3)
        >>> x = torch.randn(4, 5, 3)
        >>> y = norm(x, lengths=torch.tensor([5, 3, 1, 4]))
        >>> int(norm.num_batches_tracked), bool((y[2, 1:] == 0).all())
        (1, True)
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: Eps = 1e-5,
        momentum: float | None = 0.1,
        *,
        channel_axis: int = -1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.momentum = None if momentum is None else check_momentum(momentum, "BatchNorm")
        super().__init__(num_features, eps, channel_axis, affine, device, dtype)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32

        def buffer(shape: tuple[int, ...], kind: torch.dtype) -> Tensor | None:
            return torch.empty(shape, device=device, dtype=kind) if track_running_stats else None

        self.register_buffer("running_mean", buffer((num_features,), statistics))
        self.register_buffer("running_var", buffer((num_features,), statistics))
        self.register_buffer("num_batches_tracked", buffer((), torch.int64))
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget every batch: mean 0, variance 1, counter 0."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Reset γ, β and the running statistics."""
        super().reset_parameters()
        if "running_mean" in self._buffers:
            self.reset_running_stats()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm:
        """Move and cast as every module does, except that running statistics never become a half type."""
        before = {name: self._buffers[name] for name in ("running_mean", "running_var")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype in _HALVES and old.dtype not in _HALVES:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """Normalise x; masked-out positions (or those beyond ``lengths``) count nowhere and come out as 0."""
        mask = self._mask(x, mask, lengths)
        counter = self.num_batches_tracked if self.training else None
        # An empty batch must leave no trace, the counter included; so must a call that fails.
        tracked = counter is not None and x.numel() > 0 and (mask is None or bool(mask.any()))
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / (int(counter) + 1) if counter is not None and tracked else 0.0
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            mask=mask,
            training=self.training,
            momentum=momentum,
            eps=self.eps,
            channel_axis=self.channel_axis,
        )
        if counter is not None and tracked:
            counter.add_(1)
        return y

    def extra_repr(self) -> str:
        """Show channels, ε, axis, momentum and whether statistics are remembered."""
        tracks = self.running_mean is not None
        return f"{super().extra_repr()}, momentum={self.momentum}, track_running_stats={tracks}"


class InstanceNorm(_Positions):
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


class GroupNorm(_Positions):
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
