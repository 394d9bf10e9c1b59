"""What the weights say about themselves: 1 + w doubled or missing, off by one, not finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection, Norm

_OFFSET = ("one_plus", "one_plus_rounded")


@dataclass(frozen=True)
class _Weight:
    norm: Norm
    mean: float
    spread: float
    least: float


def _weights(seen: Inspection) -> list[_Weight]:
    found: list[_Weight] = []
    for norm in seen.norms:
        if norm.spec is None or norm.spec.weight == "none":
            continue
        value = seen.value(_gain(norm))
        if value is not None and bool(torch.isfinite(value).all()):
            found.append(_Weight(norm, float(value.mean()), float(value.std(unbiased=False)), float(value.min())))
    return found


def _gain(norm: Norm) -> str:
    """Return the parameter that scales: the one that does not call itself a bias."""
    return next((p for p in norm.parameters if not p.endswith(("bias", "beta"))), "")


def one_plus_doubled(seen: Inspection) -> Iterator[Finding]:
    """Norms that add 1 to weights that are stored around 1 already."""
    offset = [w for w in _weights(seen) if w.norm.spec is not None and w.norm.spec.weight in _OFFSET]
    # A weight stored around 0 grows in training, but seldom to 1 everywhere at once, with nothing below 0.
    around_one = [w for w in offset if abs(w.mean - 1) < 0.3 and w.spread < 0.4 and w.least > 0]
    if around_one and 2 * len(around_one) > len(offset):
        mean = sum(w.mean for w in around_one) / len(around_one)
        # Exactly 1 is what an initialiser wrote that took the norm for a plain one; training or loading moves it.
        untrained = all(w.mean == 1 and w.spread == 0 for w in around_one)
        yield Finding(
            "warning" if untrained else "danger", "one-plus-doubled", tuple(w.norm.name for w in around_one),
            f"the forward scales by 1 + w, and {len(around_one)} of {len(offset)} such weights are stored around 1 "
            f"(mean {mean:.3g}): the gain is {1 + mean:.3g}",
            "exactly 1: never trained, and initialised to twice the scale that was meant" if untrained
            else "every normalised value is about twice too large; text turns to garbage",
            "subtract 1 from these weights, or load them into a norm that scales by w",
        )  # fmt: skip


def one_plus_missing(seen: Inspection) -> Iterator[Finding]:
    """Norms that scale by weights that are stored around 0."""
    plain = [w for w in _weights(seen) if w.norm.spec is not None and w.norm.spec.weight == "plain"]
    # Trained plain weights may be small but keep one sign; stored around 0 they have both, or are all 0.
    around_zero = [w for w in plain if abs(w.mean) <= w.spread / 2 or w.mean == 0]
    if around_zero:
        all_of_them = 2 * len(around_zero) > len(plain)
        mean = sum(w.mean for w in around_zero) / len(around_zero)
        yield Finding(
            "danger" if all_of_them else "info", "one-plus-missing", tuple(w.norm.name for w in around_zero),
            f"the forward scales by w, and {len(around_zero)} of {len(plain)} such weights are stored around 0 "
            f"(mean {mean:.3g})",
            "the norm passes on next to nothing, with random signs"
            if all_of_them
            else "the branch behind it is nearly switched off: on purpose (zero initialisation), or 1 is missing",
            "add 1 to these weights, or load them into a norm that scales by 1 + w",
        )  # fmt: skip


def off_by_one(seen: Inspection) -> Iterator[Finding]:
    """A weight that is its neighbours' plus or minus one."""
    roles: dict[str, list[_Weight]] = defaultdict(list)
    for weight in _weights(seen):
        roles[weight.norm.role].append(weight)
    for weights in (w for w in roles.values() if len(w) > 2):
        for at, weight in enumerate(weights):
            edge = at in (0, len(weights) - 1)
            nearest = sorted((i for i in range(len(weights)) if i != at), key=lambda i, at=at: abs(i - at))[:2]
            beside = [weights[i].mean for i in nearest]
            around = sum(beside) / len(beside)
            if max(beside) - min(beside) > 0.1 or abs(abs(weight.mean - around) - 1) > 0.1:
                continue
            added = weight.mean > around
            # Trained first and last layers differ from the rest by themselves; a layer in the middle does not.
            yield Finding(
                "warning" if edge else "danger", "off-by-one", (weight.norm.name,),
                f"its weights average {weight.mean:.3g}; those of the same norm in the next layers {around:.3g}",
                f"1 was {'added' if added else 'subtracted'} once too often: this layer's gain is off by one",
                f"{'subtract 1 from' if added else 'add 1 to'} these weights",
            )  # fmt: skip


def not_finite(seen: Inspection) -> Iterator[Finding]:
    """NaN or infinity in a norm's parameters."""
    for norm in seen.norms:
        for parameter in norm.parameters:
            value = seen.value(parameter)
            if value is not None and not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                yield Finding(
                    "danger", "weights-not-finite", (norm.name,),
                    f"{bad} of {value.numel()} values of {parameter.rpartition('.')[2]} are NaN or infinite",
                    "everything downstream is NaN",
                    "load the checkpoint again; memory that was allocated and never filled looks like this too",
                )  # fmt: skip
