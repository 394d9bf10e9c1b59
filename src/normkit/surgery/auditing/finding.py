"""What an audit says about one thing it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["danger", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("danger", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Args:
        severity: ``"danger"``: the model computes something it should not; ``"warning"``: it may, or will once it is
            trained or moved; ``"info"``: worth knowing.
        code: a stable name of the kind of finding.
        where: names of the modules concerned, in order.
        what: what was found, with its numbers.
        consequence: what follows if nothing is done.
        remedy: what to do.
    """

    severity: Severity
    code: str
    where: tuple[str, ...]
    what: str
    consequence: str
    remedy: str
