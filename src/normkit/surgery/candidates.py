"""What a module could be: specs, and the ways of writing one that have bits of their own.

A spec's reference has the bits of every formula with the same roundings, on rows whose sums are exact. Some ways to
compute the same norm are not such formulas and are candidates beside it: PyTorch's own operators (their inner loops
multiply and add in an order of their own), ``x.var()``, which is Welford's update, and a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.checks import align_parameter
from normkit.conventions import NAMED
from normkit.kernels import reference
from normkit.kernels.rounding import result_dtype
from normkit.kernels.statistics import accumulation_dtype
from normkit.spec import NormSpec

FORMULA = "the formula"
LAYER_NORM = "torch.layer_norm"
RMS_NORM = "torch.rms_norm"
WIDE_LAYER_NORM = "torch.layer_norm in float32"
GROUP_NORM = "torch.group_norm"
INSTANCE_NORM = "torch.instance_norm"
VARIANCE = "the formula with x.var()"
WEIGHT_FIRST = "the formula with (w · x) multiplied by the inverse root"
BARE_LAYER_NORM = "torch.layer_norm without parameters, then weighed"
FUSED = "the formula with one multiply-add for weight and bias"
OPERATORS = (LAYER_NORM, WIDE_LAYER_NORM, RMS_NORM, GROUP_NORM, INSTANCE_NORM)


@dataclass(frozen=True)
class Coverage:
    """Which elements share a statistic: axes of x, after splitting ``channel_axis`` into ``groups``."""

    axes: tuple[int, ...]
    groups: int = 1
    channel_axis: int = -1

    def split(self, t: Tensor | None, dim: int) -> Tensor | None:
        """Split the channel axis of x, or of a parameter that is laid out for x of ``dim`` axes."""
        if t is None or self.groups == 1 or t.dim() == 0:
            return t
        axis = self.channel_axis % dim - dim  # from the end, where a parameter's axes are x's
        if -axis > t.dim():
            return t
        if t.shape[axis] == 1:
            return t.unsqueeze(axis)
        return t.unflatten(axis, (self.groups, t.shape[axis] // self.groups))

    def split_axes(self, dim: int) -> tuple[int, ...]:
        """Return the axes of the split x that a statistic runs over."""
        if self.groups == 1:
            return tuple(a % dim for a in self.axes)
        channel = self.channel_axis % dim
        return tuple(a % dim + (a % dim >= channel) for a in self.axes)

    def joined(self, y: Tensor) -> Tensor:
        """Undo `split`."""
        if self.groups == 1:
            return y
        axis = self.channel_axis % (y.dim() - 1)
        return y.flatten(axis, axis + 1)


def aligned(p: Tensor | None, x: Tensor, coverage: Coverage) -> Tensor | None:
    """Lay a parameter out for x: along the channels, along the axes of the statistic, or by broadcasting.

    Raises:
        ValueError: when it fits none of these.
    """
    if p is None:
        return None
    channel = coverage.channel_axis % x.dim()
    if p.dim() == 1 and p.shape[0] == x.shape[channel]:
        return p.reshape([p.shape[0] if d == channel else 1 for d in range(x.dim())])
    return align_parameter(p, x, tuple(a % x.dim() for a in coverage.axes), "normkit", "a parameter")


@dataclass(frozen=True)
class Given:
    """One set of inputs; parameters broadcast to x."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    coverage: Coverage
    eps: float


@dataclass(frozen=True)
class Candidate:
    """A spec and how it is written."""

    spec: NormSpec
    writing: str = FORMULA

    def __call__(self, given: Given) -> Tensor:
        """Compute it."""
        return _WRITINGS[self.writing](given, self.spec)


def _formula(given: Given, spec: NormSpec) -> Tensor:
    dim, split = given.x.dim(), given.coverage.split
    x = split(given.x, dim)
    assert x is not None
    y = reference.normalize(
        x,
        spec,
        split(given.weight, dim),
        split(given.bias, dim),
        axes=given.coverage.split_axes(dim),
        eps=given.eps,
        gate=split(given.gate, dim),
    )
    return given.coverage.joined(y)


def _variance(given: Given, spec: NormSpec) -> Tensor:
    """Write the norm with ``x.var``, as models do that do not spell the squares out."""
    dim, split = given.x.dim(), given.coverage.split
    x = split(given.x, dim)
    assert x is not None
    axes = given.coverage.split_axes(dim)
    work = x if spec.statistic_dtype == "input" else x.to(accumulation_dtype(x.dtype))
    radicand = work.var(axes, unbiased=spec.statistic == "unbiased", keepdim=True) + given.eps
    value = work - work.mean(axes, keepdim=True) if spec.centered else work
    weight, bias = split(given.weight, dim), split(given.bias, dim)
    if spec.root == "divide":
        y = value / torch.sqrt(radicand)
    else:
        inverse = torch.rsqrt(radicand)
        if not spec.centered and weight is not None:  # x · (w / σ), as SimpleNorm associates
            return given.coverage.joined(x * (weight * inverse))
        y = value * inverse
    return given.coverage.joined(reference.apply_weight(y, spec, weight, bias, x.dtype))


