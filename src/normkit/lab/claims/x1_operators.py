"""X1: how many operators a call of nn.RMSNorm really starts.

A fused kernel is one operator that reads the activations and writes the result. What PyTorch's dispatcher is asked to
run can be watched; every operator whose result has as many elements as the input reads or writes the activations once
more than a fused kernel would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

SHAPE = (4, 16, 768)
ARMS: dict[str, Callable[[int], nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
_NAMES = {"rms": "nn.RMSNorm", "layer": "nn.LayerNorm"}


class Watch(TorchDispatchMode):
    """Write down every operator, and whether its result is as large as the activations."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        full = isinstance(first, Tensor) and first.numel() == self.elements
        if not func.is_view:  # a view starts no kernel
            self.seen.append((func.overloadpacket.__name__, full))
        return result


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in ARMS]


def operators(call: Callable[[], Tensor], elements: int) -> list[tuple[str, bool]]:
    """Return the operators of one call in order, each with whether its result has ``elements`` elements."""
    with torch.no_grad(), Watch(elements) as watch:
        call()
    return watch.seen


def _measure(params: Params, bench: Bench) -> Values:
    x = bench.draws.randn(*SHAPE).to(bench.settings.device)
    norm = ARMS[params["norm"]](SHAPE[-1]).to(bench.settings.device)
    seen = operators(lambda: norm(x), x.numel())
    return {
        "operators": len(seen),
        "full size": sum(full for _, full in seen),
        "names": ", ".join(name for name, _ in seen),
    }


STUDY = Study(id="operators", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=1)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="operators of one call, float32, no gradient",
            values=e.numbers("norm", "operators"),
            kind="near",
            target=1.0,
            tolerance=0.0,
            reason="exact: “one kernel” is one",
            every=True,
        )
    ]


def _summary(e: Evidence) -> str:
    return (
        f"on {e.settings.device}, eager, one call starts {e.first('norm', 'operators')} operators "
        f"({e.first('norm', 'names')}), {e.first('norm', 'full size')} of them write all activations"
    )


def _figures(e: Evidence) -> list[Chart]:
    roles = ("norm", "one")
    positions = list(range(len(roles)))
    names = [_NAMES[e.arm(role)] for role in roles]
    count = [float(e.first(role, "operators")) for role in roles]
    full = [float(e.first(role, "full size")) for role in roles]
    return [
        Chart(
            caption="Operators that one call starts (float32, eager, no gradient).",
            alt="; ".join(
                f"{name}: {c:.0f} operators, {f:.0f} of full size"
                for name, c, f in zip(names, count, full, strict=True)
            ),
            panels=[
                Panel(
                    "what the dispatcher runs",
                    "module",
                    "operators",
                    [
                        Series("all", positions, count, kind="bars"),
                        Series("writing all activations", positions, full, kind="bars"),
                    ],
                    x_names=names,
                )
            ],
        )
    ]


_FUSED = Control(
    text="nn.LayerNorm in its place: fused on every device, it must count as one.",
    plays={"norm": "layer", "one": "rms"},
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="X1",
        title="nn.RMSNorm is one fused kernel",
        sentence="PyTorch's nn.RMSNorm merges statistics, scaling and the multiplication by the weight into one "
        "kernel, which saves memory traffic.",
        sentences=(32,),
        source="Article, RMSNorm, “Engineering details”, third point.",
        measured=f"The operators that PyTorch's dispatcher runs in one call of nn.RMSNorm on {SHAPE} float32 numbers, "
        "eager, without gradients; nn.LayerNorm's beside them. Compiled code is another matter.",
        study=STUDY,
        plays={"norm": "rms", "one": "layer"},
        literal=Rule(
            text="One call starts exactly one operator.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=_FUSED,
        planted=_FUSED,
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="On a device without a fused RMSNorm kernel PyTorch runs the formula operator by operator: square, "
            "mean, add ε, inverse root, and two multiplications, three of which write every activation again.",
            status="tested",
        ),
    ),
)
