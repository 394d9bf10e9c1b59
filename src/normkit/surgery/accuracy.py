"""How far from float64 a norm may lie on random rows, for any axes, groups and gate.

The bound is `normkit.testing.truth`'s: float32 statistics (the spec's own dtype for them) in any reasonable order, a
plain two-pass mean, and every rounding that the spec declares.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normkit.kernels.reference import activate
from normkit.spec import NormSpec
from normkit.surgery.candidates import Given
from normkit.testing import truth


def as_rows(t: Tensor, given: Given) -> Tensor:
    """Return a tensor of x's shape as a matrix, a row a statistic."""
    dim = given.x.dim()
    split = given.coverage.split(t, dim)
    assert split is not None
    axes = given.coverage.split_axes(dim)
    order = [d for d in range(split.dim()) if d not in axes] + list(axes)
    width = 1
    for a in axes:
        width *= split.shape[a]
    return split.permute(order).reshape(-1, width)


def right(given: Given, spec: NormSpec) -> truth.Admissible:
    """Return the right answers on the rows of ``given``; a gate that comes last widens them by its own rounding."""
    x = as_rows(given.x, given)
    weight, bias = (None if p is None else as_rows(p.expand_as(given.x), given) for p in (given.weight, given.bias))
    if given.gate is None:
        return truth.forward(x, spec, weight, bias, given.eps, corrected=False)
    assert given.x.dtype == torch.float32, "what a gate does to half roundings is compared bit for bit elsewhere"
    bare = replace(spec, gate="none", activation="none")
    gate = activate(as_rows(given.gate, given), spec.activation)
    if spec.gate == "before":
        return truth.forward(x * gate, bare, weight, bias, given.eps, corrected=False)
    inner = truth.forward(x, bare, weight, bias, given.eps, corrected=False)
    ends = [end * gate.double() for end in (inner.low, inner.high)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    slack = 2 * truth.unit(torch.float32) * torch.maximum(low.abs(), high.abs())
    return truth.Admissible(inner.exact * gate.double(), low - slack, high + slack, inner.dtype)
