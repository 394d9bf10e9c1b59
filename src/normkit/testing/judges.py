"""Judges: each runs a norm on one input and returns what is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.testing import truth
from normkit.testing.inputs import Inputs, randn, replace, short, twin
from normkit.testing.subject import Subject


@dataclass(frozen=True)
class Problem:
    """What went wrong on one input: the kind, what came, what was right, and where."""

    kind: str
    got: str
    expected: str
    where: str = ""


Judge = Callable[[Subject, Inputs], Problem | None]


def stream_of(given: Inputs) -> Tensor:
    """Return what is normalised: x, or the sum with the residual in their promoted dtype, rounded once."""
    if given.residual is None:
        return given.x
    dtype = torch.promote_types(given.x.dtype, given.residual.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (given.x.to(wide) + given.residual.to(wide)).to(dtype)


def rows(t: Tensor) -> Tensor:
    """Return a matrix of rows."""
    return t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.reshape(0, 0)


def values(subject: Subject, given: Inputs) -> Problem | None:
    """Hold y (and the sum) to the interval of right answers, and to the dtype and shape of the spec."""
    y, s = subject(given.copy())
    stream = stream_of(given)
    if given.x.numel() == 0:
        return same_shape(y, given.x.shape)
    right = truth.forward(
        rows(stream), subject.spec, given.weight, given.bias, given.eps, given.x.dtype, corrected=subject.corrected
    )
    if (problem := same_shape(y, given.x.shape)) is not None:
        return problem
    if y.dtype != right.dtype:
        return Problem("dtype", str(y.dtype), f"{right.dtype} ({subject.spec.output=!s})".replace("subject.spec.", ""))
    if s is not None and not same_bits(s, stream):
        where = int((s.double() != stream.double()).reshape(-1).nonzero()[0])
        return Problem("sum", number(s, where), number(stream, where), f"element {where} of the sum")
    return _outside("y", rows(y), right.wrong(rows(y)), right.low, right.high, right.exact)


def same_shape(y: Tensor, shape: torch.Size) -> Problem | None:
    """Complain about a result of another shape."""
    return None if y.shape == shape else Problem("shape", str(tuple(y.shape)), str(tuple(shape)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same bits."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.detach().contiguous().view(integer), b.detach().contiguous().view(integer))
    )


def gradients(
    subject: Subject, given: Inputs, *, frozen: bool = False, graph: bool = False, sum_used: bool = True
) -> Problem | None:
    """Hold dx, dw, db (and the residual's) to their bounds; leave a frozen weight alone."""
    names, leaves = trainable(given, frozen=frozen)
    y, s = subject(replace(given, **leaves))
    dy = upstream(given, y)
    if not y.requires_grad:
        return Problem("gradient", "a result without a graph", "gradients for " + ", ".join(names))
    unused = s is None or not s.requires_grad or not sum_used
    ds = None if unused or s is None else randn(*s.shape, seed=5, dtype=s.dtype).to(s.device)
    outputs, ups = ((y,), (dy,)) if ds is None else ((y, s), (dy, ds))
    found = torch.autograd.grad(outputs, [leaves[n] for n in names], ups, create_graph=graph, allow_unused=True)  # type: ignore[arg-type]
    right = right_gradients(subject, given, dy, ds)
    for name, got in zip(names, found, strict=True):
        if got is None:
            return Problem(f"d{name}", "None", "a gradient", f"d{name}")
        if got.dtype != leaves[name].dtype or got.shape != leaves[name].shape:
            return Problem(
                f"d{name}", f"{got.dtype} {tuple(got.shape)}", f"{leaves[name].dtype} {tuple(leaves[name].shape)}"
            )
        want, flat = right[name], got if got.dim() < 2 else rows(got)
        bad = want.wrong(flat)
        problem = _outside(f"d{name}", flat, bad, want.exact - want.bound, want.exact + want.bound, want.exact)
        if problem is not None:
            return problem
    return None


def trainable(given: Inputs, *, frozen: bool = False) -> tuple[list[str], dict[str, Tensor]]:
    """Return the names whose gradients are asked for, and leaves, which a norm that writes into its input may spoil."""
    names = [n for n in given.tensors() if n != "dy" and not (frozen and n in ("weight", "bias"))]
    return names, {n: twin(given.tensors()[n]).requires_grad_() for n in names}


def upstream(given: Inputs, y: Tensor) -> Tensor:
    """Return the gradient to send back: the one given, or random, in y's dtype."""
    dy = given.dy if given.dy is not None and given.dy.shape == y.shape else randn(*y.shape, seed=3)
    return dy.to(device=y.device, dtype=y.dtype)


def right_gradients(subject: Subject, given: Inputs, dy: Tensor, ds: Tensor | None = None) -> dict[str, truth.Gradient]:
    """Return the exact gradients by name."""
    stream = rows(stream_of(given))
    per = truth.backward(stream, subject.spec, given.weight, given.eps, rows(dy), corrected=subject.corrected)
    u = truth.statistics_unit(subject.spec, stream.dtype)
    result: dict[str, truth.Gradient] = {}
    dx = per.dx
    if ds is not None:
        extra = rows(ds).double()
        bound = dx.bound + u * extra.abs() + truth.unit(stream.dtype) * (dx.exact.abs() + extra.abs())
        dx = truth.Gradient(dx.exact + extra, bound, dx.terms + extra.abs())
    for name, t in (("x", given.x), ("residual", given.residual)):
        if t is not None:
            result[name] = truth.Gradient(dx.exact, dx.bound + truth.unit(t.dtype) * dx.exact.abs(), dx.terms)
    for name, t, part in (("weight", given.weight, per.dw), ("bias", given.bias, per.db)):
        if t is not None:
            result[name] = truth.summed(part, t.shape, t.dtype, u)
    return result


def second_order(subject: Subject, given: Inputs) -> Problem | None:
    """Compare ∂(dx·v)/∂(x, w, dy) in float64 with plain operators.

    A term left out or counted twice changes a result by a share of its size. Rounding changes it by about the unit
    roundoff (2^-24: many norms compute float64 input in float32) times the few hundred operations behind it: half
    of float32's digits, 2^-12 of the largest element, tells the two apart.
    """
    wide = replace(given, **{n: t.double() for n, t in given.tensors().items()})
    names, leaves = trainable(wide)
    dy = upstream(wide, wide.x).requires_grad_()
    v = randn(*wide.x.shape, seed=7, dtype=torch.float64).to(wide.x.device)

    def derive(y: Tensor) -> list[Tensor]:
        (dx,) = torch.autograd.grad(y, leaves["x"], dy, create_graph=True)
        asked = [*(leaves[n] for n in names), dy]  # a bias is in no second derivative: a zero, not None
        return list(torch.autograd.grad((dx * v).sum(), asked, allow_unused=True, materialize_grads=True))

    got = derive(subject(replace(wide, **leaves))[0])
    stream = leaves["x"] + leaves["residual"] if "residual" in leaves else leaves["x"]
    want = derive(truth.plain(stream, subject.spec, leaves.get("weight"), leaves.get("bias"), wide.eps))
    for name, a, b in zip([*names, "dy"], got, want, strict=True):
        slack = torch.full_like(b, 2.0**-12 * max(float(b.abs().max()), 1.0))
        flat = (a, b, slack) if a.dim() < 2 else (rows(a), rows(b), rows(slack))
        bad = ~((flat[0] - flat[1]).abs() <= flat[2])
        problem = _outside(f"d(dx)/d{name}", flat[0], bad, flat[1] - flat[2], flat[1] + flat[2], flat[1])
        if problem is not None:
            return problem
    return None


def untouched(subject: Subject, given: Inputs, *, backward: bool) -> Problem | None:
    """Complain when a call changes what it was given, or the upstream gradient, or returns x's own memory."""
    held = given.copy()
    if backward:
        names = [name for name in held.tensors() if name != "dy"]
        leaves = {name: held.tensors()[name].detach().requires_grad_() for name in names}
        y, _ = subject(replace(held, **leaves))
        dy = upstream(given, y)
        before = dy.clone()
        if y.requires_grad:
            torch.autograd.grad(y, [leaves[n] for n in names], dy, allow_unused=True)
        if not same_bits(dy, before):
            return Problem("changed", "the upstream gradient was overwritten", "as it was")
    with torch.no_grad():
        y, _ = subject(held)
    for name, t in held.tensors().items():
        problem = _written_to(name, whole(t), whole(given.tensors()[name]))
        if problem is not None:
            return problem
    if y.numel() and y.untyped_storage().data_ptr() == held.x.untyped_storage().data_ptr():
        return Problem("aliased", "y shares x's memory", "memory of its own")
    return None


def whole(t: Tensor) -> Tensor:
    """Return everything in the storage of ``t``: its own numbers and what lies between them."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())  # type: ignore[call-overload]


def _written_to(name: str, after: Tensor, before: Tensor) -> Problem | None:
    if same_bits(after, before):
        return None
    at = int((after != before).logical_and(~(after.isnan() & before.isnan())).nonzero()[0])
    return Problem("changed", number(after, at), number(before, at), f"element {at} of the memory under {name}")


def _outside(name: str, got: Tensor, bad: Tensor, low: Tensor, high: Tensor, exact: Tensor) -> Problem | None:
    if not bool(bad.any()):
        return None
    excess = torch.maximum(low - got.double(), got.double() - high).nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = int(torch.where(bad, excess, -1.0).reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)) if got.dim() else ()
    ends = [float(t.reshape(-1)[worst]) for t in (low, high, exact)]
    span = f"{ends[0]:.9g}" if ends[0] == ends[1] else f"{ends[0]:.9g} … {ends[1]:.9g}"
    return Problem(
        name, number(got, worst), f"{span} (exactly {ends[2]:.9g})", f"{name}{list(index)}; {int(bad.sum())} wrong"
    )


def number(t: Tensor, flat_index: int) -> str:
    """Write one element down."""
    return short(float(t.detach().reshape(-1)[flat_index]), t.dtype)