def _last(given: Given) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
    """Return x with the axes of its statistic last, their sizes, and the way back."""
    axes = [a % given.x.dim() for a in given.coverage.axes]
    order = [d for d in range(given.x.dim()) if d not in axes] + axes
    back = [order.index(d) for d in range(given.x.dim())]
    return given.x.permute(order), [given.x.shape[a] for a in axes], lambda y: y.permute(back)


def _operator(given: Given, spec: NormSpec, name: str) -> Tensor:
    if given.coverage.groups != 1 or len(given.coverage.axes) > 3:
        raise ValueError("PyTorch's row norms have no groups")
    x, sizes, back = _last(given)
    gain = None if given.weight is None else reference.gain_of(given.weight, spec, torch.float32)
    w, b = (None if p is None else _row(p, sizes) for p in (gain, given.bias))
    if name == WIDE_LAYER_NORM:  # a subclass that converts before and after
        x, w, b = x.float(), None if w is None else w.float(), None if b is None else b.float()
    if name == RMS_NORM:
        return back(F.rms_norm(x, sizes, w, given.eps))
    return back(F.layer_norm(x, sizes, w, b, given.eps).to(given.x.dtype))


def _positions(given: Given, spec: NormSpec, name: str) -> Tensor:
    """Run PyTorch's norms over positions, which have the channels at axis 1."""
    x, coverage = given.x, given.coverage
    axes = {a % x.dim() for a in coverage.axes}
    gain = None if given.weight is None else reference.gain_of(given.weight, spec, torch.float32)
    w, b = (None if p is None else p.flatten() for p in (gain, given.bias))
    positions = set(range(2, x.dim()))
    if name == GROUP_NORM and coverage.channel_axis % x.dim() == 1 and axes in ({1} | positions, positions):
        groups = coverage.groups if 1 in axes else x.shape[1]
        return F.group_norm(x, groups, w, b, given.eps)
    if name == INSTANCE_NORM and axes == positions:
        return F.instance_norm(x, weight=w, bias=b, eps=given.eps)
    raise ValueError("other axes than PyTorch's")


def _fused(given: Given, spec: NormSpec) -> Tensor:
    """Round weight and bias once together, as a multiply-add does: float64 holds the product of two float32 exactly."""
    if given.bias is None or spec.cast != "last" or spec.statistic_dtype != "float32" or spec.gate != "none":
        raise ValueError("no multiply-add here")
    wide = given.x.to(accumulation_dtype(given.x.dtype))
    bare = _spec(**{**_fields(spec), "weight": "none", "output": "input"})
    assert bare is not None
    normed = _formula(replace(given, x=wide, weight=None, bias=None), bare)
    gain = 1.0 if given.weight is None else reference.gain_of(given.weight, spec, wide.dtype).double()
    y = (normed.double() * gain + given.bias.double()).to(wide.dtype)
    held = [p.dtype for p in (given.weight, given.bias) if p is not None]
    return y.to(result_dtype(spec, given.x.dtype, held[0], held[-1]))


def _weight_first(given: Given, spec: NormSpec) -> Tensor:
    """Multiply by w before the inverse root, which is still that of x alone."""
    if given.weight is None or given.bias is not None:
        raise ValueError("no weight to come first, or a bias")
    work = given.x if spec.statistic_dtype == "input" else given.x.to(accumulation_dtype(given.x.dtype))
    axes = tuple(a % given.x.dim() for a in given.coverage.axes)
    return given.weight * work * torch.rsqrt(work.pow(2).mean(axes, keepdim=True) + given.eps)


def _bare(given: Given, spec: NormSpec) -> Tensor:
    """Let PyTorch normalise without parameters, in x's dtype, and weigh afterwards."""
    plain = NormSpec(centered=True, weight="none")
    normed = _operator(replace(given, weight=None, bias=None), plain, LAYER_NORM)
    return reference.apply_weight(normed, spec, given.weight, given.bias, given.x.dtype)


