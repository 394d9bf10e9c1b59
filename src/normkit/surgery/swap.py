"""`swap_`: fused operators in place of a model's norms, instance by instance, and back."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normkit.checks import TORCH_DEFAULT
from normkit.spec import NormSpec
from normkit.surgery import epsilon, proof, screens
from normkit.surgery.candidates import Coverage
from normkit.surgery.findings import DtypePair, Identified, name_of
from normkit.surgery.fused import Fused, Plan
from normkit.surgery.identify import identify
from normkit.surgery.report import Accepted, Rejected, SwapReport, pair_name, restore
from normkit.surgery.stand_in import StandIn, tensors_of, undisturbed

Filter = Callable[[str, nn.Module], bool]


def swap_(model: nn.Module, filter: Filter | None = None, dry_run: bool = False) -> SwapReport:
    r"""Let the fused operators compute a model's norms, each by its own convention; everything else stays as it is.

    Every module is identified by behaviour (`normkit.identify`) and proven on random rows: the fused result has the
    same dtype, lies at most one ULP away in half types (two where the convention rounds twice) with 99.5 % of the
    elements identical, within the formula's error bound in float32, and is no less accurate against float64. What
    cannot keep this is left alone, and the report says why. The decision is made here, once, for every dtype that the
    module computes in; a call outside of what was verified (another dtype, autocast where that changes the module,
    further arguments, an ε changed afterwards) runs the module's own forward.

    Only ``forward`` of each instance changes: class, names, parameters, buffers, hooks, tied weights and state-dict
    keys stay, other models of the same class are untouched, and deepcopy, pickle, ``.to()``, ``load_state_dict``,
    ``torch.compile`` and gradient checkpointing go on as before. (A replica made by ``nn.DataParallel`` keeps the
    original's parameters; use DistributedDataParallel.) A pickle of a swapped model needs normkit to load; undo first
    where it should not.

    Args:
        model: any module, or a single norm. Changed in place.
        filter: ``(name, module) -> bool``; modules for which it is false are not even looked at.
        dry_run: report what would be done, and change nothing.

    Returns:
        A `SwapReport` with ``accepted``, ``rejected`` and ``undo()``; as a context manager it undoes at the end.

    Raises:
        TypeError: a model that is no module, a filter that is no callable.
        ValueError: a model that torch.compile has already compiled; swap first, then compile.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.ReLU())
        >>> x = torch.randn(2, 8)
        >>> before = model(x)
        >>> report = nk.swap_(model)
        >>> bool(torch.allclose(model(x), before, rtol=1e-6)), len(report.accepted)
        (True, 1)
        >>> report.undo()
        >>> bool(torch.equal(model(x), before))
        True
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"swap_: expected a torch.nn.Module, got {type(model).__name__}")
    if filter is not None and not callable(filter):  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError(f"swap_: filter must be a callable (name, module) -> bool, got {type(filter).__name__}")
    if _compiled(model):
        raise ValueError("swap_: the model is already compiled; swap the model first, then torch.compile it")
    accepted: list[Accepted] = []
    rejected: list[Rejected] = []
    passed_over = 0
    known: dict[Any, Accepted | _Left] = {}
    within: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix + ".") or prefix == "" for prefix in within):
            continue  # a part of a norm that is swapped as a whole
        if filter is not None and not filter(name, module):
            continue
        key = _key(module)
        if key not in known:
            known[key] = _judge(module)
        verdict = known[key]
        if isinstance(verdict, Accepted):
            accepted.append(verdict._replace(name=name))
            within.append(name)
        elif verdict.norm or _looks_like_a_norm(name, module):
            rejected.append(Rejected(name, verdict.reason))
        else:
            passed_over += 1
    report = SwapReport(model, accepted, rejected, passed_over, dry_run=dry_run)
    if not dry_run:
        report.install()
    return report


def unswap_(model: nn.Module) -> int:
    """Take every swapped forward off a model, a copied or unpickled one too; return how many there were.

    Example:
        >>> import copy, torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        >>> report = nk.swap_(model)
        >>> unswap_(copy.deepcopy(model)), unswap_(model)
        (1, 1)
    """
    held = [m for m in model.modules() if isinstance(vars(m).get("forward"), Fused)]
    for module in held:
        restore(module)
    return len(held)


