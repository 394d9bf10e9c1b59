"""The catalogue: what is asked of every norm. A check's docstring is its description and the reason for its bound.

Letters and numbers such as A4 or D8 name kinds of faults that were reported in public: A statistics, B dtypes and
roundings, C backward, D shapes and strides. V are values, G gradients, N non-finite input, I bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import cleandoc

import torch
from torch import Tensor

from normkit.testing import judges, layouts
from normkit.testing.inputs import Inputs, adversarial, fitting, randn
from normkit.testing.judges import Judge
from normkit.testing.subject import Subject

WIDTHS = (1, 2, 3, 5, 8, 17, 64, 127, 768, 1000, 4096)


@dataclass(frozen=True)
class Plan:
    """What applies to this subject, and how inputs for it are made."""

    subject: Subject
    dtypes: Sequence[torch.dtype]
    backward: bool

    def widths(self, *wanted: int) -> Sequence[int]:
        """Return the widths asked for, or the only one the subject has."""
        return wanted if self.subject.width is None else (self.subject.width,)

    def parameter(self, n: int, dtype: torch.dtype, *, seed: int = 11, neutral: bool = False) -> Tensor:
        """Return a weight: random, or one whose gain is 1."""
        offset = self.subject.spec.weight.startswith("one_plus")
        if neutral:
            return torch.full((n,), 0.0 if offset else 1.0, dtype=dtype)
        return randn(n, seed=seed, dtype=dtype)

    def inputs(
        self, x: Tensor, eps: float = 1e-6, *, neutral: bool = False, wdtype: torch.dtype | None = None
    ) -> Inputs:
        """Return x with parameters (and a zero residual, which `Subject.fit` adds)."""
        n, dtype = x.shape[-1], wdtype or x.dtype
        takes = self.subject.takes_weight
        return Inputs(
            x,
            self.parameter(n, dtype, neutral=neutral) if takes else None,
            randn(n, seed=12, dtype=dtype) if self.subject.takes_bias and not neutral else None,
            eps=eps,
        )

    def random(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0, wdtype: torch.dtype | None = None
    ) -> Inputs:
        """Return random inputs with a random residual."""
        made = self.inputs(randn(*shape, seed=seed, dtype=dtype), wdtype=wdtype)
        residual = randn(*shape, seed=seed + 20, dtype=dtype) if self.subject.residual else None
        return Inputs(made.x, made.weight, made.bias, residual, made.eps)


Maker = Callable[[Plan], Iterator[tuple[str, Inputs]]]


@dataclass(frozen=True)
class Case:
    """One check.

    Args:
        id, line, bound: its name, what it asks, and where its bound comes from.
        make: yields labelled inputs; none where the check does not apply.
        judge: says what is wrong with one of them.
        backward: needs gradients.
        optional: says something worth knowing, which fails only when bits are asked for.
        may_refuse: a clear error is as right as a result.
        corrected: what rounding leaves in a mean must be taken out again; elsewhere only where `check` is told to
        be strict.
    """

    id: str
    line: str
    bound: str
    make: Maker
    judge: Judge
    backward: bool = False
    optional: bool = False
    may_refuse: bool = False
    corrected: bool = False


@dataclass
class Catalogue:
    """Checks in order; `add` turns a maker of inputs into one."""

    cases: list[Case] = field(default_factory=lambda: [])

    def add(
        self, id: str, judge: Judge, *, backward: bool = False, may_refuse: bool = False, corrected: bool = False
    ) -> Callable[[Maker], Maker]:
        """Register the decorated maker under ``id``; its docstring says what is asked."""

        def register(make: Maker) -> Maker:
            line, _, bound = cleandoc(make.__doc__ or "").partition("\n")
            usual = CORRECTED if corrected else GRADIENTS if backward else VALUES
            self.cases.append(
                Case(
                    id,
                    line,
                    bound.strip() or usual,
                    make,
                    judge,
                    backward,
                    may_refuse=may_refuse,
                    corrected=corrected,
                )
            )
            return make

        return register


CORRECTED = (
    "What rounding leaves in the mean, δ = 130·2^-24·|μ|, must be taken out again "
    "(a second look at the mean of x − μ̂ does it): then δ·2^-24 of it is left instead of δ (normkit.testing.truth)."
)
VALUES = (
    "y must lie in the interval of right answers (normkit.testing.truth): float32 statistics summed in blocks, "
    "then the spec's roundings, end by end."
)
GRADIENTS = (
    "2·min(n, 128) + 20 roundings of each term of dx, x̂'s own error, and where the spec rounds before it weighs four "
    "roundings of the half type; dw and db: their rows summed in any order (normkit.testing.truth)."
)

CATALOGUE = Catalogue()
FAR = "1e4 ± .005"  # the row on which a plain two-pass has hardly a digit right
values, gradients = judges.values, judges.gradients


def _one(x: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor([list(x)], dtype=dtype)


def adversarial_row(name: str) -> Maker:
    """Return a maker of one adversarial row in every dtype that holds it."""

    def make(plan: Plan) -> Iterator[tuple[str, Inputs]]:
        for dtype in plan.dtypes:
            for n in plan.widths(768, 1000, 4096):
                row = fitting(adversarial(n), dtype).get(name)
                # Squares of 1e18 leave bfloat16's range by declaration where the spec forms them in bfloat16.
                declared = plan.subject.spec.statistic_dtype == "input" and dtype != torch.float32 and name == "1e18"
                if row is not None and not declared:
                    yield f"{dtype}, width {n}", plan.inputs(row, 1e-5)

    return make


@CATALOGUE.add("V1", values)
def random_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Random rows of every width, powers of two or not, come out right, in the dtype that the spec says."""
    for dtype in plan.dtypes:
        for n in plan.widths(*WIDTHS):
            yield f"{dtype}, width {n}", plan.random((3, n), dtype, seed=n)


