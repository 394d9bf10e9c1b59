"""Gated norms in float64, and how far float32 statistics and gates may lie from them.

To first order, u = 2^-24 being the unit roundoff of float32, on top of the bounds of rows.py:

* a(g) is within 5u of itself: the exponential 1.6u (its last sum u at most, what enters that 0.6u), the sum in the
  denominator, the product and the quotient u each. a′(g) is within 5u of s·(1 + |g|·(1 − s)), the size of what it adds
  up (test_exponential.py measures both).
* Gate after: y takes a(g) and a product more: 6u. The norm's own backward sees dy·a(g), off by 6u of itself.
* Gate first: a product p = x·a(g) is off by 6u of itself, so that its root mean square is off by 6u and x̂ by 12u. Here
  the exact p, rounded to float32 to be handed to rows.py, is off by one u more, twice: 14u. dp holds x̂ twice and the
  inverse root once: 2·14u + 7u = 35u of its terms.

The terms of dx in rows.py carry (2·depth + 20)·u; a further c·u of them is c / (2·depth + 20) as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor

import normkit as nk
from rows import Truth, depth, gradient_bounds, plain_norm, smallest, true_norm, unit

U = 2.0**-24


def gate_of(g: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a(g), a′(g) and the size of a′(g)'s terms in float64; 1 − s as the sigmoid of −g."""
    wide = g.double()
    s, rest = wide.sigmoid(), (-wide).sigmoid()
    if activation == "sigmoid":
        return s, s * rest, s * rest
    return wide * s, s * (1 + wide * rest), s * (1 + wide.abs() * rest)


def true_gated(x: Tensor, g: Tensor, w: Tensor, spec: nk.NormSpec, *, eps: float, out: torch.dtype) -> Truth:
    """Return y over the last axis, with one rounding at the end, and its bound."""
    a, _, _ = gate_of(g, spec.activation)
    if spec.gate == "before":
        truth, more = true_norm((x.double() * a).float(), w, eps=eps, centered=False, out=out), 14 * U
    else:
        truth, more = true_norm(x, w.double() * a, eps=eps, centered=False, out=out), 6 * U
    return Truth(truth.y, truth.bound + 1.01 * more * truth.y.abs())


def true_gradients(
    x: Tensor, g: Tensor, w: Tensor, dy: Tensor, spec: nk.NormSpec, *, eps: float
) -> list[tuple[Tensor, Tensor]]:
    """Return (exact, bound) of dx, dgate and dw, summed over all axes but the last."""
    leaves = [t.detach().double().requires_grad_() for t in (x, g, w)]
    a = gate_of(leaves[1], spec.activation)[0]
    before = spec.gate == "before"
    z = plain_norm(leaves[0] * a if before else leaves[0], leaves[2], centered=False, eps=eps)
    exact = torch.autograd.grad(z if before else z * a, leaves, dy.double())
    with torch.no_grad():
        k = depth(x.shape[-1])
        a, slope, size = gate_of(g, spec.activation)
        row = (x.double() * a).float() if before else x
        upstream = dy.double() if before else dy.double() * a
        zeros, float32 = (torch.zeros((), dtype=torch.float64),) * 3, [torch.float32] * 3
        norm, dw, _ = gradient_bounds(row, w, upstream, zeros, False, float32, eps)
        extra = 35 if before else 6
        norm, dw = norm * (1 + extra / (2 * k + 20)), dw * (1 + extra / (k + 20))
        if before:
            point = row.double().requires_grad_()
            with torch.enable_grad():
                (dp,) = torch.autograd.grad(plain_norm(point, w.double(), centered=False, eps=eps), point, upstream)
            dx = norm * a.abs() + 6 * U * (dp * a).abs()
            dgate = norm * (x.double() * slope).abs() + U * (dp * x).abs() * (2 * slope.abs() + 5 * size)
        else:
            dx = norm
            normed = (dy.double() * plain_norm(x.double(), w.double(), centered=False, eps=eps)).abs()
            dgate = normed * U * (((k + 3) / 2 + 6) * slope.abs() + 5 * size)
        bounds = [
            1.02 * b + (0.0 if t.dtype == torch.float32 else unit(t.dtype)) * e.abs() + smallest(t.dtype)
            for b, e, t in zip((dx, dgate, dw), exact, (x, g, w), strict=True)
        ]
    return list(zip(exact, bounds, strict=True))
