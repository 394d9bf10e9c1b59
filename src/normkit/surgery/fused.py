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
        rank: the number of axes that x must have; None where it may have any.
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
    rank: int | None = None
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
        gate: Tensor | None = None
        if len(args) == 1 and not kwargs:
            x = args[0]
        else:
            given = dict(zip(plan.inputs, args, strict=False)) | kwargs
            x, gate = given.get(plan.inputs[0]), given.get(plan.inputs[-1]) if len(plan.inputs) > 1 else None
            if len(given) != len(args) + len(kwargs) or any(name not in plan.inputs for name in given):
                return type(module).forward(module, *args, **kwargs)
        tensors, state = module._parameters, module._buffers
        w = None if plan.weight is None else tensors.get(plan.weight, state.get(plan.weight))
        b = None if plan.bias is None else tensors.get(plan.bias, state.get(plan.bias))
        spec = self._spec(x, gate, w, b)
        if spec is None:
            return type(module).forward(module, *args, **kwargs)
        return normalized(x, spec, w, b, gate, plan)

    def _spec(self, x: Any, gate: Any, w: Tensor | None, b: Tensor | None) -> NormSpec | None:
        """Return the spec to run, or None for what is the module's own business."""
        plan = self.plan
        if not isinstance(x, Tensor) or (w is None) != (plan.weight is None) or (b is None) != (plan.bias is None):
            return None
        held = w if w is not None else b
        if held is not None and b is not None and b.dtype != held.dtype:
            return None
        table = plan.executed
        if len(plan.inputs) > 1:
            if gate is None:
                table = plan.ungated
            elif not isinstance(gate, Tensor) or gate.dtype != x.dtype or gate.shape != x.shape:
                return None
        spec = table.get((x.dtype, None if held is None else held.dtype))
        if spec is None or (held is not None and held.device != x.device):
            return None
        if x.dim() == 0 or (plan.rank is not None and x.dim() != plan.rank) or (w is not None and not _fits(w, x)):
            return None
        channel = plan.coverage.channel_axis
        if plan.width is not None and (channel >= x.dim() or x.shape[channel] != plan.width):
            return None
        if not plan.autocast and torch.is_autocast_enabled(x.device.type):
            return None
        own = self.module.__dict__
        if any(own.get(name) != value for name, value in plan.attributes):
            return None
        return spec

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


def _fits(p: Tensor, x: Tensor) -> bool:
    """Say whether a parameter of several axes, one a head for example, matches the last axes of x."""
    return p.dim() < 2 or (
        p.dim() <= x.dim() and all(n in (1, m) for n, m in zip(p.shape, x.shape[-p.dim() :], strict=True))
    )
