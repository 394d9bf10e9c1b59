"""normkit's operators as rows of one formula: what the error table runs, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit import functional as F
from normkit.conventions import GATED_RMS, GEMMA, L2_NORM, LLAMA, OLMO2, T5, TORCH_LAYER_NORM
from normkit.spec import NormSpec
from normkit.testing import gates, truth

GROUPS = 2
CHANNELS = 4


@dataclass(frozen=True)
class Draw:
    """What one call is given: x, and whatever else the operator takes; dy is its upstream gradient."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    gate: Tensor
    dy: Tensor
    eps: float = 1e-5


@dataclass(frozen=True)
class Operator:
    """One operator.

    Args:
        name: as the table shows it.
        spec: its conventions, without a gate.
        call: runs it on a draw and returns y.
        takes: names of its differentiable arguments; x first.
        arrange: turns a tensor of x's shape into rows that share a statistic.
        gate_first: whether a gate multiplies x instead of the result.
    """

    name: str
    spec: NormSpec
    call: Callable[[Draw], Tensor]
    takes: tuple[str, ...] = ("x", "weight")
    arrange: Callable[[Tensor], Tensor] = lambda t: t
    shape: Callable[[int, int], tuple[int, ...]] = lambda rows, n: (rows, n)
    gate_first: bool = False

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the result, or with ``gate_first`` x."""
        return "gate" in self.takes

    def channels(self, n: int) -> int:
        """Return the size of weight and bias for statistics over ``n`` elements."""
        return self.shape(1, n)[-1]


def _rms(name: str, spec: NormSpec) -> Operator:
    return Operator(f"rms ({name})", spec, lambda d: F.rms_norm(d.x, d.weight, eps=d.eps, spec=spec))


def _positions(function: Callable[..., Tensor]) -> Callable[[Draw], Tensor]:
    return lambda d: function(d.x, weight=d.weight, bias=d.bias, eps=d.eps)


def _batch_norm(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def _group_norm(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.group_norm(x, GROUPS, weight, bias, eps=eps)


_ALL = ("x", "weight", "bias")
OPERATORS: tuple[Operator, ...] = (
    Operator("layer", TORCH_LAYER_NORM, lambda d: F.layer_norm(d.x, d.weight, d.bias, eps=d.eps), _ALL),
    _rms("OLMO2", OLMO2),
    _rms("LLAMA", LLAMA),
    _rms("GEMMA", GEMMA),
    _rms("T5", T5),
    Operator("l2", L2_NORM, lambda d: F.l2_norm(d.x, eps=d.eps), ("x",)),
    Operator(
        "add_layer",
        TORCH_LAYER_NORM,
        lambda d: F.add_layer_norm(d.x, d.residual, d.weight, d.bias, eps=d.eps)[0],
        (*_ALL, "residual"),
    ),
    Operator(
        "add_rms",
        OLMO2,
        lambda d: F.add_rms_norm(d.x, d.residual, d.weight, eps=d.eps)[0],
        ("x", "weight", "residual"),
    ),
    Operator(
        "gated",
        replace(GATED_RMS, gate="none", activation="none"),
        lambda d: F.gated_rms_norm(d.x, d.gate, d.weight, eps=d.eps),
        ("x", "weight", "gate"),
    ),
    Operator(
        "gated first",
        replace(GATED_RMS, gate="none", activation="none"),
        lambda d: F.gated_rms_norm(d.x, d.gate, d.weight, eps=d.eps, gate_first=True),
        ("x", "weight", "gate"),
        gate_first=True,
    ),
    Operator(
        "group",
        TORCH_LAYER_NORM,
        _positions(_group_norm),
        _ALL,
        lambda t: t.unflatten(-1, (GROUPS, -1)).transpose(1, 2).flatten(2).flatten(0, 1),
        lambda rows, n: (rows, max(n // (CHANNELS // GROUPS), 1), CHANNELS),
    ),
    Operator(
        "instance",
        TORCH_LAYER_NORM,
        _positions(F.instance_norm),
        _ALL,
        lambda t: t.transpose(1, 2).flatten(0, 1),
        lambda rows, n: (rows, n, CHANNELS),
    ),
    Operator(
        "batch",
        TORCH_LAYER_NORM,
        _positions(_batch_norm),
        _ALL,
        lambda t: t.permute(2, 0, 1).flatten(1),
        lambda rows, n: (2, max(n // 2, 1), CHANNELS),
    ),
)


def scattered(op: Operator, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `Operator.arrange`: lay rows that share a statistic out as x."""
    count = 1
    for size in shape:
        count *= size
    where = op.arrange(torch.arange(count).reshape(shape)).reshape(-1)
    flat = torch.empty(count, dtype=matrix.dtype)
    flat[where] = matrix.reshape(-1)
    return flat.reshape(shape)


