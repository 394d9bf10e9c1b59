"""Jagged nested tensors (``layout=torch.jagged``): samples of different lengths, one after the other, unpadded.

A row norm runs on all rows at once, as they lie in ``values()``; so does batch norm, whose statistics are those of all
positions. Statistics of a sample need its positions side by side: those samples are padded to the longest, and the
padding masked out. The result has the offsets of x, the same object, so that PyTorch knows the two to be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from normkit.checks import check_axes, check_float


def is_jagged(x: object) -> bool:
    """Say whether x is a nested tensor; `normkit.checks.check_float` refuses those of another layout."""
    return isinstance(x, Tensor) and x.is_nested


@dataclass(frozen=True)
class Ragged:
    """A jagged x (N, …, j, …): what is computed on its values, and the way back.

    Args:
        x: the nested tensor.
        name: who is called, for messages.
        axis: the ragged one among x's.
        values: x without its batch axis, the ragged axis holding all samples.
        real: bool, which places along the ragged axis of ``values`` belong to x; None for all.
    """

    x: Tensor
    name: str
    axis: int
    values: Tensor
    real: Tensor | None

    @property
    def offsets(self) -> Tensor:
        """Where each sample begins in ``values``, and where the last ends."""
        return cast(Any, self.x).offsets()  # type: ignore[no-any-return]

    def axes(self, axes: int | Sequence[int]) -> tuple[int, ...]:
        """Return the axes of ``values`` that a row of x runs over.

        Raises:
            ValueError: one of them is the batch axis or the ragged one.
        """
        given = check_axes(axes, self.x, self.name)
        if 0 in given or self.axis in given:
            what = "batch" if 0 in given else "ragged"
            raise ValueError(
                f"{self.name}: axis {0 if 0 in given else self.axis} is the {what} axis of the jagged x {self.shape}; "
                "a row lies within one position. Statistics over positions: batch_norm, instance_norm, group_norm, "
                "moments"
            )
        return tuple(a - 1 for a in given)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of x, j1 standing for the ragged axis."""
        return tuple(self.x.shape)

    def parameter(self, p: Tensor | None, what: str, axes: tuple[int, ...] | None = None) -> Tensor | None:
        """Return a parameter that broadcasts to x as one that broadcasts to ``values``.

        Raises:
            ValueError: it differs from sample to sample or from position to position.
        """
        if p is None or not p.dim():
            return p
        check_float(p, self.name, what)
        if axes is not None and tuple(p.shape) == tuple(self.values.shape[a] for a in axes):
            return p
        along = self.axis - self.x.dim() + p.dim()  # where the ragged axis would lie in p
        whole = p.dim() < self.x.dim() or p.shape[0] == 1
        if p.dim() > self.x.dim() or not whole or (along >= 0 and p.shape[along] != 1):
            raise ValueError(
                f"{self.name}: {what} of shape {tuple(p.shape)} is not one for all positions of the jagged x "
                f"{self.shape}; give it x's shape along the normalised axes"
            )
        return p.squeeze(0) if p.dim() == self.x.dim() else p

    def alike(self, other: Tensor, what: str) -> Tensor:
        """Return the values of a tensor whose samples lie as x's do.

        Raises:
            ValueError: it is dense, or jagged with other offsets or of another shape.
        """
        check_float(other, self.name, what)
        if not other.is_nested:
            raise ValueError(
                f"{self.name}: x is jagged, {what} is dense {tuple(other.shape)}; both must have the same offsets: "
                f"torch.nested.nested_tensor_from_jagged(values, x.offsets()), or pad both and give a mask"
            )
        if tuple(other.shape) != self.shape:
            raise ValueError(
                f"{self.name}: x {self.shape} and {what} {tuple(other.shape)} must have one shape and one offsets "
                f"tensor, the same object; make {what} with torch.nested.nested_tensor_from_jagged(values, x.offsets())"
            )
        return _filled(other.values(), self.real, self.axis - 1)

    def joined(self, values: Tensor) -> Tensor:
        """Return the jagged tensor with these values and x's offsets."""
        x = cast(Any, self.x)
        return torch.nested.nested_tensor_from_jagged(
            _filled(values, self.real, self.axis - 1),
            self.offsets,
            x.lengths(),
            jagged_dim=self.axis,
            # Kept by x where somebody asked for them; attention asks again, and a device then has to answer.
            min_seqlen=getattr(x, "_maybe_min_seqlen", None),
            max_seqlen=getattr(x, "_maybe_max_seqlen", None),
        )

    def channel(self, channel_axis: int) -> int:
        """Return the channel axis of x.

        Raises:
            ValueError: it is the batch axis or the ragged one.
        """
        (channel,) = check_axes(channel_axis, self.x, self.name)
        if channel in (0, self.axis):
            what = "batch" if channel == 0 else "ragged"
            raise ValueError(
                f"{self.name}: channel_axis {channel_axis} is the {what} axis of the jagged x {self.shape}"
            )
        return channel

    def together(self) -> tuple[Tensor, Tensor | None]:
        """Return the positions of all samples as one sample, (1, …), and the mask of those that are x's, or None."""
        shape = [-1 if a == self.axis else 1 for a in range(self.x.dim())]
        return self.values.unsqueeze(0), None if self.real is None else self.real.view(shape)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return x padded to its longest sample, and the mask of what is real, which broadcasts to it."""
        begins, lengths = self.offsets[:-1], _lengths(self.x)
        rows = self.values.movedim(self.axis - 1, 0)
        within = torch.arange(int(lengths.max()) if len(lengths) else 0, device=begins.device)
        real = within < lengths.unsqueeze(1)
        # What lies beyond a sample's end is masked out; it only has to be somewhere in memory.
        index = (begins.unsqueeze(1) + within).clamp(max=max(len(rows) - 1, 0))
        padded = rows[index].movedim(1, self.axis)
        return padded, real.view([n if a in (0, self.axis) else 1 for a, n in enumerate(padded.shape)])

    def unpadded(self, y: Tensor) -> Tensor:
        """Return the values of the padded ``y``; what is not x's is 0."""
        begins, lengths = self.offsets[:-1], _lengths(self.x)
        rows = y.movedim(self.axis, 1)
        real = torch.arange(rows.shape[1], device=begins.device) < lengths.unsqueeze(1)
        kept = rows[real]
        if self.real is not None:
            whole = kept.new_zeros((len(self.real), *kept.shape[1:]))
            kept = whole.index_copy(0, self.real.nonzero().view(-1), kept)
        return kept.movedim(0, self.axis - 1)


