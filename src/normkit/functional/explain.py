"""Which kernel a call would run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from normkit.checks import align_parameter, check_axes, check_float
from normkit.functional.gated import check_gate, in_groups, without_gate
from normkit.kernels import registry
from normkit.kernels.contract import Request
from normkit.ops.watch import plain, watched
from normkit.spec import NormSpec


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; printing it reads as a sentence.

    Args:
        kernel: the name of what would compute the call: ``"cpu"`` or ``"reference"``.
        reason: why that one.
        rejected: (kernel, why not) for those that were passed over.
        batch_invariant: whether a row's bits depend on that row alone, not on batch size, position or threads.
    """

    kernel: str
    reason: str
    rejected: tuple[tuple[str, str], ...]
    batch_invariant: bool

    def __str__(self) -> str:
        over = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        own = "A row's bits depend on that row alone"
        bits = own if self.batch_invariant else "An error bound is promised, not bits"
        return f"{self.kernel} ({self.reason}){over}. {bits}."


def explain(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axis: int | Sequence[int] = -1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    group_size: int | None = None,
) -> Explanation:
    """Say which kernel would compute ``spec`` on ``x`` here and now, and why.

    Args:
        x, weight, bias, axis: as for `normkit.rms_norm` or `normkit.layer_norm`.
        spec: the conventions.
        residual: as for `normkit.add_rms_norm`, where one is added.
        gate, group_size: as for `normkit.gated_rms_norm`, over the last axis; a gated spec without a gate is explained
            as that function computes it, without one.

    Raises:
        TypeError, ValueError: as the norm itself; also when a backend was asked for by name and cannot take the call,
            or rows are to be batch-invariant and no kernel takes it.

    Example:
        >>> import torch, normkit as nk
        >>> nk.explain(torch.zeros(2, 8, dtype=torch.float64), nk.LLAMA).kernel
        'reference'
        >>> nk.explain(torch.zeros(2, 8), nk.LLAMA).batch_invariant
        True
        >>> nk.explain(torch.zeros(2, 8), nk.MAMBA2, gate=torch.zeros(2, 8), group_size=4).kernel
        'cpu'
    """
    check_float(x, "explain")
    axes = check_axes(axis, x, "explain")
    b = align_parameter(bias, x, axes, "explain", "bias")
    if spec.gate == "none":
        if gate is not None or group_size is not None:
            raise ValueError(f"explain: gate and group_size need a gated spec such as nk.MAMBA2, got {spec.code}")
        w = align_parameter(weight, x, axes, "explain", "weight")
    else:
        if axes != (x.dim() - 1,):
            raise ValueError(f"explain: a gated norm runs over the last axis, got axis={axis}")
        check_gate(gate, x, "explain")
        x, gate, w, axes = in_groups(x, gate, weight, group_size, "explain")
        spec = spec if gate is not None else without_gate(spec)
    if watched() and registry.batch_invariant():
        return _opaque(spec)
    if watched():
        return Explanation("reference", "something looks inside operators, so they are plain ATen", (), False)
    if not all(map(plain, (x, w, b, residual, gate))):
        registry.check_reference("a tensor is no ordinary CPU tensor with memory")
        return Explanation("reference", "a tensor is no ordinary CPU tensor with memory", (), False)
    decision = registry.choose(Request(spec, x, axes, w, b, residual, gate))
    name = decision.kernel.name
    return Explanation(name, decision.reason, decision.rejected, batch_invariant=name != "reference")


def _opaque(spec: NormSpec) -> Explanation:
    from normkit.ops import opaque  # registers the operators

    opaque.check_surrounding(gated=spec.gate != "none")
    reason = "called through a registered operator, into which a compiler does not look; batch_invariant is on"
    return Explanation("cpu", reason, (), batch_invariant=True)
