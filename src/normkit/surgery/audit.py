"""`audit`: every norm of a model, what it computes, where it sits, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normkit.surgery.auditing.asked import Asked, by_behaviour
from normkit.surgery.auditing.example import examples
from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection, Norm
from normkit.surgery.auditing.notes import notes_on, what_failed
from normkit.surgery.auditing.rules import findings
from normkit.surgery.auditing.rules.training import decayed
from normkit.surgery.auditing.survey import survey
from normkit.surgery.auditing.untouched import untouched
from normkit.surgery.flow.positions import positions
from normkit.surgery.flow.record import Flow, record
from normkit.surgery.flow.sightings import sightings
from normkit.surgery.flow.stream import Stream, streams
from normkit.surgery.identify import identify


@dataclass(frozen=True)
class Audit:
    """What `audit` found.

    Args:
        model: the model's class.
        norms: every norm, in the model's order.
        streams: the residual streams, the longest first.
        findings: the gravest first.
        notes: what could not be looked at, and why.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(nk.PreNorm(8, torch.nn.Linear(8, 8)), nk.RMSNorm(8))
        >>> report = nk.audit(model, torch.randn(2, 3, 8))
        >>> report.streams[0].wiring, [norm.positions for norm in report.norms], report.dangerous
        ('pre', [('branch input',), ('final',)], False)
    """

    model: str
    norms: tuple[Norm, ...]
    streams: tuple[Stream, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    _seen: Inspection | None = field(default=None, repr=False, compare=False)

    @property
    def dangerous(self) -> bool:
        """Whether any finding is a danger."""
        return any(finding.severity == "danger" for finding in self.findings)

    def decayed_by(self, optimizer: torch.optim.Optimizer) -> list[Finding]:
        """Return a finding if this optimizer decays the weights of norms; an empty list if it does not.

        Example:
            >>> import torch, normkit as nk
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), nk.RMSNorm(8))
            >>> optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
            >>> [finding.where for finding in nk.audit(model, torch.randn(2, 8)).decayed_by(optimizer)]
            [('1.weight',)]
        """
        return [] if self._seen is None else list(decayed(self._seen, optimizer))

    def to_json(self) -> str:
        """Return everything as JSON: ``model``, ``norms``, ``streams``, ``findings``, ``notes``."""
        from normkit.surgery.auditing.report import as_data

        return json.dumps(as_data(self), indent=1, allow_nan=False)

    def text(self, width: int = 100, color: bool = False) -> str:
        """Return the report as text: findings, wiring, the tree of norms. Needs rich."""
        from normkit.surgery.auditing.report import text

        return text(self, width, color)

    def __str__(self) -> str:
        return self.text()


def audit(model: nn.Module, *args: Any, **kwargs: Any) -> Audit:
    r"""List every norm of a model, where it sits around the residual stream, and what is wrong with it.

    One forward is run without gradients, in evaluation mode, and every operator in it recorded: which norms ran, how
    often, on what, and how each sublayer's result joins the stream. Norms are recognised by what they compute, function
    calls inside larger forwards included; each norm module is then asked for its conventions (`identify`).

    Args:
        model: any module. Its parameters, buffers, training flags, hooks and gradients, and the random state, are
            afterwards what they were.
        args, kwargs: what to call it with. Not needed for a model with a config that names its vocabulary or image
            size (transformers); any other model without an example is listed without wiring and call counts.

    Returns:
        An `Audit`. A model that fails is no error: the report says where it failed and goes as far as it got.

    Raises:
        TypeError: for something that is no module.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(nk.PreNorm(8, torch.nn.Linear(8, 8)), nk.RMSNorm(8))
        >>> model[0].norm_in.eps = 1e-3
        >>> for norm in nk.audit(model, torch.randn(2, 3, 8)).norms:
        ...     print(norm.name, norm.convention, norm.eps)
        0.norm_in TORCH_RMS_NORM 0.001
        1 TORCH_RMS_NORM 1e-06
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"audit: expected a torch.nn.Module, got {type(model).__name__}")
    notes = notes_on(model)
    inner = getattr(model, "_orig_mod", model)  # a compiled model's code, run as Python
    return inspect_model(inner, args, kwargs, notes, identify)


def inspect_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], notes: list[str], identify: Callable[..., Any]
) -> Audit:
    """Run, survey, judge."""
    given = bool(args or kwargs)
    with untouched(model):
        flow = _best(model, args, kwargs)
    if flow is None:
        notes.append("no example input and no config to make one from: wiring, call counts and functions are unknown")
    elif flow.error is not None:
        notes.append(what_failed(model, flow, given))
    asked = Asked(identify)
    found = sightings(flow) if flow is not None else []
    if flow is not None:
        with torch.no_grad(), untouched(model):
            found = sorted([*found, *by_behaviour(flow, found, asked)], key=lambda sighting: sighting.out)
    stream_list = streams(flow, found) if flow is not None else []
    if flow is not None and flow.error is not None:
        stream_list = [replace(stream, final=None) for stream in stream_list]
    if flow is not None and flow.error is None and len(found) > 2 and not stream_list:
        notes.append("no residual addition was found: the wiring has no name here (several streams, or no residual)")
    places = positions(flow, found, stream_list) if flow is not None else {}
    with torch.no_grad(), untouched(model):
        norms = survey(model, flow, found, places, asked)
    seen = Inspection(model, norms, flow, found, stream_list, places, own_example=not given)
    return Audit(type(model).__name__, tuple(norms), tuple(stream_list), tuple(findings(seen)), tuple(notes), seen)


def _best(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow | None:
    """Run the given example, or those that the config suggests until one goes through; keep what got furthest."""
    best: Flow | None = None
    for positional, named in _tries(model, args, kwargs):
        flow = record(model, positional, named)
        if flow.error is None:
            return flow
        if best is None or len(flow.nodes) > len(best.nodes):
            best = flow
    return best


def _tries(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if args or kwargs:
        yield args, kwargs
    else:
        yield from (((), named) for named in examples(model))
