"""What can be wrong with a model's norms. A rule reads an `Inspection` and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from normkit.surgery.auditing.finding import SEVERITIES, Finding
from normkit.surgery.auditing.norm import Inspection
from normkit.surgery.auditing.rules import calls, numbers, overflow, rotation, structure, training, weights

Rule = Callable[[Inspection], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    calls.never_called,
    calls.called_more_than_once,
    calls.shared,
    numbers.eps_among_layers,
    numbers.eps_against_config,
    numbers.promoted,
    numbers.mixed_dtypes,
    weights.one_plus_doubled,
    weights.one_plus_missing,
    weights.off_by_one,
    weights.not_finite,
    structure.wrong_axis,
    structure.two_in_a_row,
    structure.query_key,
    rotation.norm_after_rotation,
    structure.odd_one_out,
    structure.no_final_norm,
    overflow.first_not_finite,
    training.decayed_by_name,
)


def findings(seen: Inspection) -> list[Finding]:
    """Return everything that the rules find, the gravest first."""
    found = [finding for rule in RULES for finding in rule(seen)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
