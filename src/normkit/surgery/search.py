"""The search behind `identify`: ε first, then what float32 can tell, then what half types can, then random rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import Eps, eps_value
from normkit.surgery import epsilon, screens
from normkit.surgery.accuracy import as_rows, right
from normkit.surgery.candidates import (
    FORMULA,
    FUSED,
    OPERATORS,
    Candidate,
    Coverage,
    Given,
    aligned,
    preference,
    refined,
    shapes_of_formula,
)
from normkit.surgery.findings import DtypePair, Evidence, Identified, short
from normkit.surgery.probes import generator, lay_out, normal, offset_rows, row_count, rows, scaled, uniform
from normkit.surgery.screens import UnknownNormError
from normkit.surgery.stand_in import NotRunError, StandIn

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
# Mixed pairs after the plain ones: a module may refuse them, or follow a rule of its own there.
_PAIRS: tuple[DtypePair, ...] = (
    (_BF16, _BF16),
    (_F16, _F16),
    (_BF16, _F32),
    (_F16, _F32),
    (_F32, _BF16),
    (_F32, _F16),
)


@dataclass
class Probe:
    """Inputs in float64, rounded to whatever dtypes are asked for."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    biased: bool = False


class Search:
    """One identification: the module's double, its shape, and what is known so far."""

    def __init__(
        self, module: nn.Module, stand_in: StandIn, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module, self.stand_in, self.device = module, stand_in, device
        floats = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        self.shape: tuple[int, ...] | None = None
        accepts, insists = screens.takes_gate(module)
        self.gated, self.optional_gate = accepts, not insists
        self.rest, self.kwargs = args[1:], kwargs
        if floats and floats[0] is args[0]:
            self.shape = _small(tuple(floats[0].shape))
            self.gated = len(floats) > 1 and args[1] is floats[1] and floats[1].shape == floats[0].shape
            self.optional_gate = False
            self.rest = args[2:] if self.gated else args[1:]
        self.base = {name: uniform(t.shape, 70 + i) for i, (name, t) in enumerate(stand_in.tensors.items())}
        self.weight: str | None = None
        self.bias: str | None = None
        self.coverage = Coverage((-1,))
        self.notes: list[str] = []

    def answer(self) -> Identified:
        """Narrow down step by step; every step may raise `NoNormError`."""
        if screens.on_meta(self.module):
            self.notes.append("parameters are on meta: stand-ins ran on the CPU, and their values are unknown")
        if self.shape is None:
            self.shape = screens.first_shape(self.module, self.run)
        else:
            self._try(self.shape)
        self.coverage = screens.coverage_of(self.run, self.shape)
        screens.screen_scale(self.run, self.shape)
        self.weight, self.bias = screens.roles(self.run, self.stand_in, self.shape)
        self._check_parameters()
        if self.gated:
            x = normal(self.shape, 6)
            if torch.equal(self.run(x, gate=uniform(self.shape, 7)), self.run(x, gate=uniform(self.shape, 8))):
                raise UnknownNormError("the second input does not act on y")
        eps, source, survivors = self._float32()
        survivors, pairs = self._halves(survivors, eps)
        survivors = self._random(survivors, eps, pairs)
        return self._found(survivors, eps, source, pairs)

    def run(
        self,
        x: Tensor,
        values: dict[str, Tensor] | None = None,
        gate: Tensor | None = None,
        dtype: torch.dtype = _F32,
        parameters: torch.dtype = _F32,
    ) -> Tensor:
        """Run the double on x, on ``values`` or fixed draws for its tensors, in these dtypes."""
        given = {n: v.to(device=self.device, dtype=parameters) for n, v in {**self.base, **(values or {})}.items()}
        inputs = [x.to(device=self.device, dtype=dtype)]
        if self.gated:
            g = torch.full_like(x, 32.0) if gate is None else gate
            inputs.append(g.to(device=self.device, dtype=dtype))
        return self.stand_in(*inputs, *self.rest, values=given, **self.kwargs)

    def _try(self, shape: tuple[int, ...]) -> None:
        try:
            self.run(uniform(shape, 1))
        except NotRunError as why:
            raise UnknownNormError(f"fails on the example: {why}") from why

    def _check_parameters(self) -> None:
        assert self.shape is not None
        for name in (self.weight, self.bias):
            if name is not None and self.base[name].dim() == 1 and self.base[name].shape[0] > 1:
                axis = screens.parameter_axis(self.run, self.shape, name, self.base[name])
                if axis is not None and axis != self.coverage.channel_axis % len(self.shape):
                    self.coverage = replace(self.coverage, channel_axis=axis)
        x = torch.empty(self.shape, device="meta")
        for what, name in (("weight", self.weight), ("bias", self.bias)):
            if name is not None:
                try:
                    aligned(self.stand_in.tensors[name], x, self.coverage)
                except (ValueError, TypeError) as why:
                    raise UnknownNormError(f"{name}, its {what}, belongs to no axis of x: {why}") from why

    def agrees(self, candidate: Candidate, probe: Probe, eps: Eps, pair: DtypePair, y: Tensor) -> bool:
        """Say whether a candidate has the module's bits and dtype."""
        dtype, held = pair
        given = self._given(probe, dtype, held, eps)
        try:
            ours = candidate(given)
        except (RuntimeError, ValueError):
            return False
        if ours.dtype != y.dtype:
            return False
        same = (ours == y) | (ours.isnan() & y.isnan())
        if not bool(same.all()) and candidate.writing == FORMULA and probe.biased:
            try:  # element by element: a kernel may multiply and add at once in its full lanes and not in the tail
                same |= Candidate(candidate.spec, FUSED)(given) == y
            except ValueError:
                return False
        return bool(same.all())

    def _given(self, probe: Probe, dtype: torch.dtype, held: torch.dtype | None, eps: Eps) -> Given:
        x = probe.x.to(device=self.device, dtype=dtype)
        parameters = [
            aligned(None if p is None else p.to(device=self.device, dtype=held or dtype), x, self.coverage)
            for p in (probe.weight, probe.bias)
        ]
        gate = None if probe.gate is None else probe.gate.to(device=self.device, dtype=dtype)
        return Given(x, parameters[0], parameters[1], gate, self.coverage, eps_value(eps, dtype))

    def module_on(self, probe: Probe, pair: DtypePair) -> Tensor:
        """Run the module on a probe."""
        values = {
            name: p
            for name, p in ((self.weight, probe.weight), (self.bias, probe.bias))
            if name is not None and p is not None
        }
        return self.run(probe.x, values, probe.gate, pair[0], pair[1] or pair[0])

    def probe(
        self, powers: list[int], seed: int, *, biased: bool = False, random: float = 0.0, gates: bool = False
    ) -> Probe:
        """Make a probe of exact rows scaled by these powers of two, or of random ones, some around ``random``.

        A gate of 32 or more passes through SiLU as itself and through a sigmoid as 1, so that what it multiplies keeps
        exact sums; random ``gates`` show how it is rounded.
        """
        assert self.shape is not None
        axes = tuple(a % len(self.shape) for a in self.coverage.axes)
        channel = self.coverage.channel_axis % len(self.shape)
        count, width = row_count(self.shape, axes)
        width //= self.coverage.groups
        count *= self.coverage.groups
        if random:
            made = scaled(offset_rows(count, width, seed, random), powers)
        else:
            made = scaled(rows(count, width, seed=seed), powers)
        split = list(self.shape)
        if self.coverage.groups > 1:
            split[channel : channel + 1] = [self.coverage.groups, self.shape[channel] // self.coverage.groups]
        x = lay_out(made, split, self.coverage.split_axes(len(self.shape))).reshape(self.shape)
        tensors = self.stand_in.tensors
        w = None if self.weight is None else uniform(tensors[self.weight].shape, seed + 1, -1.5, 1.5)
        b = None
        if self.bias is not None:
            shape = tensors[self.bias].shape
            b = normal(shape, seed + 2) if biased else torch.zeros(shape, dtype=torch.float64)
        gate = None
        if self.gated:
            choice = torch.tensor([32.0, 64.0, 128.0], dtype=torch.float64)
            gate = choice[torch.randint(0, 3, self.shape, generator=generator(seed + 3))]
            gate = normal(self.shape, seed + 3) if random or gates else gate
        return Probe(x, w, b, gate, biased)

    def _float32(self) -> tuple[Eps, str, list[Candidate]]:
        """Find ε and what can be told in float32."""
        proposals = epsilon.proposals(self.module, self._readings())
        candidates = shapes_of_formula(weighted=self.weight is not None, gated=self.gated)
        pair = (_F32, _F32)
        tried = [0, 5, -4, 9]
        coarse = self.probe(tried, 100)
        y = self.module_on(coarse, pair)
        for eps, source in proposals:
            left = [c for c in candidates if self.agrees(c, coarse, eps, pair, y)]
            if not left:
                continue
            fine = [self.probe(powers, 200 + 20 * i) for i, powers in enumerate(_powers_near(eps_value(eps, _F32)))]
            if self.bias is not None:
                fine.append(self.probe(tried, 260, biased=True))
            results = [(p, self.module_on(p, pair)) for p in fine]
            left = [c for c in left if all(self.agrees(c, p, eps, pair, t) for p, t in results)]
            # An ε that could as well be twice or half of it has not been seen.
            number = eps_value(eps, _F32)
            for other in (2 * number, number / 2) if number else (1e-30,):
                left = [c for c in left if not all(self.agrees(c, p, other, pair, t) for p, t in results)]
            if left:
                return eps, source, left
        if self.weight is not None:
            x, one = normal(self.shape or (), 8) * 256, torch.ones_like(self.base[self.weight])
            y, other = self.run(x, {self.weight: one}), self.run(x, {self.weight: 3 * one})
            if torch.allclose(y, other, rtol=1e-3, atol=1e-5):
                raise UnknownNormError(
                    f"{self.weight} scales x before its statistic is taken, which no convention here does"
                )
        if not proposals and (unseen := epsilon.unseen(self.module)):
            raise UnknownNormError(f"{', '.join(unseen)} leaves no trace in any row, so where ε enters cannot be known")
        read = ", ".join(f"{e}" for e, _ in proposals) or "none could be read"
        raise UnknownNormError(
            f"a statistic over axes {self.coverage.axes} divides x, but no formula known here has its float32 bits "
            f"(ε tried: {read})"
        )

    def _readings(self) -> list[float]:
        """Read ε with γ made 1: a weight of 1, or of 0 where that changes nothing but the scale (1 + w)."""
        assert self.shape is not None
        probe = self.probe([epsilon.SMALL], 300)
        found: list[float] = []
        for gain in (1.0, 0.0) if self.weight is not None else (1.0,):
            w = None if probe.weight is None else torch.full_like(probe.weight, gain)
            gate = None if probe.gate is None else torch.full_like(probe.gate, 32.0)
            x = self.probe([epsilon.SMALL], 300).x
            y = self.module_on(Probe(x, w, probe.bias, gate), (_F32, _F32))
            # The first row has mean 0, so that a centred norm's x − μ is x itself.
            axes = tuple(a % x.dim() for a in self.coverage.axes)
            first = tuple(slice(None) if d in axes else 0 for d in range(x.dim()))
            if self.coverage.groups > 1:
                channel = self.coverage.channel_axis % x.dim()
                size = self.shape[channel] // self.coverage.groups
                first = tuple(slice(0, size) if d == channel else s for d, s in enumerate(first))
            for factor in (1.0, 32.0, 1 / 32.0) if self.gated else (1.0,):
                found += epsilon.readings(x[first] * factor, y[first])
        return found

    def _halves(self, survivors: list[Candidate], eps: Eps) -> tuple[list[Candidate], list[DtypePair]]:
        """Tell cast orders, offsets and output dtypes apart where roundings show."""
        left = [fine for c in survivors for fine in refined(c, parameters=self._has_parameters())]
        passed: list[DtypePair] = [(_F32, _F32 if self._has_parameters() else None)]
        mixed = self._has_parameters()
        for pair in _PAIRS if mixed else ((_BF16, None), (_F16, None)):
            same = pair[1] in (pair[0], None)
            what = short(pair[0]) if same else f"{short(pair[0])} x with {short(pair[1])} parameters"
            probes = self._half_probes(pair[0], eps)
            try:
                results = [self.module_on(p, pair) for p in probes]
            except NotRunError as why:
                self.notes.append(f"does not run on {what} ({why})")
                continue
            keep = [
                c for c in left if all(self.agrees(c, p, eps, pair, y) for p, y in zip(probes, results, strict=True))
            ]
            if keep:
                left = keep
                passed.append(pair)
            elif same:
                raise UnknownNormError(
                    f"its {what} bits are those of no convention known here, though in float32 it is "
                    f"{min((c.spec for c in left), key=preference).code} (ε={eps})"
                )
            else:
                self.notes.append(f"follows a rule of its own on {what}")
        return left, passed

    def _has_parameters(self) -> bool:
        return self.weight is not None or self.bias is not None

    def _half_probes(self, dtype: torch.dtype, eps: Eps) -> list[Probe]:
        low, high = (-20, 6) if dtype == _F16 else (-60, 9)
        probes = [self.probe([0, 3, -5], 400)]
        for i, powers in enumerate(_powers_near(eps_value(eps, dtype))):
            probes.append(self.probe([max(low, min(p, high)) for p in powers], 500 + 20 * i))
        if self.gated:
            probes.append(self.probe([0, 3, -5], 560, gates=True))
        if self.bias is not None:
            probes.append(self.probe([0, 3, -5], 600, biased=True))
        return probes

    def _random(self, survivors: list[Candidate], eps: Eps, pairs: list[DtypePair]) -> list[Candidate]:
        """Run random rows, where orders of summing show.

        A formula is held to its error bound; one of PyTorch's operators must be met bit for bit again, and where it
        leaves the bound itself that is worth a note.
        """
        spec = min((c.spec for c in survivors), key=preference)
        for pair in pairs:
            if (self.gated and pair[0] != _F32) or (pair[0] != _F32 and pair[1] not in (pair[0], None)):
                continue
            # Where squares are formed in float16 itself, small and large rows would leave its range.
            narrow = spec.statistic_dtype == "input" and pair[0] == _F16
            probe = self.probe(
                [-2, 0, 1] if narrow else [-10, 0, 5], 700, biased=True, random=2048.0 if pair[0] == _F32 else 24.0
            )
            given = self._given(probe, pair[0], pair[1], eps)
            y = self.module_on(probe, pair)
            wrong = int(right(given, spec).wrong(as_rows(y, given)).sum())
            if not wrong:
                continue
            where = f"on random {short(pair[0])} rows {wrong} of {y.numel()} elements lie outside the error bound"
            survivors = [c for c in survivors if c.writing in OPERATORS and self.agrees(c, probe, eps, pair, y)]
            if not survivors:
                raise UnknownNormError(f"agrees with {spec.code} (ε={eps}) on rows with exact sums, but {where}")
            self.notes.append(f"{where} of float32 statistics, exactly as {survivors[0].writing} has it")
        return survivors

    def _found(self, survivors: list[Candidate], eps: Eps, source: str, pairs: list[DtypePair]) -> Identified:
        specs = sorted({c.spec for c in survivors}, key=preference)
        best = specs[0]
        writings = [c.writing for c in survivors if c.spec == best]
        note = epsilon.disagreement(self.module, eps)
        notes = (*self.notes, *((note,) if note else ()))
        evidence = Evidence(
            FORMULA if FORMULA in writings else writings[0],
            tuple(pairs),
            tuple(specs[1:]),
            source,
            self.shape or (),
            notes,
        )
        return Identified(
            best,
            eps,
            self.coverage.axes,
            self.weight,
            self.bias,
            evidence,
            self.coverage.groups,
            self.coverage.channel_axis,
        )


def _powers_near(eps: float) -> list[list[int]]:
    """Return powers of two for rows whose mean square (or size, where ε is not under the root) lies around ε."""
    middles = (round(math.log2(eps) / 2), round(math.log2(eps))) if eps > 0 else (-20, -40)
    return [[m, m - 1, m + 1, m - 2, m + 4, m - 5] for m in middles]


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Cut an example's leading axes down: a probe needs a few rows."""
    return (min(shape[0], 4), *shape[1:]) if len(shape) > 1 else shape
