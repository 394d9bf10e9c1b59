r"""Whether the fused operator may stand in a module's place: shown on random rows, dtype by dtype.

For a pair of dtypes (of x and of the parameters) the fused result must, at the scales 1e-3, 1 and 30,

* come in the same dtype;
* in half types lie at most one ULP from the module's own result, two where the convention rounds twice, with at least
  99.5 % of the elements identical: both round the same float32 value, known to a few of float32's own roundings, so
  they part only where a rounding boundary of the half type falls into that gap;
* in float32 lie in the interval that the formula's roundings allow (`normkit.testing.truth`): two results in it differ
  by at most its width, a relative k·u for sums of depth k, u = 2^-24 and k ≤ 128, a few u in practice;
* have a mean error against float64 no larger than the module's own: over the rows of all three scales, the paired
  difference of the rows' mean errors may not exceed four of its standard errors, or one per cent if that is more.

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
from normkit.kernels.rounding import HALVES
from normkit.ops import positions
from normkit.spec import NormSpec
from normkit.surgery.accuracy import as_rows, right
from normkit.surgery.candidates import Coverage, Given, aligned
from normkit.surgery.findings import DtypePair, Identified, short
from normkit.surgery.fused import Plan, normalized, over_positions
from normkit.surgery.probes import normal, uniform
from normkit.surgery.stand_in import NotRunError, StandIn
from normkit.testing import truth
from normkit.testing.ulp import ulp

SCALES = (1e-3, 1.0, 30.0)
ROWS = 1024
ELEMENTS = 1 << 17
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
    request = Request(spec, x, given.coverage.split_axes(dim), w, b, gate=gate)
    statistic = over_positions(given.x, spec, given.coverage, given.eps) if gate is None else None
    if statistic is not None:
        request = positions.request_of(given.x, given.weight, given.bias, statistic)
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
        errors: list[tuple[Tensor, Tensor]] = []
        for seed, scale in enumerate(SCALES):
            given, values = self.given(pair, scale, seed)
            try:
                own = self.own(given, values)
            except NotRunError as why:  # a gate that the signature calls optional, for example
                return f"its own forward fails: {why}"
            fused = self.fused(given, values, spec)
            if fused.dtype != own.dtype:
                return f"it returns {short(own.dtype)}, the fused operator {short(fused.dtype)}"
            mine, theirs = as_rows(fused, given), as_rows(own, given)
            exact, unit = exactly(given, declared, own.dtype)
            why = _apart(given, declared, mine, theirs)
            if why is not None:
                return f"{why} (in {short(pair[0])}, scale {scale:g})"
            errors.append((((mine - exact).abs() / unit).mean(-1), ((theirs - exact).abs() / unit).mean(-1)))
        ours, own_error = (torch.cat(side) for side in zip(*errors, strict=True))
        excess = ours - own_error
        noise = 4 * float(excess.std()) / math.sqrt(len(excess))
        if float(excess.mean()) > max(noise, 0.01 * float(own_error.mean())):
            figures = f"{float(ours.mean()):.4f} ULP on average against {float(own_error.mean()):.4f}"
            return f"the fused result is less accurate: {figures} (in {short(pair[0])})"
        return None


def _apart(given: Given, spec: NormSpec, mine: Tensor, theirs: Tensor) -> str | None:
    """Return in what respect two results are too far apart, or None."""
    # A float32 result may still be a rounded half times a float32 weight: then that rounding is what may part.
    half = theirs.dtype if theirs.dtype in HALVES else given.x.dtype if spec.cast == "first" else theirs.dtype
    if half not in HALVES:
        if given.gate is None and bool(right(given, spec).wrong(mine).any()):
            return "the fused result leaves the interval that the formula's roundings allow"
        return None
    _, unit = exactly(given, spec, half)
    steps = float(((mine.double() - theirs.double()).abs() / unit).max())
    allowed = 1 if spec.cast == "last" and spec.root_rounding == "none" and spec.gate != "after" else 2
    if steps > allowed:
        return f"the fused result is {steps:.1f} ULP away, {allowed} allowed"
    same = float((mine == theirs).double().mean())
    return None if same >= IDENTICAL else f"only {same:.2%} of the elements are identical, {IDENTICAL:.1%} needed"


def exactly(given: Given, spec: NormSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the float64 value and one ULP of ``dtype`` there, as rows."""
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
    return exact, ulp(torch.maximum(exact.abs(), size), dtype)


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


def ranks(trial: Trial, pair: DtypePair) -> tuple[int, ...] | None:
    """Return for how many axes of x rows come out the same; None where 2, 3 and 4 do, and so any number."""
    given, values = trial.given(pair, 1.0)
    weight = given.weight if given.weight is not None else given.bias
    own = given.x.dim()
    if trial.coverage.axes != (-1,) or (weight is not None and sum(n > 1 for n in weight.shape) > 1):
        return (own,)
    expected = trial.own(given, values)
    found = {own}
    for shape in ((-1, given.x.shape[-1]), (4, -1, given.x.shape[-1]), (2, 2, -1, given.x.shape[-1])):
        inputs = [t.reshape(shape) for t in (given.x, given.gate) if t is not None]
        try:
            y = trial.stand_in(*inputs, values=values)
        except NotRunError:
            continue
        if torch.equal(y.reshape(expected.shape), expected):
            found.add(len(shape))
    return None if found >= {2, 3, 4} else tuple(sorted(found))


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
