"""How near a swapped model stays to a float64 run of itself, against how near the unswapped one does.

Three runs start at the same weights (values of bfloat16, so that no dtype has to round them) and read the same inputs:
the model in float64 from end to end, the model as it is, the model swapped. Their distances from float64 are compared
in pairs: for every row of logits, for every parameter's gradient, and for the losses of all tokens after each of
twenty steps of SGD. Of the paired ratios the geometric mean is taken, so that each row and each parameter counts in
its own units, also those whose gradient is zero but for rounding.

Which of two equally good roundings ends up nearer is chance, and training may amplify it without end. So inputs are
drawn anew until two standard errors of the mean over the draws lie between the ratio and what is allowed, or draws run
out; a model is further away only where they say so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.auditing.example import examples
from normkit.surgery.folding.flow import tensors_in
from normkit.surgery.folding.wide import Float64Throughout

SEQUENCES, STEPS, RATE = 16, 20, 0.01
ALLOWED = 1.1
DRAWS = (4, 8, 16)  # of inputs, until it is decided
WHAT = ("logits", "gradients", "losses")


@dataclass
class Nearness:
    """One model in one dtype: log ratios of distances from float64, a list of draws for each of `WHAT`."""

    accepted: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)
    logs: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in WHAT})
    undone: bool = True

    def ratio(self, what: str) -> tuple[float, float]:
        """Return the ratio and its standard error."""
        logs = torch.tensor(self.logs[what], dtype=torch.float64)
        mean = float(logs.mean().exp())
        return mean, mean * float(logs.std()) / math.sqrt(len(logs))

    def decided(self, what: str) -> bool:
        """Say whether two standard errors part the ratio from what is allowed."""
        mean, error = self.ratio(what)
        return abs(mean - ALLOWED) > 2 * error

    def beyond(self) -> list[str]:
        """Return in what the swapped model is further away than allowed, by more than chance."""
        return [what for what in WHAT if self.ratio(what)[0] > ALLOWED and self.decided(what)]

    def __str__(self) -> str:
        parts = [f"{len(self.logs['logits']):3} draws, {self.accepted:2} norms"]
        for what in WHAT:
            mean, error = self.ratio(what)
            parts.append(f"{what} {mean:.2f} ± {error:.2f}{' ' if self.decided(what) else '?'}")
        return "  ".join(parts)


def measured(
    make: Callable[[], nn.Module], dtype: torch.dtype, draws: tuple[int, ...] = DRAWS, steps: int = STEPS
) -> Nearness:
    """Compare ``make()`` in ``dtype`` with its swapped self, with as many draws of inputs as it takes."""
    found = Nearness()
    start = _trained(make())
    if hasattr(start, "set_experts_implementation"):
        start.set_experts_implementation("eager")  # PyTorch's grouped products have no backward in float64
    exact, own, swapped = (copy.deepcopy(start).to(kind) for kind in (torch.float64, dtype, dtype))
    report = nk.swap_(swapped)
    found.accepted = len(report.accepted)
    found.rejected = [  # a first layer may hold nn.Identity under the name of the other layers' norm
        (entry.name, entry.reason)
        for entry in report.rejected
        if not isinstance(swapped.get_submodule(entry.name), nn.Identity)
    ]
    done = 0
    for until in draws:
        for seed in range(done, until):
            _one_draw(found, (exact, own, swapped), seed, steps)
        done = until
        if all(found.decided(what) for what in WHAT):
            break
    given = _inputs(own, 0)
    expected = _output(own, given)
    report.undo()
    found.undone = torch.equal(_output(swapped, given), expected) and not any(
        "forward" in vars(module) for module in swapped.modules()
    )
    return found


def _trained(model: nn.Module) -> nn.Module:
    """Move the norms' parameters off their first values, and round all of them to values of bfloat16."""
    generator = torch.Generator().manual_seed(1)
    names = {name for name, *_ in nk.swap_(model, dry_run=True).accepted}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.rpartition(".")[0] in names:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            p.copy_(p.bfloat16())
    return model.float().eval()


def _inputs(model: nn.Module, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    given = next(examples(model))
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    text = not any(t.is_floating_point() for t in tensors)

    def drawn(t: Tensor) -> Tensor:
        shape = (SEQUENCES if text else t.shape[0], *t.shape[1:])
        if t.is_floating_point():
            return torch.randn(shape, generator=generator).to(t.dtype)
        return torch.randint(3, 60, shape, generator=generator)

    return {name: drawn(value) if isinstance(value, Tensor) else value for name, value in given.items()}


def _output(model: nn.Module, given: dict[str, Any]) -> Tensor:
    return next(t for t in tensors_in(model(**given)) if t.is_floating_point())


def _losses(out: Tensor, seed: int) -> Tensor:
    """Return every token's cross entropy with a label drawn for it, in float32 as training does."""
    rows = out.flatten(0, -2).float()
    labels = torch.randint(0, rows.shape[-1], rows.shape[:1], generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(rows, labels, reduction="none")


def _run(model: nn.Module, seed: int, steps: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return logits, gradients, and the tokens' losses after each step of training; leave the weights as they were."""
    given = _inputs(model, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    firsts: list[tuple[Tensor, list[Tensor]]] = []
    losses: list[Tensor] = []
    for step in range(steps + 1):
        out = _output(model, given)
        rows = _losses(out, seed)
        losses.append(rows.detach().double())
        if step == steps:
            break
        gradients = torch.autograd.grad(rows.mean(), parameters, allow_unused=True)
        if step == 0:
            firsts.append((out.detach().double(), [g.double() for g in gradients if g is not None]))
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                if g is not None:
                    p.sub_(RATE * g)
    with torch.no_grad():
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
    return *firsts[0], torch.stack(losses[1:])


def _one_draw(found: Nearness, models: tuple[nn.Module, nn.Module, nn.Module], seed: int, steps: int) -> None:
    exact, own, swapped = models
    with Float64Throughout():
        base = _run(exact, seed, steps)
    results = [_run(model, seed, steps) for model in (own, swapped)]
    logits = [(out - base[0]).flatten(0, -2).norm(dim=-1) for out, _, _ in results]
    gradients = [torch.stack([(g - b).norm() for g, b in zip(gs, base[1], strict=True)]) for _, gs, _ in results]
    losses = [(loss - base[2]).norm(dim=-1) for *_, loss in results]
    for what, (theirs, ours) in zip(WHAT, (logits, gradients, losses), strict=True):
        found.logs[what].append(_log_ratio(theirs, ours))


def _log_ratio(own: Tensor, swapped: Tensor) -> float:
    """Return the mean logarithm of swapped / own; pairs that are exact on both sides say nothing."""
    kept = (own > 0) | (swapped > 0)
    if not bool(kept.any()):
        return 0.0
    own, swapped = own[kept], swapped[kept]
    both = torch.cat([own, swapped])
    assert bool(both.isfinite().all())
    least = both[both > 0].min()
    return float((swapped.clamp_min(least) / own.clamp_min(least)).log().mean())
