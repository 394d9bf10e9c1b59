"""Norms that can be folded: which parameter is γ, which is β, along which axis, and what leaves them out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normkit.checks import Eps
from normkit.spec import NormSpec
from normkit.surgery.findings import Unidentified
from normkit.surgery.folding.forwards import folded_forward, is_identity
from normkit.surgery.identify import identify

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Norm:
    """A norm of a model.

    Args:
        spec: its conventions; None for a batch norm, whose statistics are constants.
        eps: its ε.
        axis: the channel axis of its input, from the right.
        width: channels of its output.
        weight, bias: names of γ (or what γ is made of) and β; None where there is none.
        shape: of γ or β; every element scales its own channels.
        rows: the statistic runs over the last axis and nothing else.
    """

    spec: NormSpec | None
    eps: Eps
    axis: int
    weight: str | None
    bias: str | None
    shape: tuple[int, ...]
    rows: bool

    def gain(self, module: nn.Module) -> Tensor | None:
        """Return γ in float64, as the module itself makes it of its weight."""
        if self.weight is None:
            return None
        weight: Tensor = getattr(module, self.weight).detach()
        form = "plain" if self.spec is None else self.spec.weight
        if form == "one_plus_rounded":
            return (1 + weight).double()
        return weight.double() + (1.0 if form == "one_plus" else 0.0)

    def shift(self, module: nn.Module) -> Tensor | None:
        """Return β in float64."""
        return None if self.bias is None else getattr(module, self.bias).detach().double()

    @property
    def number(self) -> float:
        """The ε of a batch norm, which no dtype decides."""
        assert isinstance(self.eps, float)
        return self.eps

    @property
    def rest(self) -> float:
        """The weight that makes γ = 1."""
        return 0.0 if self.spec is not None and self.spec.weight.startswith("one_plus") else 1.0

    def channels(self, out: Tensor) -> Tensor | None:
        """Return which element of γ scales each element of the output, or None where they do not line up."""
        size = torch.Size(self.shape).numel()
        index = torch.arange(size, dtype=torch.int32, device=out.device).reshape(self.shape)
        if len(self.shape) == 1 and self.axis != -1:
            index = index.reshape(-1, *[1] * (-1 - self.axis))
        fits = index.dim() <= out.dim() and all(
            a in (1, b) for a, b in zip(reversed(index.shape), reversed(out.shape), strict=False)
        )
        return index.expand(out.shape) if fits else None


def recognise(module: nn.Module, call: Call) -> Norm | str:
    """Return the norm that ``module`` is, found by behaviour, or why it is none that can be folded.

    Args:
        module: a leaf that ran in the forward.
        call: what it was called with.
    """
    if isinstance(getattr(module, "running_mean", None), Tensor) and getattr(module, "running_var", None) is not None:
        return _batch(module, call)
    if (forward := folded_forward(module)) is not None and forward.keywords:
        return _refolded(module, forward.keywords)
    # A row of its own is a batch of one: a norm that takes it takes this, and its axes are counted all the same.
    batch = tree_map(lambda a: a.unsqueeze(0) if isinstance(a, Tensor) and a.dim() == 1 else a, call)
    found = identify(module, *batch[0], **batch[1])
    if isinstance(found, Unidentified):
        return found.reason
    if found.groups != 1 or len(found.axes) != 1:
        return f"its statistic covers axes {found.axes} in {found.groups} groups; one axis is folded"
    x = next((t for t in (*batch[0], *batch[1].values()) if isinstance(t, Tensor)), None)
    assert x is not None
    axis = found.axes[0] if found.axes[0] < 0 else found.axes[0] - x.dim()
    named = [getattr(module, name) for name in (found.weight, found.bias) if name is not None]
    shapes = {tuple(t.shape) for t in named}
    if len(shapes) > 1:
        return f"weight and bias have different shapes: {sorted(shapes)}"
    shape = shapes.pop() if shapes else (x.shape[axis],)
    return Norm(found.spec, found.eps, axis, found.weight, found.bias, shape, rows=axis == -1)


def _refolded(module: nn.Module, known: dict[str, Any]) -> Norm:
    """Return the norm that an earlier fold made of this one."""
    named = [getattr(module, known[name]) for name in ("weight", "bias") if known[name] is not None]
    shape = tuple(named[0].shape) if named else (1,)
    return Norm(known["spec"], known["eps"], -1, known["weight"], known["bias"], shape, rows=True)


def _batch(module: nn.Module, call: Call) -> Norm | str:
    x = next((t for t in (*call[0], *call[1].values()) if isinstance(t, Tensor)), None)
    mean, var, eps = module.running_mean, module.running_var, getattr(module, "eps", None)
    if x is None or not isinstance(mean, Tensor) or not isinstance(var, Tensor) or not isinstance(eps, float):
        return "a batch norm without running statistics or ε: its output is no fixed linear map"
    double = copy.deepcopy(module).double()
    probe = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(x.device)
    with torch.no_grad():
        y = double(
            *[probe if a is x else a for a in call[0]], **{k: probe if a is x else a for k, a in call[1].items()}
        )
    for axis in dict.fromkeys((1 - x.dim(), -1)):
        if x.shape[axis] == mean.numel():
            scale, shift = affine_of_batch(double, eps)
            lie = (-1, *[1] * (-1 - axis))
            wanted = probe * scale.reshape(lie) + shift.reshape(lie)
            # (x − m)·s·γ + β and x·sγ + (β − m·s·γ) differ by a handful of roundings of their largest term.
            size = (probe.abs() + mean.double().abs().reshape(lie)) * scale.abs().reshape(lie) + wanted.abs()
            # An identity left by a fold differs from its statistics by their rounding to the module's dtype.
            unit = mean.dtype if is_identity(module) else torch.float64
            bound = 16 * torch.finfo(unit).eps * size
            if isinstance(y, Tensor) and y.shape == wanted.shape and bool(((y - wanted).abs() <= bound).all()):
                names = [n if isinstance(getattr(module, n, None), Tensor) else None for n in ("weight", "bias")]
                return Norm(None, eps, axis, names[0], names[1], tuple(mean.shape), rows=False)
    return "it keeps running statistics but does not compute (x − mean)/√(var + ε)·γ + β with them; is it in eval mode?"


def at_rest(norm: Norm, module: nn.Module) -> bool:
    """Whether a norm's parameters already do nothing."""
    if norm.spec is not None:
        gain, shift = norm.gain(module), norm.shift(module)
        return (gain is None or bool((gain == 1).all())) and (shift is None or not bool(shift.any()))
    var = module.running_var
    assert isinstance(var, Tensor)
    gain = norm.gain(module)
    resting = torch.full_like(var, 1 - norm.number)
    return is_identity(module) or (torch.equal(var, resting) and (gain is None or bool((gain == 1).all())))


def affine_of_batch(module: nn.Module, eps: float) -> tuple[Tensor, Tensor]:
    """Return s and t of y = s·x + t, which is what a batch norm in eval mode computes, in float64."""
    mean, var = (getattr(module, n).detach().double() for n in ("running_mean", "running_var"))
    weight, bias = (getattr(module, n, None) for n in ("weight", "bias"))
    scale = (var + eps).sqrt().reciprocal()
    scale = scale if weight is None else scale * weight.detach().double()
    return scale, -mean * scale if bias is None else bias.detach().double() - mean * scale
