"""Which kernel a call would run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from normkit.checks import align_parameter, check_axes, check_channel, check_float
from normkit.conventions import TORCH_LAYER_NORM
from normkit.coverage import COVERAGE
from normkit.functional.gated import check_gate, in_groups, without_gate
from normkit.functional.ragged import is_jagged, opened
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
        batch_invariant: whether a row's bits (a sample's, for instance and group norm) depend on that row alone, not on
            batch size, position or threads.
        coverage: which norm was asked about, a name in `normkit.coverage.COVERAGE`.
    """

    kernel: str
    reason: str
    rejected: tuple[tuple[str, str], ...]
    batch_invariant: bool
    coverage: str = "layer"

    def __str__(self) -> str:
        over = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        what = "row" if self.coverage == "layer" else "sample"
        bits = "An error bound is promised, not bits"
        if self.batch_invariant:
            bits = f"A {what}'s bits depend on that {what} alone"
        elif self.kernel != "reference":
            bits = "Bits depend on the batch, whose statistics these are, and on nothing else"
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
    coverage: str = "layer",
    channel_axis: int = -1,
) -> Explanation:
    """Say which kernel would compute ``spec`` on ``x`` here and now, and why.

    Args:
        x, weight, bias, axis: as for `normkit.rms_norm` or `normkit.layer_norm`.
        spec: the conventions.
        residual: as for `normkit.add_rms_norm`, where one is added.
        gate, group_size: as for `normkit.gated_rms_norm`, over the last axis; a gated spec without a gate is explained
            as that function computes it, without one.
        coverage: ``"batch"``, ``"instance"`` or ``"group"`` ask about those norms, of the channels along
            ``channel_axis``; ``axis`` is then not looked at.

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
        >>> nk.explain(torch.zeros(2, 5, 8), nk.TORCH_LAYER_NORM, coverage="batch").batch_invariant
        False
    """
    check_float(x, "explain")
    if is_jagged(x):
        return _explain_jagged(x, spec, weight, bias, axis, residual, gate, group_size, coverage, channel_axis)
    if coverage not in COVERAGE:
        raise ValueError(f"explain: unknown coverage {coverage!r}; one of {', '.join(COVERAGE)}")
    channel = None if coverage == "layer" else check_channel(channel_axis, x, "explain")
    if channel is not None and spec != TORCH_LAYER_NORM:
        raise ValueError(f"explain: {coverage} norm computes TORCH_LAYER_NORM's formula, got {spec.code}")
    axes = check_axes(axis if channel is None else channel, x, "explain")
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
        return _opaque(spec, coverage)
    if watched():
        return Explanation("reference", "something looks inside operators, so they are plain ATen", (), False)
    if not all(map(plain, (x, w, b, residual, gate))):
        registry.check_reference("a tensor is no ordinary CPU or CUDA tensor with memory")
        return Explanation("reference", "a tensor is no ordinary CPU or CUDA tensor with memory", (), False)
    if channel is not None:
        axes = tuple(a for a in range(x.dim()) if a != channel and not (a == 0 and coverage != "batch"))
    if coverage == "batch":
        registry.refuse_invariant("the statistics are those of the batch")
    decision = registry.choose(Request(spec, x, axes, w, b, residual, gate, channel=channel))
    name = decision.kernel.name
    invariant = name != "reference" and coverage != "batch"
    return Explanation(name, decision.reason, decision.rejected, invariant, coverage)


def _explain_jagged(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    axis: int | Sequence[int],
    residual: Tensor | None,
    gate: Tensor | None,
    group_size: int | None,
    coverage: str,
    channel_axis: int,
) -> Explanation:
    """Explain what runs on the values of a jagged x."""
    whole = opened(x, "explain", crossing=coverage != "layer")
    if coverage != "layer":
        wide = (whole.together() if coverage == "batch" else whole.padded())[0]
        channel = whole.channel(channel_axis)
        return explain(wide, spec, weight, bias, coverage=coverage, channel_axis=channel)
    within = whole.axes(axis)
    w, b = (whole.parameter(p, what, within) for p, what in ((weight, "weight"), (bias, "bias")))
    stream, g = (None if t is None else whole.alike(t, what) for t, what in ((residual, "residual"), (gate, "gate")))
    return explain(whole.values, spec, w, b, axis=within, residual=stream, gate=g, group_size=group_size)


def _opaque(spec: NormSpec, coverage: str) -> Explanation:
    from normkit.ops import opaque  # registers the operators

    if coverage != "layer":
        registry.refuse_invariant(f"{coverage} norm has no registered operator")
    opaque.check_surrounding(gated=spec.gate != "none")
    reason = "called through a registered operator, into which a compiler does not look; batch_invariant is on"
    return Explanation("cpu", reason, (), batch_invariant=True)
