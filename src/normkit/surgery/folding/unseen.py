"""Linear layers that this forward did not call and another may: an expert that no token went to, an optional head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from normkit.surgery.folding.linears import Linear


def idle_beside(names: Iterable[str], linears: Mapping[str, Linear], called: set[str], *, inputs: bool) -> str | None:
    """Return a layer that was not called and stands beside one of ``names``, with as many inputs (or outputs).

    Two layers stand beside each other when the same module's forward chose to call one and not the other: both are
    its own children, or both lie in one container of it, such as a list of experts.
    """
    seen = [(name, linears[name]) for name in names if name in linears]
    for idle, layer in linears.items():
        if idle in called:
            continue
        place = _place(idle, called)
        for name, other in seen:
            width = (layer.inputs, other.inputs) if inputs else (layer.outputs, other.outputs)
            if width[0] == width[1] and _inside(name, place):
                return idle
    return None


def _place(idle: str, called: set[str]) -> str:
    """Return the container in which the innermost module that ran left this layer out."""
    parts = idle.split(".")
    depth = next(d for d in range(len(parts) - 1, -1, -1) if ".".join(parts[:d]) in called)
    return ".".join(parts[: min(depth + 1, len(parts) - 1)])


def _inside(name: str, place: str) -> bool:
    return not place or name.startswith(f"{place}.")
