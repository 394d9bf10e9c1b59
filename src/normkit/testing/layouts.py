"""Judges of layout and of row independence: the same numbers lying elsewhere, or among other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normkit.testing import truth
from normkit.testing.inputs import Inputs, randn, replace
from normkit.testing.judges import Problem, gradients, number, rows, same_bits, trainable, upstream, values
from normkit.testing.subject import Subject


def strided(t: Tensor) -> Tensor:
    """Return the same values two elements apart."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., ::2] = t.detach()
    return wide[..., ::2]


def transposed(t: Tensor) -> Tensor:
    """Return the same values with the last axis slowest."""
    return t.detach().transpose(-1, 0).contiguous().transpose(-1, 0)


def sliced(t: Tensor) -> Tensor:
    """Return the same values inside a larger tensor, behind an offset and between other rows and columns."""
    wide = torch.full((t.shape[0] + 2, *t.shape[1:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
    view = wide[1:-1, ..., 1:-2]
    view.copy_(t.detach())
    return view


def expanded(t: Tensor) -> Tensor:
    """Return the first row, repeated without memory."""
    return t.detach()[:1].expand(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "transposed": transposed,
    "sliced": sliced,
    "expanded": expanded,
}


def laid_out(given: Inputs, layout: str) -> Inputs:
    """Return the inputs with x (and the residual) in another layout."""
    make = LAYOUTS[layout]
    return replace(given, x=make(given.x), residual=None if given.residual is None else make(given.residual))


def in_layout(subject: Subject, given: Inputs, *, layout: str, backward: bool) -> Problem | None:
    """Hold y and the gradients to their bounds with x in another layout; neighbours in memory are NaN."""
    return as_given(subject, laid_out(given, layout), backward=backward)


def as_given(subject: Subject, given: Inputs, *, backward: bool) -> Problem | None:
    """Hold y (and the gradients) to their bounds in the layout given, unless a contiguous copy fails alike."""

    def judge(inputs: Inputs) -> Problem | None:
        problem = values(subject, inputs)
        return gradients(subject, inputs) if problem is None and backward else problem

    return _unless(judge, given, contiguous(given))


def upstream_in_layout(subject: Subject, given: Inputs, *, layout: str) -> Problem | None:
    """Hold the gradients to their bounds with an upstream gradient in another layout, unless a copy fails alike."""
    dy = given.dy if given.dy is not None else randn(*given.x.shape, seed=3)
    other = replace(given, dy=LAYOUTS[layout](dy.to(given.x.device)))
    return _unless(lambda inputs: gradients(subject, inputs), other, contiguous(other))


def _unless(judge: Callable[[Inputs], Problem | None], given: Inputs, copy: Inputs) -> Problem | None:
    """Return the problem with ``given`` that its contiguous copy does not have: only that is the layout's."""
    problem = judge(given)
    if problem is None:
        return None
    same = judge(copy)
    return None if same is not None and same.kind == problem.kind else problem


def contiguous(given: Inputs) -> Inputs:
    """Return the same values, packed."""
    return replace(given, **{name: t.contiguous() for name, t in given.tensors().items()})


def layout_bits(subject: Subject, given: Inputs, *, backward: bool) -> Problem | None:
    """Compare bits with those of the contiguous copy."""
    for layout in LAYOUTS:
        other = laid_out(given, layout)
        packed = outcome(subject, contiguous(other), backward)
        for (name, a), (_, b) in zip(outcome(subject, other, backward), packed, strict=True):
            if not same_bits(a, b):
                return _differs(name, a, b, f"{layout} x")
    return None


def outcome(subject: Subject, given: Inputs, backward: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield y and dx. The layout of x is kept: detaching makes a view."""
    if not backward:
        with torch.no_grad():
            y, _ = subject(given.copy())
        yield "y", y  # outside the block: a generator that is left early would leave gradients off
        return
    _, leaves = trainable(given)
    y, _ = subject(replace(given, **leaves))
    yield "y", y
    if y.requires_grad:
        yield "dx", torch.autograd.grad(y, leaves["x"], upstream(given, y))[0]


def row_bits(subject: Subject, given: Inputs, *, backward: bool) -> Problem | None:
    """Compare a row alone with the same row among others, at both ends and in the middle."""
    dy = given.dy if given.dy is not None else randn(*given.x.shape, seed=3)
    whole = dict(outcome(subject, replace(given, dy=dy), backward))
    count = given.x.shape[0]
    for i in sorted({0, count // 2, count - 1}):
        cut = slice(i, i + 1)
        alone = replace(
            given, x=given.x[cut], dy=dy[cut], residual=None if given.residual is None else given.residual[cut]
        )
        for name, t in outcome(subject, alone, backward):
            if not same_bits(t, whole[name][cut]):
                return _differs(f"{name} of row {i}", whole[name][cut], t, f"row {i} of {count}")
    return None


def row_bits_repeated(subject: Subject, given: Inputs, *, backward: bool, count: int) -> Problem | None:
    """Compare one row alone with ``count`` copies of it: every copy must have the row's own bits."""
    dy = given.dy if given.dy is not None else randn(*given.x.shape, seed=3)
    one = dict(outcome(subject, replace(given, dy=dy), backward))

    def many(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.expand(count, -1).contiguous()

    crowd = replace(given, x=given.x.expand(count, -1).contiguous(), dy=many(dy), residual=many(given.residual))
    for name, t in outcome(subject, crowd, backward):
        if not same_bits(t, one[name].expand(count, -1)):
            return _differs(name, t, one[name].expand(count, -1), f"{count} copies of the row")
    return None


def nan_stays(subject: Subject, given: Inputs) -> Problem | None:
    """Put NaN and inf into two rows; all others must come out as right as without them."""
    x = given.x.clone()
    x[1, 0], x[3, -1] = torch.nan, torch.inf
    y = rows(subject(replace(given.copy(), x=x))[0])
    residual = None if given.residual is None else rows(given.residual)
    clean = [i for i in range(x.shape[0]) if i not in (1, 3)]
    stream = given.x if residual is None else (given.x.float() + residual.float()).to(given.x.dtype)
    right = truth.forward(
        stream, subject.spec, given.weight, given.bias, given.eps, given.x.dtype, corrected=subject.corrected
    )
    for i in clean:
        if bool(right.wrong(y)[i].any()):
            return Problem(
                "spread", str(y[i].tolist()[:4]), str(right.exact[i].tolist()[:4]), f"row {i}, which is finite"
            )
    return (
        None
        if bool(y[1].isnan().all())
        else Problem("lost", str(y[1].tolist()[:4]), "NaN throughout", "row 1, which holds a NaN")
    )


def _differs(name: str, a: Tensor, b: Tensor, where: str) -> Problem:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Problem("bits", f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}", f"{name}, {where}")
    gap = (a.double() - b.double()).abs().reshape(-1)
    at = int(gap.nan_to_num(nan=torch.inf).argmax())
    count = int((a != b).sum())
    return Problem("bits", number(a, at), number(b, at), f"{name}, {where}; {count} differ")