def _lengths(x: Tensor) -> Tensor:
    lengths = cast(Any, x).lengths()
    return cast(Any, x).offsets().diff() if lengths is None else lengths


def _filled(values: Tensor, real: Tensor | None, axis: int) -> Tensor:
    """Set to 0 what does not belong to x, forward and backward: it may be anything, NaN included."""
    if real is None:
        return values
    shape = [-1 if a == axis else 1 for a in range(values.dim())]
    return torch.where(real.view(shape), values, torch.zeros((), dtype=values.dtype, device=values.device))


def opened(x: Tensor, name: str, *, crossing: bool = False) -> Ragged:
    """Return a jagged x taken apart.

    Args:
        x: the nested tensor.
        name: who is called.
        crossing: statistics run over positions, so that places before the first sample and beyond the last must not
            be counted; to know of any, the offsets are read. (A compiler cannot, and takes it that there are none.)
    """
    check_float(x, name)
    axis = int(cast(Any, x)._ragged_idx)
    raw = x.values()
    real = _real(x, raw.shape[axis - 1], crossing)
    return Ragged(x, name, axis, _filled(raw, real, axis - 1), real)


def _real(x: Tensor, total: int, crossing: bool) -> Tensor | None:
    """Return which of ``total`` places belong to a sample, or None where all do."""
    offsets: Tensor = cast(Any, x).offsets()
    dense = cast(Any, x).lengths() is None
    if dense and (not crossing or torch.compiler.is_compiling()):
        return None
    if dense and int(offsets[0]) == 0 and int(offsets[-1]) == total:
        return None
    ends = offsets[:-1] + _lengths(x)
    place = torch.arange(total, device=offsets.device)
    sample = torch.searchsorted(offsets[:-1].contiguous(), place, right=True) - 1
    return (sample >= 0) & (place < ends[sample.clamp(min=0)])


def over_samples(
    x: Tensor, name: str, channel_axis: int, run: Callable[[Tensor, Tensor | None, int], Tensor]
) -> Tensor:
    """Return a norm with statistics of each sample, ``run(padded, mask without the channel axis, channel axis)``.

    Raises:
        RuntimeError: under a compiler; how long the longest sample is must be known.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name}: a jagged x cannot be compiled here, for the length of its longest sample is data; leave this "
            "norm out of the graph (torch.compiler.disable), or give a padded x and a mask"
        )
    ragged = opened(x, name, crossing=True)
    channel = ragged.channel(channel_axis)
    padded, real = ragged.padded()
    mask = real.squeeze(channel).expand([n for a, n in enumerate(padded.shape) if a != channel])
    return ragged.joined(ragged.unpadded(run(padded, mask, channel)))


def refuse_mask(x: Tensor, mask: object, name: str) -> None:
    """Refuse a mask (or lengths) beside a jagged x, which says itself what is real."""
    if mask is not None:
        raise ValueError(
            f"{name}: x is jagged {tuple(x.shape)} and holds real positions only; leave mask and lengths away"
        )
