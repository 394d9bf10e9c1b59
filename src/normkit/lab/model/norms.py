"""Norms by name, as the lab's networks take them: a name gives a function from a width to a module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from normkit.modules import BatchNorm, Derf, DyT, GroupNorm, InstanceNorm, LayerNorm, RMSNorm

GROUPS = 4  # of GroupNorm; every width used here divides by it

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "batch": BatchNorm,
    "instance": InstanceNorm,
    "group": lambda width: GroupNorm(GROUPS, width),
    "dyt": DyT,
    "derf": Derf,
    "none": lambda width: nn.Identity(),
}


def norm_factory(name: str) -> Callable[[int], nn.Module]:
    """Return the function that makes a norm of a given width.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; one of {', '.join(NORMS)}")
    return NORMS[name]
