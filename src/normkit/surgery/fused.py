"""What stands in a swapped module's place: its own rule, computed by the fused operator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import Eps, eps_value
from normkit.conventions import OLMO, TORCH_LAYER_NORM
from normkit.ops import positions
from normkit.ops import rows as ops
from normkit.spec import NormSpec
from normkit.surgery.candidates import Coverage, aligned
from normkit.surgery.findings import DtypePair, name_of


@dataclass(frozen=True)
class Plan:
    """How to compute one module's norm, and for which calls that was verified.

    Args:
        spec: the module's convention; what is shown.
        eps: ε.
        coverage: axes, groups, channels.
        weight, bias: names of the parameters or buffers.
        executed: for each pair of dtypes (of x, of the parameters) the spec that is run: the module's own, or one with
            the same roundings that a kernel takes. Every other pair is left to the module.
        width: the width that the last axis must have; None where the module takes any.
        ranks: how many axes x may have; None where any number will do.
        inputs: the names of ``forward``'s x and, where it takes one, gate.
        autocast: whether the module computes the same under autocast, so that there is nothing to leave to it.
        attributes: those that ε was read from; when one is changed later, the module's own forward runs.
    """

    spec: NormSpec
    eps: Eps
    coverage: Coverage
    weight: str | None
    bias: str | None
    executed: Mapping[DtypePair, NormSpec]
    width: int | None = None
    ranks: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ("x",)
    autocast: bool = False
    attributes: tuple[tuple[str, object], ...] = ()
    ungated: Mapping[DtypePair, NormSpec] = field(default_factory=dict[DtypePair, NormSpec])


class Fused:
    """A module's ``forward``, set on the instance: the fused norm where `Plan` allows it, the class's own elsewhere.

    It reads the module's parameters at every call, so tied, loaded, converted or re-registered ones are what counts. It
    copies and pickles with its module: `copy.deepcopy` and `pickle` meet the module first and bind the copy to the
    copy.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise, or let the class's own forward do what was not verified."""
        module, plan = self.module, self.plan
        gate: Any = None
        table = plan.executed
        if len(plan.inputs) == 1 and len(args) == 1 and not kwargs:
            x = args[0]
        else:
            given = dict(zip(plan.inputs, args, strict=False)) | kwargs
            if len(given) != len(args) + len(kwargs) or any(name not in plan.inputs for name in given):
                return type(module).forward(module, *args, **kwargs)
            x = given.get(plan.inputs[0])
            if len(plan.inputs) > 1:
                gate = given.get(plan.inputs[1])
                table = plan.ungated if gate is None else plan.executed
        w, b = self._parameter(plan.weight), self._parameter(plan.bias)
        if isinstance(x, Tensor) and self._verified(x, gate, w, b):
            held = w if w is not None else b
            spec = table.get((x.dtype, None if held is None else held.dtype))
            if spec is not None:
                return normalized(x, spec, w, b, gate, plan)
        return type(module).forward(module, *args, **kwargs)

    def _parameter(self, name: str | None) -> Tensor | None:
        """Return the module's tensor of that name as it is now; `getattr` would take a microsecond for it."""
        if name is None:
            return None
        tensors = self.module._parameters  # pyright: ignore[reportPrivateUsage]
        return tensors[name] if name in tensors else self.module._buffers.get(name)  # pyright: ignore[reportPrivateUsage]

    def _verified(self, x: Tensor, gate: Any, w: Tensor | None, b: Tensor | None) -> bool:
        """Say whether everything but the dtypes is as it was when the plan was proven."""
        plan = self.plan
        dim = x.dim()
        if dim == 0 or (plan.ranks is not None and dim not in plan.ranks):
            return False
        if plan.width is not None and x.shape[plan.coverage.channel_axis] != plan.width:
            return False
        if (w is None) != (plan.weight is None) or (b is None) != (plan.bias is None):
            return False
        if w is not None and ((w.dim() > 1 and not _fits(w, x)) or (b is not None and b.dtype != w.dtype)):
            return False
        if gate is not None and (not isinstance(gate, Tensor) or gate.dtype != x.dtype or gate.shape != x.shape):
            return False
        own = self.module.__dict__
        for name, value in plan.attributes:
            if own.get(name) != value:
                return False
        return plan.autocast or not torch.is_autocast_enabled(x.device.type)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward."""
        parameters = list(inspect.signature(type(self.module).forward).parameters.values())[1:]
        return inspect.Signature(parameters)

    @classmethod
    def rebound(cls, fused: Fused, module: nn.Module) -> Fused:
        """Return the same for another module."""
        return cls(module, fused.plan)

    def __repr__(self) -> str:
        return f"Fused({type(self.module).__name__}: {name_of(self.plan.spec)}, ε={self.plan.eps})"


class Shown:
    """A module's ``extra_repr`` with a word about what was put in its place."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.plan = plan

    def __call__(self) -> str:
        """Return the class's own line, and ours."""
        own = type(self.module).extra_repr(self.module)
        ours = f"normkit: {name_of(self.plan.spec)}, ε={self.plan.eps}"
        return f"{own}, {ours}" if own else ours


def normalized(
    x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, plan: Plan
) -> Tensor:
    """Compute a spec over a plan's axes and groups; a gate only over the last axis."""
    coverage = plan.coverage
    if coverage.groups == 1 and gate is None and coverage.axes == (-1,):
        if spec.kind == "layer":
            return F.layer_norm(x, weight, bias, eps=plan.eps, spec=spec)
        if spec.kind == "rms":
            return F.rms_norm(x, weight, bias, eps=plan.eps, spec=spec)
        return F.normalize(x, spec, weight, bias, eps=plan.eps)
    if gate is not None:
        size = x.shape[-1] // coverage.groups
        return F.gated_rms_norm(x, gate, weight, group_size=size, eps=plan.eps, spec=spec)
    w, b, split = aligned(weight, x, coverage), aligned(bias, x, coverage), coverage.split
    dim = x.dim()
    statistic = over_positions(x, spec, coverage, plan.eps)
    if statistic is not None:
        return positions.normalize(x, w, b, statistic)[0]
    divided = split(x, dim)
    assert divided is not None
    y = ops.normalize(
        divided,
        spec,
        split(w, dim),
        split(b, dim),
        axes=coverage.split_axes(dim),
        eps=eps_value(plan.eps, x.dtype),
    )
    return coverage.joined(y)


def over_positions(x: Tensor, spec: NormSpec, coverage: Coverage, eps: Eps) -> positions.Statistic | None:
    """Return the statistic of a group norm, which the kernels over positions take; None for every other norm."""
    dim = x.dim()
    channel = coverage.channel_axis % dim
    axes = {a % dim for a in coverage.axes}
    if spec not in (TORCH_LAYER_NORM, OLMO):  # the latter is the former without weight and bias
        return None
    if dim < 3 or channel == 0 or coverage.groups == 1 or axes != set(range(1, dim)):
        return None
    return positions.Statistic(channel, coverage.groups, per_sample=True, eps=eps_value(eps, x.dtype))


def _fits(p: Tensor, x: Tensor) -> bool:
    """Say whether a parameter of several axes, one a head for example, matches the last axes of x."""
    sizes = x.shape[-p.dim() :]
    return p.dim() <= x.dim() and all(n in (1, m) for n, m in zip(p.shape, sizes, strict=True))
