r"""Whether the fused operator may stand in a module's place: shown on random rows, dtype by dtype.

For a pair of dtypes (of x and of the parameters) the fused result must, at the scales 1e-3, 1 and 30,

* come in the same dtype;
* in half types lie at most one ULP from the module's own result, two where the convention rounds twice, with at least
  99.5 % of the elements identical: both round the same float32 value, known to a few of float32's own roundings, so
  they part only where a rounding boundary of the half type falls into that gap;
* in float32 lie in the interval that the formula's roundings allow (`normkit.testing.truth`): two results in it differ
  by at most its width, a relative k·u for sums of depth k, u = 2^-24 and k ≤ 128, a few u in practice;
* have a mean error against float64 no larger than the module's own. Both means are over R rows whose errors share the
  row's statistic; with R independent rows the relative standard deviation of a mean error is below 1/√(3R), so that
  of their difference is below √(2/3R), and four of them are allowed.

ULP are measured as in `normkit.testing.ulp`: at the size of what an element is made of, not at what cancels to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normkit.checks import eps_value
from normkit.kernels import registry
from normkit.kernels.contract import Request
from normkit.kernels.reference import activate
from normkit.spec import NormSpec
from normkit.surgery.accuracy import as_rows, right
from normkit.surgery.candidates import Coverage, Given, aligned
from normkit.surgery.findings import DtypePair, Identified, short
from normkit.surgery.fused import Plan, normalized
from normkit.surgery.probes import normal, uniform
from normkit.surgery.stand_in import NotRunError, StandIn
from normkit.testing import truth
from normkit.testing.ulp import Error, ulp

SCALES = (1e-3, 1.0, 30.0)
ROWS = 1024
ELEMENTS = 1 << 19
IDENTICAL = 0.995


def executables(spec: NormSpec, pair: DtypePair) -> Iterator[NormSpec]:
    """Yield specs that may compute ``spec`` for a pair of dtypes: itself, then those that only sum or divide otherwise.

    In float32 throughout there are no roundings to a half type, so neither the dtype of the statistic, nor the order
    of cast and weight, nor a rounded root makes a difference.
    """
    yield spec
    root = replace(spec, root="reciprocal") if spec.root != "reciprocal" else spec
    if root != spec:
        yield root
    if pair[0] == torch.float32 and pair[1] in (None, torch.float32):
        weight = "one_plus" if spec.weight == "one_plus_rounded" else spec.weight
        flat = replace(
            root, statistic_dtype="float32", root_rounding="none", weight=weight, cast="last", output="input"
        )
        if flat not in (spec, root):
            yield flat


def kernel_for(given: Given, spec: NormSpec) -> tuple[str, str]:
    """Return the name of the kernel that would compute a call without gradients, and why no other."""
    dim, split = given.x.dim(), given.coverage.split
    x = split(given.x, dim)
    assert x is not None
    w, b, gate = (split(t, dim) for t in (given.weight, given.bias, given.gate))
    request = Request(spec, x, given.coverage.split_axes(dim), w, b, None, gate)  # type: ignore[arg-type]
    decision = registry.choose(request)
    return decision.kernel.name, "; ".join(why for _, why in decision.rejected) or decision.reason


@dataclass(frozen=True)
class Trial:
    """One module's double against one way to compute it."""

    stand_in: StandIn
    found: Identified
    plan: Plan
    device: torch.device
    gated: bool

    @property
    def coverage(self) -> Coverage:
        """The axes and groups."""
        return self.plan.coverage

    def given(self, pair: DtypePair, scale: float, seed: int = 0) -> tuple[Given, dict[str, Tensor]]:
        """Draw random inputs; return them laid out, and the parameters by name."""
        shape = _many(self.found.evidence.shape, self.coverage)
        x = (normal(shape, 900 + seed) * scale).to(device=self.device, dtype=pair[0])
        values = {
            name: uniform(t.shape, 910 + i, 0.25, 1.75).to(device=self.device, dtype=pair[1] or pair[0])
            for i, (name, t) in enumerate(self.stand_in.tensors.items())
        }
        if self.plan.bias is not None:
            values[self.plan.bias] -= 1.0
        w, b = (None if n is None else aligned(values[n], x, self.coverage) for n in (self.plan.weight, self.plan.bias))
        gate = normal(shape, 920).to(device=self.device, dtype=pair[0]) if self.gated else None
        return Given(x, w, b, gate, self.coverage, eps_value(self.plan.eps, pair[0])), values

    def own(self, given: Given, values: dict[str, Tensor]) -> Tensor:
        """Run the module's own forward."""
        inputs = (given.x,) if given.gate is None else (given.x, given.gate)
        return self.stand_in(*inputs, values=values)

    def fused(self, given: Given, values: dict[str, Tensor], spec: NormSpec) -> Tensor:
        """Run what would take its place."""
        w, b = (None if n is None else values[n] for n in (self.plan.weight, self.plan.bias))
        return normalized(given.x, spec, w, b, given.gate, self.plan)

    def objection(self, pair: DtypePair, spec: NormSpec) -> str | None:
        """Return why ``spec`` may not stand in for the module in these dtypes, or None."""
        rule = self.found.spec
        declared = replace(rule, gate="none", activation="none") if not self.gated and rule.gate != "none" else rule
        for scale in SCALES:
            given, values = self.given(pair, scale)
            own, fused = self.own(given, values), self.fused(given, values, spec)
            if fused.dtype != own.dtype:
                return f"it returns {short(own.dtype)}, the fused operator {short(fused.dtype)}"
            why = compared(given, declared, own, fused)
            if why is not None:
                return f"{why} (in {short(pair[0])}, scale {scale:g})"
        return None


