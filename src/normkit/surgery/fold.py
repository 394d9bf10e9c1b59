"""Norms folded into the linear layers around them, where one forward proves that this changes nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normkit.surgery.folding.batch import BatchFold, batch_fold
from normkit.surgery.folding.centre import CentreFold, centre_fold
from normkit.surgery.folding.flow import Flow
from normkit.surgery.folding.forwards import folded_forward
from normkit.surgery.folding.norms import at_rest
from normkit.surgery.folding.permission import Permission
from normkit.surgery.folding.report import Folded, FoldError, FoldReport, Refused
from normkit.surgery.folding.survey import Survey, survey
from normkit.surgery.folding.trace import trace
from normkit.surgery.folding.values import Values, Written
from normkit.surgery.folding.weight import WeightFold, weight_fold
from normkit.surgery.folding.wide import (
    Call,
    Float64Throughout,
    call,
    copied,
    distance,
    numbers,
    response,
    scale_of,
    widened,
)

Fold = WeightFold | BatchFold | CentreFold


def fold_(model: nn.Module, /, *args: Any, **kwargs: Any) -> FoldReport:
    r"""Fold norms into the linear layers around them: the same function with fewer parameters at work.

    Three folds, each done only where this one forward proves it:

    * **weight**: ``W ← W·diag(γ)``, ``b ← b + W·β`` in every linear layer that reads a norm; its weight then rests at
      1 (0 where the convention adds 1) and its bias at 0;
    * **batch norm**: in eval mode, ``W ← s·W``, ``b ← s·b + t`` in the layer before it, with ``s = γ/√(σ² + ε)`` and
      ``t = β − μ·s``; the norm then leaves its input as it is. A layer without a bias gets none: the norm keeps t;
    * **mean**: every layer, embedding and parameter that writes a residual stream loses its mean over the channels;
      a LayerNorm that reads the stream then computes its values as an RMSNorm.

    The proof is the data flow of the example, along the paths that it takes. A norm that is read by anything but linear
    layers (a residual sum, an activation, the caller) is refused, and so are layers that also read something else,
    weights tied to another place, modules with forward hooks, and a bias where the reader has none to take it: its
    state dict would grow. A layer beside a reader that this example did not call (an expert that no token went to) is
    a reason to refuse as well. What a forward stores on the side for somebody to read later is not seen. Every class,
    shape and state-dict key stays as it is. New weights are computed in float64 and rounded once to the weight's own
    dtype; in bfloat16 and float16 that moves the outputs, and the report says by how much.

    Everything is tried on copies first: float64 copies before and after must agree within what rounding can do. Only
    then is the model written to, so it is unchanged when anything fails. Copies need memory: one of the model, one in
    float64.

    A LayerNorm that became an RMSNorm has its forward set on the instance (pickle and deepcopy keep it). Loading a
    state dict gives it the class's own back, which is right for folded weights and for any others.

    Args:
        model: in eval mode. Written in place.
        args, kwargs: one call of the model; an input that takes the paths the model takes in use.

    Returns:
        `FoldReport`: ``folded``, ``refused`` with reasons, ``already``, ``error``, ``undo()``. A second call folds
        nothing and says so.

    Raises:
        TypeError: for something that is no module.
        ValueError: for a model in training mode, compiled, or on meta; one that cannot be copied, fails on the
            example, returns no floating tensor, or returns another result each time.

    Source: batch norm, Jacob et al. 2018, arXiv 1712.05877, section 3.2; weight and mean of a LayerNorm, Ashkboos et
        al. 2024, arXiv 2401.15024, section 3.2.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 3)).eval()
        >>> _ = model[0].weight.data.uniform_(1, 2)
        >>> report = nk.fold_(model, torch.randn(2, 4))
        >>> print(report.folded[0])
        0: weight into 1
        >>> model[0].weight.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    _check(model)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        return _fold(model, (args, kwargs))


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"fold_: expected a torch.nn.Module, got {type(model).__name__}")
    if any(_compiled(m) for m in model.modules()):
        raise ValueError("fold_: the model is compiled; fold the original module and compile it afterwards")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"fold_: expected the model itself; pass {type(model).__name__}.module")
    training = next((name or type(model).__name__ for name, m in model.named_modules() if m.training), None)
    if training is not None:
        raise ValueError(
            f"fold_: {training} is in training mode, where a norm is no fixed map; call model.eval() first"
        )
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ValueError(f"fold_: {meta} is on meta and has no values; load the weights first")


def _compiled(module: nn.Module) -> bool:
    by_call = vars(module).get("_compiled_call_impl") is not None
    return by_call or isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in vars(module).get("_modules", {})


