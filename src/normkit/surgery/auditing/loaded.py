"""Auditing a model that was loaded from files: what the files lacked is a finding too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from normkit.surgery.audit import Audit, audit
from normkit.surgery.auditing.finding import SEVERITIES, Finding
from normkit.surgery.auditing.load import Loaded


def audit_loaded(loaded: Loaded) -> Audit:
    """Audit a loaded model and add what its files say about its norms.

    Example:
        >>> import torch, normkit as nk
        >>> audit_loaded(Loaded(torch.nn.Sequential(nk.RMSNorm(4)), (torch.ones(2, 4),))).dangerous
        False
    """
    report = audit(loaded.model, *loaded.args, **loaded.kwargs)
    found = [*report.findings, *_keys(loaded, report)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return replace(report, findings=tuple(found), notes=(*loaded.notes, *report.notes))


def _keys(loaded: Loaded, report: Audit) -> Iterator[Finding]:
    mine = {parameter for norm in report.norms for parameter in norm.parameters}
    lost = tuple(name for name in loaded.missing if name in mine)
    if lost:
        yield Finding(
            "danger", "not-in-checkpoint", lost, f"{len(lost)} norm parameters are not in the checkpoint",
            "they keep the values that they were initialised with", "convert the checkpoint again, or check the names",
        )  # fmt: skip
    spare = tuple(name for name in loaded.unexpected if "norm" in name.lower() or ".ln" in name.lower())
    if spare:
        yield Finding(
            "danger", "not-in-model", spare,
            f"the checkpoint holds {len(spare)} norm parameters that the model has no place for",
            "norms that the model was trained with do not run", "use the class or the config that it was trained with",
        )  # fmt: skip