def _compiled(model: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for module in model.modules():
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            return True
        if vars(module).get("_compiled_call_impl") is not None:
            return True
    return False


def _looks_like_a_norm(name: str, module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward:
        return False  # a list or dict of modules: it computes nothing, whatever it is called
    last = name.rpartition(".")[2].lower()
    return "norm" in type(module).__name__.lower() or "norm" in last or bool(re.search(r"(^|_)ln(_|\d|$)", last))


def _key(module: nn.Module) -> Any:
    """Return what modules must share to be judged as one: class, shapes, dtypes and every attribute."""
    own = vars(module)
    tensors = tuple(
        (kind, name, None if t is None else (type(t), tuple(t.shape), t.dtype, t.device))
        for kind in ("_parameters", "_buffers")
        for name, t in own[kind].items()
    )
    rest = tuple((n, _plain(v)) for n, v in own.items() if n not in ("_parameters", "_buffers") and "hooks" not in n)
    return type(module), tensors, rest


def _plain(value: Any) -> Any:
    """Return a value that is equal for equal attributes, and an identity for what cannot be compared."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    return type(value) if isinstance(value, (dict, set)) and not value else id(value)


@dataclass(frozen=True)
class _Left:
    """Why a module is left alone, and whether it is a norm all the same."""

    reason: str
    norm: bool = True


def _judge(module: nn.Module) -> Accepted | _Left:
    """Identify one module and prove a plan for it."""
    held = vars(module).get("forward")
    if held is not None:
        kind = type(held).__name__
        swapped = isinstance(held, Fused)
        return _Left("already swapped" if swapped else f"its forward was replaced on the instance ({kind})", swapped)
    if type(module).__module__.partition(".")[0] == "normkit":
        return _Left("one of normkit's own modules, which runs the fused operators already", norm=False)
    found = identify(module)
    if not isinstance(found, Identified):
        return _Left(found.reason, found.statistic)
    if screens.on_meta(module):
        return _Left("on the meta device: load its parameters first")
    return _planned(module, found)


def _planned(module: nn.Module, found: Identified) -> Accepted | _Left:
    device = screens.device_of(module)
    coverage = Coverage(found.axes, found.groups, found.channel_axis)
    gated = found.spec.gate != "none"
    names = tuple(inspect.signature(type(module).forward).parameters)[1 : 3 if gated else 2]
    plan = Plan(
        found.spec, found.eps, coverage, found.weight, found.bias, {}, inputs=names, attributes=_sources(module, found)
    )
    with undisturbed(device):
        trial = proof.Trial(StandIn(module), found, plan, device, gated)
        executed, kernels, reasons = _executed(trial)
        held = None if found.weight is None and found.bias is None else _held(module, found)
        if not any(pair[1] == held for pair in executed):
            return _Left(f"{name_of(found.spec)}, but {'; '.join(reasons) or 'no dtype could be verified'}")
        pair = next(pair for pair in executed)
        if not proof.same_in_training(module, trial, pair):
            return _Left("it computes something else in training than in inference")
        ungated: dict[DtypePair, NormSpec] = {}
        if gated and _gate_is_optional(module):
            ungated = _executed(replace(trial, gated=False))[0]
        x = trial.given(pair, 1.0)[0].x
        free = proof.any_width(trial, pair)
        plan = replace(
            plan,
            executed=executed,
            ungated=ungated,
            width=None if free else x.shape[coverage.channel_axis],
            ranks=proof.ranks(trial, pair),
            autocast=proof.indifferent_to_autocast(trial, tuple(executed)),
        )
    elsewhere = tuple(
        f"its own forward in {', '.join(map(pair_name, pairs))} ({why})" for why, pairs in reasons.items()
    )
    return Accepted("", name_of(found.spec), ", ".join(dict.fromkeys(kernels)), found, plan, elsewhere)


def _executed(trial: proof.Trial) -> tuple[dict[DtypePair, NormSpec], list[str], dict[str, list[DtypePair]]]:
    """Return the spec to run for each verified pair of dtypes, the kernels that will, and why others are left out.

    float32 x with half parameters is left to the module: hardly a model has it, and each pair is a kernel to compile.
    """
    executed: dict[DtypePair, NormSpec] = {}
    kernels: list[str] = []
    reasons: dict[str, list[DtypePair]] = {}
    rule = trial.found.spec if trial.gated else replace(trial.found.spec, gate="none", activation="none")
    for pair in trial.found.evidence.dtypes:
        if pair[1] not in (pair[0], torch.float32, None):
            continue
        why = ""
        for spec in proof.executables(rule, pair):
            given, _ = trial.given(pair, 1.0)
            kernel, no_other = proof.kernel_for(given, spec)
            if kernel == "reference":
                why = why or f"no fused kernel: {no_other}"
                continue
            objection = trial.objection(pair, spec)
            if objection is None:
                executed[pair] = spec
                kernels.append(kernel)
                break
            why = objection
        if pair not in executed:
            reasons.setdefault(why, []).append(pair)
    return executed, kernels, reasons


def _held(module: nn.Module, found: Identified) -> torch.dtype:
    name = found.weight or found.bias
    assert name is not None
    return tensors_of(module)[name].dtype


def _gate_is_optional(module: nn.Module) -> bool:
    return not screens.takes_gate(module)[1]


def _sources(module: nn.Module, found: Identified) -> tuple[tuple[str, object], ...]:
    """Return the attributes that say ε, so that a later change of theirs is noticed."""
    wanted = None if found.eps is TORCH_DEFAULT else found.eps
    return tuple((n, v) for n, v in epsilon.hints(module).items() if v == wanted and "eps" in n.lower())
