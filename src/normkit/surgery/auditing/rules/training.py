"""What an optimizer would do to the norms."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection

# The rule by which training loops most often choose what weight decay skips: this class, or these parts of a name.
_EXEMPT = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed_by_name(seen: Inspection) -> Iterator[Finding]:
    """Norm weights that the usual choice by class and name would let weight decay shrink."""
    exposed: list[str] = []
    for norm in seen.norms:
        module = seen.modules.get(norm.name)
        if isinstance(module, nn.LayerNorm):
            continue
        exposed += [p for p in norm.parameters if p in seen.parameters and not _EXEMPT.search(p.lower())]
    if exposed:
        yield Finding(
            "warning", "weight-decay", tuple(dict.fromkeys(exposed)),
            "neither class nor name tells the usual weight-decay filters that these are norm weights",
            "decay pulls the gain towards 0 (towards 1 where the norm scales by 1 + w), layer by layer",
            "put normkit.no_decay(model) in a group with weight_decay=0",
        )  # fmt: skip


def decayed(seen: Inspection, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Norm parameters that this optimizer decays."""
    names = {id(tensor): name for name, tensor in seen.parameters.items()}
    mine = {p for norm in seen.norms for p in norm.parameters}
    groups = [group for group in optimizer.param_groups if group.get("weight_decay")]
    exposed = [names[id(p)] for group in groups for p in group["params"] if names.get(id(p)) in mine]
    if exposed:
        amounts = sorted({float(group["weight_decay"]) for group in groups})
        yield Finding(
            "warning", "weight-decay", tuple(exposed),
            f"this optimizer decays {len(exposed)} norm parameters by {', '.join(f'{a:g}' for a in amounts)}",
            "decay pulls the gain towards 0 (towards 1 where the norm scales by 1 + w), layer by layer",
            "put normkit.no_decay(model) in a group with weight_decay=0",
        )  # fmt: skip