def compared(given: Given, spec: NormSpec, own: Tensor, fused: Tensor) -> str | None:
    """Return why ``fused`` may not take the place of ``own``, or None; see the head of this file."""
    mine, theirs = as_rows(fused, given), as_rows(own, given)
    exact, size = exactly(given, spec)
    if own.dtype == torch.float32:
        if spec.statistic_dtype == "float32" and given.x.dtype == torch.float32:
            interval = right(given, spec)
            if bool(interval.wrong(mine).any()):
                return "the fused result leaves the interval that the formula's roundings allow"
    else:
        steps = (mine.double() - theirs.double()).abs() / ulp(torch.maximum(exact.abs(), size), own.dtype)
        allowed = 1 if spec.cast == "last" and spec.root_rounding == "none" and spec.gate != "after" else 2
        if float(steps.max()) > allowed:
            return f"the fused result is {float(steps.max()):.1f} ULP away, {allowed} allowed"
        same = float((mine == theirs).double().mean())
        if same < IDENTICAL:
            return f"only {same:.2%} of the elements are identical, {IDENTICAL:.1%} needed"
    ours, own_error = Error.of(mine, exact, size), Error.of(theirs, exact, size)
    rows = exact.shape[0]
    if ours.mean > own_error.mean * (1 + 4 * math.sqrt(2 / (3 * rows))):
        return f"the fused result is less accurate: {ours.mean:.4f} ULP on average against {own_error.mean:.4f}"
    return None


def exactly(given: Given, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """Return the float64 value and the size at which ULP are measured, as rows."""
    x = as_rows(given.x, given)
    weight, bias = (None if p is None else as_rows(p.expand_as(given.x), given) for p in (given.weight, given.bias))
    bare = replace(spec, gate="none", activation="none")
    factor: Tensor | float = 1.0
    if given.gate is not None and spec.gate != "none":
        factor = activate(as_rows(given.gate, given).double(), spec.activation)
        if spec.gate == "before":
            x, factor = x.double() * factor, 1.0
    exact = truth.plain(x, bare, weight, bias, given.eps) * factor
    gain = truth.gain_of(weight, bare, given.x.dtype)
    size = torch.zeros_like(exact) if bias is None else bias.double().abs().expand_as(exact)
    if spec.centered:
        size = size + (torch.ones_like(exact) if gain is None else gain.abs())
    return exact, size


def indifferent_to_autocast(trial: Trial, pairs: tuple[DtypePair, ...]) -> bool:
    """Say whether the module's own forward has the same bits and dtype under autocast."""
    for pair in pairs:
        given, values = trial.given(pair, 1.0)
        try:
            plain = trial.own(given, values)
            with torch.autocast(trial.device.type, dtype=torch.bfloat16):
                cast = trial.own(given, values)
        except NotRunError:
            return False
        if plain.dtype != cast.dtype or not torch.equal(plain, cast):
            return False
    return True


def any_width(trial: Trial, pair: DtypePair) -> bool:
    """Say whether the module takes other widths than its own: no parameter and no check ties it to one."""
    given, values = trial.given(pair, 1.0)
    x = given.x[..., : given.x.shape[-1] // 2]
    try:
        trial.stand_in(*((x,) if given.gate is None else (x, given.gate[..., : x.shape[-1]])), values=values)
    except NotRunError:
        return False
    return True


def any_rank(trial: Trial, pair: DtypePair) -> bool:
    """Say whether rows come out the same however many axes stand before them."""
    given, values = trial.given(pair, 1.0)
    weight = given.weight if given.weight is not None else given.bias
    if trial.coverage.axes != (-1,) or (weight is not None and sum(n > 1 for n in weight.shape) > 1):
        return False
    expected = trial.own(given, values)
    for shape in ((-1, given.x.shape[-1]), (2, 2, -1, given.x.shape[-1])):
        inputs = [t.reshape(shape) for t in (given.x, given.gate) if t is not None]
        try:
            y = trial.stand_in(*inputs, values=values)
        except NotRunError:
            return False
        if not torch.equal(y.reshape(expected.shape), expected):
            return False
    return True


def same_in_training(module: nn.Module, trial: Trial, pair: DtypePair) -> bool:
    """Say whether ``train()`` and ``eval()`` leave the module's result alone."""
    given, values = trial.given(pair, 1.0)
    return all(
        torch.equal(trial.own(given, values), trial.stand_in.in_mode(mode, (given.x, given.gate), values))
        for mode in (True, False)
    )


def _many(shape: tuple[int, ...], coverage: Coverage) -> tuple[int, ...]:
    """Lengthen the first axis until there are about `ROWS` rows, or `ELEMENTS` elements."""
    width = math.prod(shape[a] for a in coverage.axes) // coverage.groups
    per = max(math.prod(shape[1:]), 1)
    rows = max(per // width, 1)
    return (max(4, min(-(-ROWS // rows), ELEMENTS // per)) // 4 * 4, *shape[1:])