@dataclass(frozen=True)
class Right:
    """What is right for one quantity: exact value, how far off it may be, and the size its ULP are taken at."""

    exact: Tensor
    bound: Tensor
    size: Tensor


def right(op: Operator, d: Draw, y_dtype: torch.dtype) -> dict[str, Right]:
    """Return exact y and gradients of ``op`` on a draw, laid out as the operator's own."""
    shape = tuple(d.x.shape)
    stream = d.x
    if "residual" in op.takes:
        stream = (d.x.float() + d.residual.float()).to(d.x.dtype)
    weight = d.weight if "weight" in op.takes else None
    bias = d.bias if "bias" in op.takes else None

    def spread(p: Tensor | None) -> Tensor | None:
        return None if p is None else op.arrange(p.expand(shape))

    matrix, w, b = op.arrange(stream), spread(weight), spread(bias)
    if op.gate_first:
        assert w is not None
        dx, dgate, dw = gates.first(matrix, d.gate, op.spec, w, d.eps, d.dy)
        per = truth.Gradients(dx, dw, truth.Gradient(*(torch.zeros_like(dw.exact),) * 3))
        found = {"y": _y(op, d, gates.products(matrix, d.gate), w, b), "dx": _right(dx), "dgate": _right(dgate)}
    else:
        factor = gates.Gate.of(d.gate).value if op.gated else torch.ones((), dtype=torch.float64)
        # The gate multiplies y, so it multiplies what comes back to the norm.
        per = truth.backward(matrix, op.spec, w, d.eps, op.arrange(d.dy.double()) * factor)
        found = {"y": _y(op, d, matrix, w, b, factor), "dx": _right(per.dx, gates.FACTOR if op.gated else 0.0)}
        if op.gated:
            assert w is not None
            found["dgate"] = _right(gates.after(matrix, d.gate, op.spec, w, d.eps, d.dy))
    found = {name: Right(*(scattered(op, t, shape) for t in (r.exact, r.bound, r.size))) for name, r in found.items()}
    if "residual" in op.takes:
        found["dresidual"] = found["dx"]
    for name, p, part in (("dw", weight, per.dw), ("db", bias, per.db)):
        if p is not None:
            more = gates.FACTOR if op.gated and not op.gate_first else 0.0
            bound = part.bound + more * part.terms
            laid = truth.Gradient(*(scattered(op, t, shape) for t in (part.exact, bound, part.terms)))
            total = truth.summed(laid, p.shape, p.dtype, truth.unit(torch.float32))
            found[name] = Right(total.exact, total.bound, total.terms)
    return found


def _right(part: truth.Gradient, more: float = 0.0) -> Right:
    return Right(part.exact, part.bound + more * part.terms, part.terms)


def _y(
    op: Operator, d: Draw, matrix: Tensor, w: Tensor | None, b: Tensor | None, factor: Tensor | None = None
) -> Right:
    """Return y of the rows in ``matrix``, each element times its ``factor`` where a gate comes after."""
    s = truth.statistics(matrix, op.spec, d.eps)
    gain = truth.gain_of(w, op.spec, matrix.dtype)
    size = s.xhat.abs().clamp(min=1.0) if op.spec.centered else s.xhat.abs()
    size = size if gain is None else size * gain.abs()
    size = size if b is None else torch.maximum(size, b.double().abs())
    after = w is not None and op.gated and factor is not None
    held = w.double() * factor if after else w  # type: ignore[union-attr,operator]
    a = truth.forward(matrix, op.spec, held, b, d.eps, d.x.dtype)
    bound = torch.maximum(a.exact - a.low, a.high - a.exact)
    if op.gated:
        bound = bound + (gates.XHAT if op.gate_first else gates.FACTOR) * a.exact.abs()
    if op.gate_first and gain is not None:  # a subnormal product is off by the smallest number, which x̂ multiplies
        bound = bound + truth.spacing(torch.float32) * s.inverse * gain.abs()
    return Right(a.exact, bound, size if factor is None else size * factor.abs())
