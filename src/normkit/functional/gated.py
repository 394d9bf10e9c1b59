"""RMSNorm with a gate: the output norm of Mamba-2 and of gated linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor

from normkit.checks import Eps, align_parameter, check_eps, check_float, eps_value
from normkit.conventions import GATED_RMS
from normkit.functional.ragged import is_jagged, opened
from normkit.functional.rows import check_parameters
from normkit.ops.gated import gate_normalize
from normkit.ops.rows import normalize
from normkit.spec import NormSpec


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None = None,
    *,
    group_size: int | None = None,
    gate_first: bool | None = None,
    activation: Literal["silu", "sigmoid"] | None = None,
    eps: Eps = 1e-6,
    spec: NormSpec = GATED_RMS,
) -> Tensor:
    r"""RMSNorm over groups of the last axis, with a gate before or after it.

    Gate after (default): ``y = RMS(x) · w · a(g)``. Gate first: ``y = RMS(x · a(g)) · w``. a is SiLU or the sigmoid,
    in float32.

    Args:
        x: (…, C); float16, bfloat16, float32 or float64.
        gate: of x's shape; None means no gate at all (Mamba-2 blocks allow it).
        weight: (C,), or broadcastable to x; the groups share nothing.
        group_size: elements per statistic; C by default. Must divide C.
        gate_first: overrides the spec's place of the gate.
        activation: overrides the spec's activation.
        eps: 1e-6 unless given.
        spec: a gated rms convention: ``nk.MAMBA2`` (gate first, rounds before the weight), ``nk.QWEN3_NEXT_GATED``,
            ``nk.KIMI_GATED`` (sigmoid), or the default: SiLU after, everything float32, one rounding.

    Returns:
        A tensor of x's shape and dtype (promoted with the weight's where the spec says so).

    Raises:
        TypeError, ValueError: as `rms_norm`; also for a gate of another shape, a group size that does not divide C,
            and a spec without a gate.

    Source: Dao and Gu 2024 (Mamba-2), arXiv 2405.21060; Yang et al. 2024 (gated delta net), arXiv 2412.06464.

    Example:
        >>> import torch, normkit as nk
        >>> x, g = torch.tensor([[3.0, 4.0, 0.0, 2.0]]), torch.zeros(1, 4)
        >>> nk.gated_rms_norm(x, g, group_size=2, activation="sigmoid", eps=0.0)
        tensor([[0.4243, 0.5657, 0.0000, 0.7071]])
    """
    name = "gated_rms_norm"
    check_float(x, name)
    if spec.gate == "none" or spec.kind != "rms":
        raise ValueError(f"{name}: expected a gated rms spec such as GATED_RMS or MAMBA2, got {spec.code}")
    if gate_first is not None:
        spec = replace(spec, gate="before" if gate_first else "after")
    if activation is not None:
        spec = replace(spec, activation=activation)
    if is_jagged(x):
        whole = opened(x, name)
        w = whole.parameter(weight, "weight", whole.axes(-1))
        g = None if gate is None else whole.alike(gate, "gate")
        return whole.joined(gated_rms_norm(whole.values, g, w, group_size=group_size, eps=eps, spec=spec))
    check_gate(gate, x, name)
    number = eps_value(check_eps(eps, name), x.dtype)
    check_parameters(spec, weight, name)
    rows = in_groups(x, gate, weight, group_size, name)
    if rows.gate is None:
        y = normalize(rows.x, without_gate(spec), rows.weight, axes=rows.axes, eps=number)
    else:
        y = gate_normalize(rows.x, rows.gate, spec, rows.weight, axes=rows.axes, eps=number)
    return y.flatten(-2)


class Groups(NamedTuple):
    """The arguments as the kernels see them: (…, groups, size), one statistic over the last axis."""

    x: Tensor
    gate: Tensor | None
    weight: Tensor | None
    axes: tuple[int, ...]


def check_gate(gate: Tensor | None, x: Tensor, name: str) -> None:
    """Raise unless ``gate`` is None or floating and of x's shape, and x has an axis."""
    if gate is not None and check_float(gate, name, "gate").shape != x.shape:
        raise ValueError(f"{name}: gate must have x's shape {tuple(x.shape)}, got {tuple(gate.shape)}")
    if x.dim() == 0:
        raise ValueError(f"{name}: x needs at least one axis, got a scalar")


def in_groups(x: Tensor, gate: Tensor | None, weight: Tensor | None, group_size: int | None, name: str) -> Groups:
    """Split the last axis into groups of ``group_size``, for whoever is called ``name``."""
    width = x.shape[-1]
    size = max(width, 1) if group_size is None else group_size
    if size < 1 or width % size:
        raise ValueError(f"{name}: group_size must divide the width {width}, got {group_size}")
    w = align_parameter(weight, x, (x.dim() - 1,), name, "weight")
    sizes = (width // size, size)
    return Groups(
        x.unflatten(-1, sizes),
        None if gate is None else gate.unflatten(-1, sizes),
        None if w is None else _grouped(w, sizes),
        (x.dim(),),
    )


def without_gate(spec: NormSpec) -> NormSpec:
    """Return what ``spec`` is where no gate is given."""
    return replace(spec, gate="none", activation="none")


def _grouped(weight: Tensor, grouped: tuple[int, int]) -> Tensor:
    """Split the weight's last axis as x's; one that broadcasts along it gets a second axis of size 1."""
    if weight.dim() == 0:
        return weight
    return weight.unsqueeze(-1) if weight.shape[-1] == 1 else weight.unflatten(-1, grouped)
