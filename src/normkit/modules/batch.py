"""BatchNorm: running statistics, frozen or moving, skipped, set by hand, shared over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from normkit.checks import Eps
from normkit.functional.positions import check_momentum, normalize_batch, remember
from normkit.kernels.contract import Found
from normkit.kernels.statistics import Moments
from normkit.modules.positions import Positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HALVES = (torch.float16, torch.bfloat16)
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_OfTorch = TypeVar("_OfTorch", bound=nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]


def recomputing() -> bool:
    """Say whether a backward is running in this thread: a forward then is activation checkpointing's second one."""
    # A compiler recomputes inside its own backward, without running this code again.
    return not torch.compiler.is_compiling() and _C._current_graph_task_id() >= 0


class _Ranks:
    """A process group that a copied module shares with its original; it cannot be pickled and is left out there."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ranks, (None,)


class BatchNorm(Positions):
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
        skip_nonfinite: a training batch whose statistics are not finite moves nothing, and is counted in
            ``num_batches_skipped`` (no part of the state dict). It asks the device once a forward.
        process_group: take statistics over the batches of all its ranks, as `normkit.batch_norm`. A pickled module
            comes back without one.
        device, dtype: of parameters. The running buffers are float32 (float64 for float64) and never become a half
            type, not even under ``half()`` or ``to(torch.bfloat16)``: 8 bits cannot hold a slowly moving mean.

    A forward inside a backward (activation checkpointing, reentrant or not, runs one) moves nothing: each batch counts
    once. Two forwards before a backward count twice, and each backward uses its own forward's statistics.

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
        skip_nonfinite: bool = False,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.momentum = None if momentum is None else check_momentum(momentum, "BatchNorm")
        self.frozen, self.skip_nonfinite, self.num_batches_skipped = False, skip_nonfinite, 0
        self._ranks = _Ranks(process_group)
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

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks whose batches share their statistics."""
        return self._ranks.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        self._ranks = _Ranks(group)

    def freeze(self, frozen: bool = True) -> BatchNorm:
        """Normalise by the running statistics and leave them as they are, also under ``train()``; or stop doing so.

        γ and β stay trainable: freeze them with ``requires_grad_(False)``.

        Raises:
            ValueError: there are no running statistics.

        Example:
            >>> import torch, normkit as nk
            >>> norm = nk.BatchNorm(3).freeze().train()
            >>> _ = norm(torch.randn(4, 5, 3))
            >>> int(norm.num_batches_tracked)
            0
        """
        if frozen and self.running_mean is None:
            raise ValueError("BatchNorm: freeze() needs running statistics, and track_running_stats=False keeps none")
        self.frozen = frozen
        return self

    def update_running_stats(self, moments: Moments) -> None:
        """Move the running statistics by moments taken elsewhere, as a training batch would; frozen or not.

        Args:
            moments: of shape (C,), such as ``normkit.moments(x, axes=(0, 1))``; merge several for one update.

        Raises:
            ValueError: there are no running statistics; the shape is another; a channel has fewer than two values.

        Example:
            >>> import torch, normkit as nk
            >>> norm = nk.BatchNorm(1, momentum=1.0)
            >>> norm.update_running_stats(nk.moments(torch.tensor([[1.0], [2.0], [3.0]]), axes=0))
            >>> norm.running_mean, norm.running_var
            (tensor([2.]), tensor([1.]))
        """
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            raise ValueError("BatchNorm: there are no running statistics to update (track_running_stats=False)")
        if moments.mean.shape != self.running_mean.shape:
            expected, got = tuple(self.running_mean.shape), tuple(moments.mean.shape)
            raise ValueError(f"BatchNorm: moments must have shape {expected}, one of each channel, got {got}")
        if bool((moments.count < 2).any()):
            raise ValueError("BatchNorm: moments of fewer than two values have no unbiased variance")
        self._move(Found(lambda: moments), self.running_mean, self.running_var, self.num_batches_tracked)

    def _move(self, found: Found, mean: Tensor, var: Tensor, tracked: Tensor) -> None:
        remember(mean, var, found, 1 / (int(tracked) + 1) if self.momentum is None else self.momentum)
        tracked.add_(1)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """Normalise x; masked-out positions (or those beyond ``lengths``) count nowhere and come out as 0."""
        weight, bias = self.held()
        mean, var, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        y, found = normalize_batch(
            x,
            mean,
            var,
            weight,
            bias,
            mask=self._mask(x, mask, lengths),
            training=self.training and not self.frozen,
            eps=self.eps,
            channel_axis=self.channel_axis,
            process_group=self._ranks.group,
        )
        if found is None or mean is None or var is None or tracked is None or recomputing():
            return y
        if self.skip_nonfinite:
            moments = found.moments()
            if not bool((moments.mean + moments.m2).isfinite().all()):
                self.num_batches_skipped += 1
                return y
        self._move(found, mean, var, tracked)
        return y

    @classmethod
    def from_torch(cls, module: nn.modules.batchnorm._BatchNorm) -> BatchNorm:  # pyright: ignore[reportPrivateUsage]
        """Return this norm of (N, C, …) with the parameters, buffers and mode of PyTorch's, which it shares.

        Args:
            module: BatchNorm1d, 2d or 3d, or SyncBatchNorm (whose process group it takes, the world's if it has none).

        Raises:
            TypeError: for any other module, lazy ones before their first batch among them.

        Example:
            >>> import torch, normkit as nk
            >>> theirs = torch.nn.BatchNorm2d(3).eval()
            >>> x = torch.randn(2, 3, 4, 4)
            >>> bool(torch.allclose(nk.BatchNorm.from_torch(theirs)(x), theirs(x), atol=1e-6))
            True
        """
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        given = type(module).__name__
        if not isinstance(module, kinds) or given.startswith("Lazy"):
            raise TypeError(f"BatchNorm.from_torch: expected BatchNorm1d/2d/3d or SyncBatchNorm, got {given}")
        ours = cls(
            module.num_features,
            module.eps,
            module.momentum,
            channel_axis=1,
            affine=module.affine,
            track_running_stats=module.track_running_stats,
            process_group=_group_of(module),
            device="meta",
        )
        _share(module, ours)
        return ours

    def to_torch(self, kind: type[_OfTorch]) -> _OfTorch:
        """Return PyTorch's ``kind`` (BatchNorm1d, 2d, 3d or SyncBatchNorm) with the parameters and buffers, shared.

        Raises:
            ValueError: channels are not on axis 1, or the norm is frozen; PyTorch's norms know neither.

        Example:
            >>> import torch, normkit as nk
            >>> nk.BatchNorm(3, channel_axis=1).to_torch(torch.nn.BatchNorm1d).running_mean
            tensor([0., 0., 0.])
        """
        if self.channel_axis != 1 or self.frozen:
            what = "is frozen" if self.frozen else f"has its channels on axis {self.channel_axis}"
            raise ValueError(f"BatchNorm.to_torch: this norm {what}; PyTorch's have them on axis 1 and cannot freeze")
        extra: dict[str, Any] = {"process_group": self.process_group} if issubclass(kind, nn.SyncBatchNorm) else {}
        theirs = kind(
            self.num_features,
            float(self.eps) if isinstance(self.eps, (int, float)) else torch.finfo(torch.float32).eps,
            self.momentum,
            self.weight is not None,
            self.running_mean is not None,
            device="meta",
            **extra,
        )
        _share(self, theirs)
        return theirs

    def extra_repr(self) -> str:
        """Show channels, ε, axis, momentum and whether statistics are remembered, frozen, skipped, shared."""
        tracks = self.running_mean is not None
        more = "".join(f", {name}=True" for name in ("frozen", "skip_nonfinite") if getattr(self, name))
        ranks = "" if self.process_group is None else f", process_group of {self.process_group.size()}"
        return f"{super().extra_repr()}, momentum={self.momentum}, track_running_stats={tracks}{more}{ranks}"


def _group_of(module: nn.Module) -> ProcessGroup | None:
    if not isinstance(module, nn.SyncBatchNorm):
        return None
    if module.process_group is not None:
        return module.process_group
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _share(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` hold the parameters and buffers of ``source``, and its mode."""
    target._parameters.update(source._parameters)  # pyright: ignore[reportPrivateUsage]
    target._buffers.update(source._buffers)  # pyright: ignore[reportPrivateUsage]
    target.training = source.training