def _row(p: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a parameter with the shape of the normalised axes, which is all that PyTorch's operators take."""
    if p.numel() != torch.Size(sizes).numel():
        raise ValueError("PyTorch's row norms take one parameter for all rows")
    return p.reshape(tuple(sizes))


_WRITINGS: dict[str, Callable[[Given, NormSpec], Tensor]] = {
    FORMULA: _formula,
    VARIANCE: _variance,
    LAYER_NORM: lambda given, spec: _operator(given, spec, LAYER_NORM),
    RMS_NORM: lambda given, spec: _operator(given, spec, RMS_NORM),
    WIDE_LAYER_NORM: lambda given, spec: _operator(given, spec, WIDE_LAYER_NORM),
    GROUP_NORM: lambda given, spec: _positions(given, spec, GROUP_NORM),
    INSTANCE_NORM: lambda given, spec: _positions(given, spec, INSTANCE_NORM),
    FUSED: _fused,
    WEIGHT_FIRST: _weight_first,
    BARE_LAYER_NORM: _bare,
}


def shapes_of_formula(*, weighted: bool, gated: bool) -> list[Candidate]:
    """Return candidates that can differ in float32: all but roundings that vanish there."""
    gates: list[tuple[str, str]] = [("none", "none")]
    if gated:
        gates = [(place, a) for place in ("before", "after") for a in ("silu", "sigmoid")]
    found = [
        Candidate(spec)
        for centered, statistic, eps, root, weight, (gate, activation) in product(
            (False, True),
            ("mean", "unbiased", "sum"),
            ("inside", "outside", "max"),
            ("reciprocal", "divide", "power"),
            ("plain", "one_plus") if weighted else ("none",),
            gates,
        )
        if (
            spec := _spec(
                centered=centered,
                statistic=statistic,
                eps=eps,
                root=root,
                weight=weight,
                gate=gate,
                activation=activation,
            )
        )
    ]
    if gated:
        return found
    for weight in ("plain", "one_plus") if weighted else ("none",):
        centred = NormSpec(centered=True, weight=weight)
        found += [Candidate(NormSpec(weight=weight) if w == RMS_NORM else centred, w) for w in OPERATORS]
        if weight != "none":
            first = NormSpec(centered=True, weight=weight, cast="first", output="promote")
            found += [Candidate(first, BARE_LAYER_NORM), Candidate(NormSpec(weight=weight), WEIGHT_FIRST)]
        for centered, statistic, root in product((True, False), ("mean", "unbiased"), ("reciprocal", "divide")):
            spec = NormSpec(centered=centered, statistic=statistic, root=root, weight=weight)
            if spec.centered or spec.statistic == "unbiased":
                found.append(Candidate(spec, VARIANCE))
    return found


def refined(candidate: Candidate, *, parameters: bool) -> Iterator[Candidate]:
    """Yield a float32 candidate with every combination of roundings that half types can tell apart.

    Without parameters there is nothing that x's dtype could be promoted with.
    """
    spec = candidate.spec
    weights = ("one_plus", "one_plus_rounded") if spec.weight == "one_plus" else (spec.weight,)
    if candidate.writing in OPERATORS:
        yield from (Candidate(replace(spec, weight=w), candidate.writing) for w in weights)
        return
    outputs = ("input", "promote") if parameters else ("input",)
    formula, bare = candidate.writing == FORMULA, candidate.writing == BARE_LAYER_NORM
    for dtype, rounding, weight, cast, output in product(
        ("float32",) if bare else ("float32", "input"),
        ("none", "input") if formula else ("none",),
        weights,
        ("first",) if bare else ("last", "first", "t5"),
        outputs,
    ):
        fine = _spec(
            **{
                **_fields(spec),
                "statistic_dtype": dtype,
                "root_rounding": rounding,
                "weight": weight,
                "cast": cast,
                "output": output,
            }
        )
        if fine is not None:
            yield Candidate(fine, candidate.writing)


def _fields(spec: NormSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in NormSpec.__dataclass_fields__}


@lru_cache(maxsize=4096)
def _spec_of(items: tuple[tuple[str, object], ...]) -> NormSpec | None:
    try:
        return NormSpec(**dict(items))  # type: ignore[arg-type]
    except ValueError:
        return None


def _spec(**fields: object) -> NormSpec | None:
    """Return the spec, or None for a combination that cannot exist."""
    return _spec_of(tuple(fields.items()))


def preference(spec: NormSpec) -> tuple[int, int]:
    """Return a key that orders specs nothing can tell apart: known ones first, then those with fewer peculiarities."""
    plain = NormSpec()
    known = list(NAMED.values())
    peculiar = sum(getattr(spec, f) != getattr(plain, f) for f in NormSpec.__dataclass_fields__)
    return (known.index(spec) if spec in known else len(known), peculiar)
