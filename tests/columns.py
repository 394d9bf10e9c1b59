"""Norms across positions held to float64: every statistic becomes a row of valid elements, and rows have a truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import normkit as nk
from normkit.testing import truth
from rows import randn

SPEC = nk.TORCH_LAYER_NORM
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A norm ("batch", "instance" or a number of groups) and what it is given, channels last."""

    norm: str | int
    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    mask: Tensor | None = None
    eps: float = EPS

    @classmethod
    def draw(cls, norm: str | int, n: int, length: int, c: int, dtype: torch.dtype = torch.float32) -> Case:
        """Return random inputs of a mean that is not 0."""
        x, dy = randn(n, length, c) * 2 + 3, randn(n, length, c, seed=1)
        return cls(norm, x.to(dtype), randn(c, seed=2), randn(c, seed=3), dy.to(dtype))

    def masked(self, share: float = 0.6) -> Case:
        """Return the same with a random mask."""
        n, length, _ = self.x.shape
        return replace(self, mask=randn(n, length, seed=4) < torch.distributions.Normal(0, 1).icdf(torch.tensor(share)))

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, channel_axis: int = -1) -> Tensor:
        """Run the norm."""
        options = {"eps": self.eps, "mask": self.mask, "channel_axis": channel_axis}
        if self.norm == "batch":
            return nk.batch_norm(x, None, None, weight, bias, training=True, **options)  # type: ignore[arg-type]
        if self.norm == "instance":
            return nk.instance_norm(x, weight, bias, **options)  # type: ignore[arg-type]
        assert isinstance(self.norm, int)
        return nk.group_norm(x, self.norm, weight, bias, **options)  # type: ignore[arg-type]

    def run(self, first: bool = False) -> list[Tensor]:
        """Return y, dx, dw, db, always channels last; ``first`` computes them with positions side by side."""
        x, dy = (t.mT.contiguous() if first else t for t in (self.x, self.dy))
        leaves = [t.detach().clone().requires_grad_() for t in (x, self.weight, self.bias)]
        y = self.call(*leaves, channel_axis=1 if first else -1)
        dx, dw, db = torch.autograd.grad(y, leaves, dy)
        y = y.detach()
        return [y.mT, dx.mT, dw, db] if first else [y, dx, dw, db]

    def segments(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the valid positions that share statistics, as a mask, and how many channels form a group."""
        n, length, c = self.x.shape
        mask = torch.ones(n, length, dtype=torch.bool) if self.mask is None else self.mask.expand(n, length)
        if self.norm == "batch":
            yield mask, 1
            return
        for i in range(n):
            yield mask & (torch.arange(n) == i).unsqueeze(1), 1 if self.norm == "instance" else c // int(self.norm)

    def check(self, got: list[Tensor]) -> None:
        """Fail where a result lies outside what float32 statistics allow."""
        y, dx, dw, db = got
        seen = torch.zeros(self.x.shape[:2], dtype=torch.bool)
        sums: list[truth.Gradients] = []
        for where, depth in self.segments():
            if not where.any():
                continue
            seen |= where

            def rows(t: Tensor, where: Tensor = where, depth: int = depth) -> Tensor:
                return t[where].T.reshape(-1, depth * int(where.sum()))

            w, b = (rows(p.expand(self.x.shape)) for p in (self.weight, self.bias))
            x = rows(self.x)
            assert not truth.forward(x, SPEC, w, b, self.eps, self.x.dtype).wrong(rows(y)).any()
            exact = truth.backward(x, SPEC, w, self.eps, rows(self.dy))
            assert not exact.dx.wrong(rows(dx)).any()
            c = self.x.shape[2]
            per = [truth.Gradient(*(t.reshape(c, -1) for t in vars(g).values())) for g in (exact.dw, exact.db)]
            sums.append(truth.Gradients(exact.dx, *per))
        assert not y[~seen].any()
        assert not dx[~seen].any()
        for g, p, what in ((dw, self.weight, "dw"), (db, self.bias, "db")):
            parts = [getattr(s, what) for s in sums]
            if not parts:
                assert not g.any()
                continue
            whole = truth.Gradient(
                *(torch.cat([getattr(t, f) for t in parts], 1).T for f in ("exact", "bound", "terms"))
            )
            assert not truth.summed(whole, p.shape, p.dtype, truth.unit(torch.float32)).wrong(g).any()
