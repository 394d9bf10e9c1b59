"""`nk.testing.check`: the whole catalogue on somebody's norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.conventions import LLAMA
from normkit.spec import NormSpec
from normkit.testing import truth
from normkit.testing.cases import Case, Plan
from normkit.testing.cases_backward import CATALOGUE
from normkit.testing.conformance import Conformance, Failure
from normkit.testing.inputs import Inputs, replace
from normkit.testing.judges import Problem, right_gradients, rows, stream_of, trainable, upstream
from normkit.testing.shrink import judged, smallest
from normkit.testing.subject import Subject
from normkit.testing.ulp import Error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(
    fn: object,
    spec: NormSpec = LLAMA,
    backward: bool = True,
    residual: bool = False,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    bias: bool = False,
    bits: bool = False,
    strict: bool = False,
    eps: float | None = None,
    only: Sequence[str] | None = None,
) -> Conformance:
    """Run reported faults, hard rows, layouts, dtypes and gradients on a norm of the last axis.

    Args:
        fn: a function (x, weight, eps); with ``bias`` (x, weight, bias, eps); with ``residual`` (x, residual,
            weight, eps), which returns y or (y, sum). Or an ``nn.Module`` (checked at its width and ε, with
            parameters of ours), its class, or a ``functools.partial`` of the class, which are built as ``fn(width,
            eps=ε)``.
        spec: the conventions it is meant to have. A weightless spec passes None as weight.
        backward: check gradients too.
        residual, bias: the form of ``fn``.
        device: where to run.
        dtypes: of x.
        bits: also require that a row's bits depend neither on the batch nor on the layout; otherwise that is a note.
        strict: hold a centred norm to the corrected two-pass on every input, not only on rows made for it.
        eps: ε of a module that does not show its own.
        only: ids of checks, or beginnings of ids; all by default.

    Returns:
        A `Conformance`; print it, or assert its ``ok``.

    Raises:
        TypeError, ValueError: ``fn`` is nothing that can be called so; a gated spec; an id that no check has.

    Example:
        >>> import torch, normkit as nk
        >>> def mine(x, weight, eps):
        ...     return nk.rms_norm(x, weight, eps=eps, spec=nk.GEMMA)
        >>> nk.testing.check(mine, spec=nk.GEMMA, backward=False, only=["A", "B"]).ok
        True
    """
    subject = Subject(fn, spec, residual=residual, bias=bias, eps=eps, device=device)
    plan = Plan(subject, tuple(dtypes), backward)
    passed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    failures: list[Failure] = []
    notes: list[Failure] = []
    for case in chosen(only):
        ran, failure, refused = run(case, plan, strict=strict) if backward or not case.backward else (0, None, None)
        notes += [refused] if refused is not None else []
        if failure is not None:
            (notes if case.optional and not bits else failures).append(failure)
        elif ran:
            passed[case.id] = case.line
        elif refused is None:
            skipped[case.id] = case.line
    errors = {} if only is not None else {str(d).removeprefix("torch."): measured(plan, d) for d in dtypes}
    return Conformance(passed, tuple(failures), tuple(notes), skipped, errors)


def chosen(only: Sequence[str] | None) -> list[Case]:
    """Return the checks whose id is given, or begins so."""
    if only is None:
        return CATALOGUE.cases
    known = [case.id for case in CATALOGUE.cases]
    strange = [name for name in only if not any(id.startswith(name) for id in known)]
    if strange:
        raise ValueError(f"check: no check is called {strange[0]!r}; there are {', '.join(known)}")
    return [case for case in CATALOGUE.cases if any(case.id.startswith(name) for name in only)]


def run(case: Case, plan: Plan, *, strict: bool) -> tuple[int, Failure | None, Failure | None]:
    """Run one check on all its inputs: how many ran, the first failure (shrunk), and the first refusal allowed."""
    ran, others = 0, 0
    subject = plan.subject.held_to(corrected=strict or case.corrected)
    first: tuple[str, Problem, Inputs] | None = None
    refused: Failure | None = None
    for label, made in case.make(plan):
        given = subject.fit(made)
        if given is None:
            continue
        problem = judged(case.judge, subject, given)
        if problem is not None and problem.kind == "raised" and (case.may_refuse or case.optional):
            refused = refused or Failure(case.id, case.line, case.bound, label, problem, given)
            continue
        ran += 1
        if problem is not None and first is None:
            first = (label, problem, given)
        elif problem is not None:
            others += 1
    if first is None:
        return ran, None, refused
    label, problem, given = first
    small, problem = smallest(case.judge, subject, given, problem) if not case.optional else (given, problem)
    return ran, Failure(case.id, case.line, case.bound, label, problem, small, others), refused


def measured(plan: Plan, dtype: torch.dtype) -> dict[str, Error]:
    """Return the error on random rows in ULP: 16 rows of width 768, or of the subject's own."""
    given = plan.subject.fit(plan.random((16, plan.subject.width or 768), dtype, seed=1))
    assert given is not None
    try:
        return errors_of(plan.subject, given, backward=plan.backward)
    except Exception:  # a norm that cannot run has said so in the checks
        return {}


def errors_of(subject: Subject, given: Inputs, *, backward: bool) -> dict[str, Error]:
    """Return the error of y and of each gradient in ULP."""
    names, leaves = trainable(given)
    y, _ = subject(replace(given, **leaves))
    stream = rows(stream_of(given))
    right = truth.forward(stream, subject.spec, given.weight, given.bias, given.eps, given.x.dtype)
    found = {"y": Error.of(rows(y.detach()), right.exact, size_of(stream, subject.spec, given))}
    if not backward or not y.requires_grad:
        return found
    dy = upstream(given, y)
    wanted = right_gradients(subject, given, dy)
    gradients = torch.autograd.grad(y, [leaves[n] for n in names], dy)
    for name, got in zip(names, gradients, strict=True):
        want = wanted[name]
        found[_SHORT[name]] = Error.of(got if got.dim() < 2 else rows(got), want.exact, want.terms)
    return found


_SHORT = {"x": "dx", "weight": "dw", "bias": "db", "residual": "dresidual"}


def size_of(stream: Tensor, spec: NormSpec, given: Inputs) -> Tensor:
    """Return the size of the numbers that y is made of, in which its ULP are taken."""
    s = truth.statistics(stream, spec, given.eps)
    gain = truth.gain_of(given.weight, spec, stream.dtype)
    size = s.xhat.abs().clamp(min=1.0) if spec.centered else s.xhat.abs()
    size = size if gain is None else size * gain.abs()
    return size if given.bias is None else torch.maximum(size, given.bias.double().abs())
