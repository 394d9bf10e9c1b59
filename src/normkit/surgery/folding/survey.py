"""What a model is made of, as one forward shows it: its norms, its linear layers, and what only looks like a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normkit.surgery.folding.flow import tensors_in
from normkit.surgery.folding.linears import Linear, linear_layer
from normkit.surgery.folding.norms import Norm, recognise
from normkit.surgery.folding.report import Refused


@dataclass
class Survey:
    """Norms and linear layers by path, and the modules with a norm's name that are none known here."""

    norms: dict[str, Norm] = field(default_factory=dict[str, Norm])
    linears: dict[str, Linear] = field(default_factory=dict[str, Linear])
    refused: list[Refused] = field(default_factory=list[Refused])


def survey(model: nn.Module, run: Callable[[], object]) -> tuple[Survey, object]:
    """Run the model once and look at every module without children; also return the run's result."""
    found = Survey()
    leaves: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        linear = linear_layer(module)
        if linear is not None:
            found.linears[name] = linear
        elif all(child == "parametrizations" for child, _ in module.named_children()):
            leaves[name] = module
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            x = next(tensors_in([args, kwargs]), None)
            if x is not None and x.is_floating_point() and isinstance(out, Tensor) and out.shape == x.shape:
                calls.setdefault(name, (args, kwargs))

        return hook

    handles = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in leaves.items()]
    try:
        out = run()
    finally:
        for handle in handles:
            handle.remove()
    for name, module in leaves.items():
        if name in calls:
            norm = recognise(module, calls[name])
            if isinstance(norm, Norm):
                found.norms[name] = norm
            elif _called_norm(name, module):
                found.refused.append(Refused(name, "norm", norm))
        elif _called_norm(name, module):
            found.refused.append(Refused(name, "norm", "it was not called on this example, or not as a norm"))
    return found, out


def _called_norm(name: str, module: nn.Module) -> bool:
    """Whether a reader would expect to hear of this module: by its name alone, which decides nothing else."""
    return "norm" in f"{name} {type(module).__name__}".lower()