def _fold(model: nn.Module, example: Call) -> FoldReport:
    own = copied(model)
    found, out = survey(own, lambda: call(own, example))
    before = numbers(out)
    if not before:
        raise ValueError("fold_: the model returned no floating tensor on the example, so nothing could be verified")
    flow = trace(own, found.norms, found.linears, lambda: call(own, example))
    folds, refused, already = _plan(own, flow, found)
    if not folds:
        return FoldReport((), tuple(refused), tuple(already))
    verdict = _verify(model, example, folds, found)
    if isinstance(verdict, str):
        return FoldReport((), (*refused, *(Refused(f.norm, f.kind, verdict) for f in folds)), tuple(already))
    base, moved, bound = verdict
    values = _values(own, folds)
    if (name := values.overflow()) is not None:
        why = f"the new {name} is larger than its dtype can hold"
        return FoldReport((), (*refused, *(Refused(f.norm, f.kind, why) for f in folds)), tuple(already))
    _carry_out(own, folds)
    after = numbers(call(own, example))
    error = _error(before, after, base, moved, bound)
    if not math.isfinite(error.moved):
        why = f"in {before[0].dtype} the folded model's outputs are finite in other places than before"
        return FoldReport((), (*refused, *(Refused(f.norm, f.kind, why) for f in folds)), tuple(already))
    written, converted = _carry_out(model, folds)
    done = tuple(Folded(f.norm, f.kind, f.into) for f in folds)
    return FoldReport(done, tuple(refused), tuple(already), error, written, converted)


def _plan(model: nn.Module, flow: Flow, found: Survey) -> tuple[list[Fold], list[Refused], list[str]]:
    folds: list[Fold] = []
    refused, already = list(found.refused), list[str]()
    known = {r.name for r in refused}
    for name, operator in flow.bare.items():
        if name not in known:
            refused.append(Refused(name, "norm", f"its forward calls {operator} itself; only modules are folded"))
    allowed = Permission(model, flow)
    for name, norm in found.norms.items():
        module = model.get_submodule(name)
        tries: list[tuple[str, Fold | str]] = []
        if at_rest(norm, module):
            already.append(name)
        elif norm.spec is None:
            tries.append(("batch norm", batch_fold(name, norm, model, flow, found.linears, allowed)))
        else:
            tries.append(("weight", weight_fold(name, norm, model, flow, found.linears, allowed)))
        if norm.spec is not None and norm.spec.centered:
            tries.append(("mean", centre_fold(name, found.norms, model, flow, found.linears, allowed)))
        for what, fold in tries:
            if isinstance(fold, str):
                refused.append(Refused(name, what, fold))
            else:
                folds.append(fold)
    return folds, refused, already


def _values(model: nn.Module, folds: list[Fold]) -> Values:
    values = Values(model)
    for fold in folds:
        fold.apply(values)
    return values


def _carry_out(model: nn.Module, folds: list[Fold]) -> tuple[Written, tuple[nn.Module, ...]]:
    written = _values(model, folds).write()
    for fold in folds:
        fold.convert(model)
    modules = (model.get_submodule(fold.norm) for fold in folds)
    return written, tuple(m for m in modules if folded_forward(m) is not None)


def _verify(
    model: nn.Module, example: Call, folds: list[Fold], found: Survey
) -> tuple[list[Tensor], float, float] | str:
    """Fold a float64 copy; return its outputs before, how far they moved and may move, or why that is too far."""
    wide, far = copied(model).double(), widened(example)

    def run(model: nn.Module) -> list[Tensor]:
        with Float64Throughout():
            return numbers(call(model, far))

    try:
        base = run(wide)
    except ValueError as error:
        return f"nothing can be verified in float64: {error}"
    if any(distance(run(wide), base)):
        raise ValueError(
            "fold_: the model returns another result each time on the same example, so nothing is verifiable"
        )
    taps = max((found.linears[name].taps for fold in folds for name in fold.into if name in found.linears), default=1)
    bound = response(wide, list(_values(wide, folds)), taps, run, base)
    _carry_out(wide, folds)
    moved = distance(run(wide), base)
    sizes = [size or 1.0 for size in scale_of(base)]
    shares = [(m / s, b / s) for m, b, s in zip(moved, bound, sizes, strict=True)]
    worst = max(shares, key=lambda share: share[0] / share[1] if share[1] else float(share[0] > 0))
    if any(m > b for m, b in shares):
        return (
            f"the folded model's outputs differ in float64 by {worst[0]:.1e} of their size, and rounding explains "
            f"{worst[1]:.1e}; all folds were taken back"
        )
    return base, *worst


def _error(before: list[Tensor], after: list[Tensor], base: list[Tensor], moved: float, bound: float) -> FoldError:
    sizes = [size or 1.0 for size in scale_of(base)]
    own = max(d / s for d, s in zip(distance(after, before), sizes, strict=True))
    return FoldError(moved, bound, own, _rms(before, base), _rms(after, base), before[0].dtype)


def _rms(out: list[Tensor], base: list[Tensor]) -> float:
    square = size = 0.0
    for t, exact in zip(out, base, strict=True):
        finite = exact.isfinite() & t.isfinite()
        square += float((t.double() - exact)[finite].square().sum())
        size += float(exact[finite].square().sum())
    return (square / size) ** 0.5 if size else 0.0
