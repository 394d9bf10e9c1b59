"""Whether a contender computes the norm at all: its results against float64, before any of its times are taken.

The bounds allow for what implementations may differ in, roundings to the output's dtype on the way and the order of
float32 sums, and for nothing else. They tell wrong from right, not accurate from less so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.bench.shapes import EPS, Case, Inputs

_MOST_ROWS = 1024  # whose y and dx are compared; weight gradients always come from all rows
_AT_ONCE = 1 << 23  # elements in float64
_ROUNDINGS = 4  # of a value, of its product with the weight, of a sum before the norm, of a sum after it
_UNIT = 2.0**-24  # float32's
_SURE = 8.0  # standard deviations


def _depth(n: int) -> float:
    """Return by how many units, of the sum of magnitudes, a float32 sum of n terms in any order may err.

    By n for certain, and by _SURE·√n but once in 10¹² sums of less than 2³⁰ terms, as roundings are independent with
    mean zero (Higham and Mary 2019, doi 10.1137/18M1226312). Without that, nothing would be wrong of a sum over the two
    million rows of a GPU's case: n units are more than the sum.
    """
    return min(float(n), _SURE * n**0.5)


@dataclass(frozen=True)
class Bound:
    """A value and how far from it a result may lie, element by element."""

    value: Tensor
    slack: Tensor


@dataclass(frozen=True)
class Truth:
    """The results of a case in float64: rows of y, s, dx and dresidual, and the whole of dw and db."""

    rows: Tensor
    bounds: Mapping[str, Bound]

    def excess(self, name: str, result: Tensor) -> float:
        """Return the largest error in units of what is allowed: above 1 the result is wrong; NaN counts as infinite."""
        bound = self.bounds[name]
        found = result.detach()
        if name not in ("dw", "db"):
            found = _rows(found)[self.rows]
        error = (found.double() - bound.value).abs() / bound.slack
        return float(torch.where(error.isnan(), torch.inf, error).max())


def _rows(t: Tensor) -> Tensor:
    return t.detach().reshape(-1, t.shape[-1])


def truth_of(case: Case, inputs: Inputs) -> Truth:
    """Compute a case in float64, with gradients unless only the forward is timed."""
    count = case.shape.rows
    most = min(count, _MOST_ROWS, max(1, _AT_ONCE // case.shape.width))
    chosen = torch.linspace(0, count - 1, most, dtype=torch.float64, device=case.device).round().long()
    part = _Part(case, inputs, chosen)
    bounds = part.forward()
    if case.which != "forward":
        bounds |= part.backward() | _parameters(case, inputs)
    return Truth(chosen, bounds)


class _Part:
    """Some rows of a case in float64."""

    def __init__(self, case: Case, inputs: Inputs, rows: Tensor) -> None:
        def wide(t: Tensor | None) -> Tensor | None:
            return None if t is None else _rows(t)[rows].double()

        x = _rows(inputs.x)[rows]
        s = x if inputs.residual is None else x + _rows(inputs.residual)[rows]  # rounded: the norm is of the stored sum
        self.s, self.added = s.double(), inputs.residual is not None
        self.dy, self.ds = _rows(inputs.dy)[rows].double(), wide(inputs.ds)
        self.weight = inputs.weight.detach().double()
        self.bias = None if inputs.bias is None else inputs.bias.detach().double()
        self.centred = case.op == "layer"
        self.unit = torch.finfo(inputs.x.dtype).eps / 2
        self.sums = _depth(case.shape.width) * _UNIT
        d = self.s - self.s.mean(-1, keepdim=True) if self.centred else self.s
        self.root = 1 / torch.sqrt(d.square().mean(-1, keepdim=True) + EPS[case.op])
        self.unscaled = d * self.root

    def _bound(self, value: Tensor, scale: Tensor) -> Bound:
        row = scale.amax(-1, keepdim=True)
        return Bound(value, _ROUNDINGS * self.unit * scale + self.sums * row + torch.finfo(torch.float32).tiny)

    def forward(self) -> dict[str, Bound]:
        y = self.unscaled * self.weight
        scale = y.abs() if self.bias is None else y.abs() + self.bias.abs()
        found = {"y": self._bound(y if self.bias is None else y + self.bias, scale)}
        if self.added:
            found["s"] = Bound(self.s, 2 * self.unit * self.s.abs() + torch.finfo(torch.float32).tiny)
        return found

    def backward(self) -> dict[str, Bound]:
        g = self.dy * self.weight
        along, size = (g * self.unscaled).mean(-1, keepdim=True), (g * self.unscaled).abs().mean(-1, keepdim=True)
        dx = g - self.unscaled * along
        scale = g.abs() + self.unscaled.abs() * size
        if self.centred:
            dx, scale = dx - g.mean(-1, keepdim=True), scale + g.abs().mean(-1, keepdim=True)
        dx, scale = self.root * dx, self.root * scale
        if self.ds is not None:
            dx, scale = dx + self.ds, scale + self.ds.abs()
        bound = self._bound(dx, scale)
        return {"dx": bound, "dresidual": bound} if self.added else {"dx": bound}

    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over these rows of (dw, db), of their terms' magnitudes and of those squared."""
        terms = self.dy * self.unscaled
        # PyTorch's LayerNorm keeps its mean in the parameters' dtype, so dw feels that rounding of the mean.
        sizes = (
            terms.abs() + (self.s.mean(-1, keepdim=True) * self.root * self.dy).abs() if self.centred else terms.abs()
        )
        both = torch.stack([sizes, self.dy.abs()])
        return torch.stack([terms.sum(0), self.dy.sum(0)]), both.sum(1), both.square().sum(1)


def _parameters(case: Case, inputs: Inputs) -> dict[str, Bound]:
    count = case.shape.rows
    total = torch.zeros(2, case.shape.width, dtype=torch.float64, device=case.device)
    sizes, squares = torch.zeros_like(total), torch.zeros_like(total)
    step = max(1, _AT_ONCE // case.shape.width)
    for start in range(0, count, step):
        part = _Part(case, inputs, torch.arange(start, min(start + step, count), device=case.device))
        sums, magnitudes, squared = part.parameters()
        total += sums
        sizes += magnitudes
        squares += squared
    unit = torch.finfo(inputs.x.dtype).eps / 2
    # Roundings of the terms are independent, too; that of the sum is not, and there is one.
    of_terms = torch.minimum(sizes, _SURE * squares.sqrt()) + total.abs()
    slack = _ROUNDINGS * unit * of_terms + (_depth(count) + _depth(case.shape.width)) * _UNIT * sizes
    slack = slack + torch.finfo(torch.float32).tiny
    return {"dw": Bound(total[0], slack[0]), "db": Bound(total[1], slack[1])}


def worst(truth: Truth, names: Sequence[str], results: Sequence[Tensor]) -> tuple[str, float]:
    """Return which result errs most, and by how much of what is allowed."""
    errors = {name: truth.excess(name, result) for name, result in zip(names, results, strict=True)}
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]