for _name in adversarial(4):
    _far = _name == FAR
    CATALOGUE.cases.append(
        Case(
            f"V: {_name}",
            "This row comes out right.",
            CORRECTED if _far else VALUES,
            adversarial_row(_name),
            values,
            corrected=_far,
        )
    )


@CATALOGUE.add("A1", values)
def far_from_zero(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """A mean far above the deviation costs no digits: no one-pass variance."""
    if plan.subject.spec.centered:
        yield "mean 2000, deviation 1, (5, 4)", plan.inputs(2000 + randn(5, 4), 1e-5, neutral=True)
        yield "100 ± .01, width 32768", plan.inputs(100 + 0.01 * randn(2, 32768), 1e-5, neutral=True)


@CATALOGUE.add("A2", values)
def four_neighbours(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Four neighbouring numbers at 40000 and at 80000: ∓1.34 and ∓.447, not NaN."""
    if plan.subject.spec.centered:
        for start in (40000.0, 80000.0):
            yield f"{start:g}", plan.inputs(_one([start + i for i in range(4)], torch.float32), 1e-5, neutral=True)


@CATALOGUE.add("A4", values)
def one_step_off(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """10240 numbers, all 256 but the last, 255: a variance of 9.8e-5, not a negative one."""
    if plan.subject.spec.centered:
        yield "", plan.inputs(_one([256.0] * 10239 + [255.0], torch.float32), 1e-5, neutral=True)


@CATALOGUE.add("A5", values)
def squares_of_3000(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """float16 rows of 3000 come out as 1, not as 0: their squares are summed in float32."""
    if torch.float16 in plan.dtypes and plan.subject.spec.statistic_dtype == "float32":
        for n in plan.widths(64):
            yield "", plan.inputs(torch.full((1, n), 3000.0, dtype=torch.float16), neutral=True)


@CATALOGUE.add("A6", values)
def squares_of_300(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """float16 rows of 300 come out as 1: x² is formed after the upcast."""
    if torch.float16 in plan.dtypes and plan.subject.spec.statistic_dtype == "float32":
        for n in plan.widths(8):
            yield "", plan.inputs(torch.full((1, n), 300.0, dtype=torch.float16), neutral=True)


@CATALOGUE.add("A11", values, corrected=True)
def constant_row(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """A constant row has no deviation: exactly the bias."""
    if plan.subject.spec.centered:
        yield "(2,)", plan.inputs(_one([14.0, 14.0], torch.float32), 1e-6)


@CATALOGUE.add("A13", gradients, backward=True, corrected=True)
def width_one(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """At width 1 a centred norm is its bias: dw and dx are 0, db is Σdy."""
    if plan.subject.spec.centered:
        yield "", plan.inputs(_one([1e6], torch.float32), 1e-5)


@CATALOGUE.add("A15", values)
def lost_epsilon(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """ε = 1e-12, which float16 cannot hold, still keeps constant and zero rows finite."""
    for dtype in plan.dtypes:
        if plan.subject.spec.statistic_dtype == "float32" and plan.subject.spec.eps == "inside":
            for n in plan.widths(16):
                for value in (0.0, 14.0) if plan.subject.spec.centered else (0.0,):
                    yield f"{dtype}, {value:g}", plan.inputs(torch.full((1, n), value, dtype=dtype), 1e-12)


@CATALOGUE.add("A18", values)
def epsilon_counts(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """ε is the one given, and where the spec puts it: rows of ±1e-3 with ε = 1e-6 and 1e-5."""
    for n in plan.widths(8):
        x = torch.tensor([1e-3, -1e-3]).repeat((n + 1) // 2)[None, :n]
        for eps in (1e-6, 1e-5):
            yield f"eps {eps:g}", plan.inputs(x, eps, neutral=True)


@CATALOGUE.add("B2", values)
def cast_order(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Rounding before or after the weight, as the spec says: bfloat16 [1, 3, 5, 7], w = .90234375."""
    if torch.bfloat16 in plan.dtypes and plan.subject.takes_weight:
        offset = 1.0 if plan.subject.spec.weight.startswith("one_plus") else 0.0
        for n in plan.widths(4):
            x = torch.tensor([1.0, 3.0, 5.0, 7.0]).repeat((n + 3) // 4)[None, :n].to(torch.bfloat16)
            yield "", Inputs(x, torch.full((n,), 0.90234375 - offset, dtype=torch.bfloat16))


@CATALOGUE.add("B7", values, may_refuse=True)
def mixed_dtypes(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """A weight of another dtype is computed with, in the dtype that the spec says, or refused with an error."""
    if plan.subject.takes_weight:
        for dtype in plan.dtypes:
            for wdtype in (torch.float32, torch.bfloat16):
                for n in plan.widths(64):
                    if dtype != wdtype:
                        yield f"x {dtype}, weight {wdtype}", plan.random((3, n), dtype, wdtype=wdtype)


@CATALOGUE.add("D16", values, may_refuse=True)
def optional_parameters(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """A missing weight is exactly 1, a missing bias exactly 0 (or refused with an error)."""
    for n in plan.widths(64):
        full = plan.random((3, n), torch.float32)
        for w, b in ((True, False), (False, True), (False, False)):
            if (w or plan.subject.takes_weight) and (not b or plan.subject.takes_bias):
                kept = ", ".join(name for name, there in (("weight", w), ("bias", b)) if there) or "neither"
                yield kept, Inputs(full.x, full.weight if w else None, full.bias if b else None, full.residual)


@CATALOGUE.add("D7", values)
def no_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """No rows in, no rows out."""
    for n in plan.widths(5):
        for shape in ((0, n), (0, 5, n), (2, 0, n)):
            yield str(shape), plan.random(shape, torch.float32)


@CATALOGUE.add("D8", values)
def many_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """65 535, 65 536 and 65 537 rows: every one of them is computed."""
    for count in (65535, 65536, 65537):
        for n in plan.widths(8):
            if n <= 64:
                yield f"{count} rows", plan.random((count, n), torch.float32)


@CATALOGUE.add("D10", values)
def wide_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Wide rows, beyond any block, are read to their end."""
    if plan.subject.width is None:
        for n in (6144, 16384, 46336, 65537):
            yield f"width {n}", plan.random((1, n), plan.dtypes[-1])


def qkv_view(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Heads viewed out of a joint q, k, v projection come out as from a copy."""
    for dtype in plan.dtypes:
        for n in plan.widths(128):
            q, k, _ = randn(6, 4 * n, dtype=dtype).split([2 * n, n, n], dim=-1)
            yield f"{dtype}, q", plan.inputs(q.unflatten(-1, (2, n)))
            yield f"{dtype}, k", plan.inputs(k)


def rows_for_layouts(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Yield what layouts and gradients are tried on."""
    for dtype in plan.dtypes:
        for n in plan.widths(17, 256):
            yield f"{dtype}, width {n}", plan.random((6, n), dtype)


CATALOGUE.add("D1", partial(layouts.as_given, backward=False))(qkv_view)


@CATALOGUE.add("N1", layouts.nan_stays)
def non_finite(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """NaN and inf spoil their own row, all of it, and no other."""
    for dtype in plan.dtypes:
        for n in plan.widths(64):
            yield str(dtype), plan.random((6, n), dtype)


def bits_of(name: str, judge: Callable[..., judges.Problem | None], line: str, *, backward: bool) -> Case:
    """Return an optional check of bits."""
    bound = "Bit for bit: the order of a row's sums may depend on nothing but its width."
    return Case(name, line, bound, rows_for_layouts, partial(judge, backward=backward), backward, optional=True)
