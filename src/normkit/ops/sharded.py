"""Row norms of DTensors: every rank works on what it holds, and only what a row lacks goes over the wire.

Sharded on tokens, nothing does: the fused operator runs on the local rows, and gradients of weight and bias come out as
partial sums, to be reduced once, by whoever reduces gradients. Sharded on the normalised axis, a row's statistic is
summed over the ranks, one number a row forward and one backward (centred norms: two), and no activation is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.statistics import accumulation_dtype
from normkit.ops.ranks import together
from normkit.ops.watch import is_dtensor
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Layout:
    """How x lies: its mesh, and the mesh's axes that split the rows themselves."""

    x: DTensor
    axes: tuple[int, ...]
    name: str

    @property
    def within(self) -> tuple[int, ...]:
        """The mesh's axes along which a normalised axis of x is sharded."""
        return tuple(i for i, p in enumerate(self.x.placements) if p.is_shard() and self._dim(p) in self.axes)

    def _dim(self, placement: Any) -> int:
        return int(placement.dim) % self.x.dim()

    def check(self) -> None:
        """Refuse what cannot be normalised as it lies."""
        for p in self.x.placements:
            if p.is_partial():
                raise ValueError(
                    f"{self.name}: x is a partial sum ({p}); its norm is not the sum of norms. Reduce it first: "
                    "x.redistribute(placements=…) with Shard or Replicate there"
                )
            if not (p.is_shard() or p.is_replicate()):
                raise ValueError(f"{self.name}: x has the placement {p}; expected Shard or Replicate")

    def local(self, t: Tensor | None, what: str) -> Tensor | None:
        """Return this rank's part of a parameter that broadcasts to x, laid as x is, its gradient summed where due."""
        if t is None:
            return None
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if not isinstance(t, DTensor) or t.device_mesh != self.x.device_mesh:
            raise ValueError(
                f"{self.name}: x is a DTensor on {self.x.device_mesh}, so {what} must be one on the same mesh, or its "
                "gradient would miss other ranks' rows; distribute the module (parallelize_module with "
                "nk.NormParallel) or the parameter (distribute_tensor(…, [Replicate()]))"
            )
        missing = self.x.dim() - t.dim()
        lies: list[Any] = []
        gradient: list[Any] = []
        for p in self.x.placements:
            dim = self._dim(p) - missing if p.is_shard() else -1
            splits = p.is_shard() and dim >= 0 and t.shape[dim] != 1
            lies.append(Shard(dim) if splits else Replicate())
            gradient.append(Shard(dim) if splits else Partial() if p.is_shard() else Replicate())
        laid = t if tuple(t.placements) == tuple(lies) else t.redistribute(t.device_mesh, lies)
        return laid.to_local(grad_placements=gradient)

    def joined(self, y: Tensor) -> Tensor:
        """Return the DTensor whose local part is y, laid as x is."""
        from torch.distributed.tensor import DTensor

        placements, shape, stride = self.x.placements, self.x.shape, _contiguous(self.x.shape)
        return DTensor.from_local(y, self.x.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def total(self, sums: Tensor) -> Tensor:
        """Sum over the ranks that share a row, forward and backward."""
        for i in self.within:
            sums = _Total.apply(sums, self.x.device_mesh.get_group(i))  # type: ignore[assignment]
        return sums


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides))


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
    local: Norm,
    name: str,
) -> Tensor:
    """Normalise a DTensor; ``local`` is the norm of rows that lie whole on this rank.

    Raises:
        ValueError: x is a partial sum; a parameter is no DTensor on x's mesh; rows are sharded and the spec asks for
            what needs them whole.
    """
    layout = _Layout(_as_dtensor(x), axes, name)
    layout.check()
    w, b = layout.local(weight, "weight"), layout.local(bias, "bias")
    mine = layout.x.to_local(grad_placements=layout.x.placements)
    return layout.joined(local(mine, w, b) if not layout.within else _over_ranks(layout, mine, spec, w, b, eps))


def add_normalize(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    axes: tuple[int, ...],
    eps: float,
    local: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]],
    add: Callable[[Tensor, Tensor], Tensor],
    name: str,
) -> tuple[Tensor, Tensor]:
    """Add and normalise DTensors that lie alike; ``add`` forms the sum where rows are sharded."""
    layout, other = _Layout(_as_dtensor(x), axes, name), residual
    layout.check()
    if not is_dtensor(other) or _as_dtensor(other).placements != layout.x.placements:
        got = _as_dtensor(other).placements if is_dtensor(other) else "no DTensor"
        raise ValueError(f"{name}: residual must lie as x does, {layout.x.placements}, got {got}; redistribute it")
    w, b = layout.local(weight, "weight"), layout.local(bias, "bias")
    mine, stream = (_as_dtensor(t).to_local(grad_placements=layout.x.placements) for t in (x, residual))
    if not layout.within:
        y, s = local(mine, stream, w, b)
    else:
        s = add(mine, stream)
        y = _over_ranks(layout, s, spec, w, b, eps, target=mine.dtype)
    return layout.joined(y), layout.joined(s)


def _as_dtensor(x: Tensor) -> DTensor:
    return x  # type: ignore[return-value]


def _over_ranks(
    layout: _Layout,
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: torch.dtype | None = None,
) -> Tensor:
    """Normalise rows of which this rank holds a part: plain ATen around the sums over ranks, so autograd does the rest.

    Sums are float64, which holds the squares of any float32: no row has to be rescaled.
    """
    whole = spec.eps != "inside" or spec.statistic not in ("mean", "sum") or spec.statistic_dtype != "float32"
    if whole or spec.root_rounding != "none":
        raise ValueError(
            f"{layout.name}: rows are sharded over ranks, and {spec.code} needs them whole; gather x first "
            "(x.redistribute with Replicate), or shard tokens instead"
        )
    axes, work = list(layout.axes), accumulation_dtype(x.dtype)
    value, count = x.to(work), math.prod(layout.x.shape[a] for a in axes)
    if spec.centered:
        mean = layout.total(value.sum(axes, keepdim=True, dtype=torch.float64)) / count
        rounded = mean.to(work).detach()
        value = (value - rounded) - (mean - rounded).to(work)
    local = torch.linalg.vector_norm(value, dim=axes, keepdim=True, dtype=torch.float64)
    square = layout.total(local * local)
    inverse = (square / (count if spec.statistic == "mean" else 1) + eps).rsqrt()
    return reference.apply_weight(value * inverse.to(work), spec, weight, bias, target or x.dtype)


class _Total(torch.autograd.Function):
    """A sum over ranks whose result every rank uses: so is its gradient."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(sums, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(gradients[0], ctx.group), None  # type: ignore[return-value]


def _summed(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = sums.clone(memory_format=torch.contiguous_format)
    with together(group, "a norm of rows that lie on several ranks"):
        dist.all_reduce(total, group=group)  # pyright: ignore[reportUnknownMemberType]
    return total
