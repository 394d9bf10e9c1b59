"""The catalogue's second half: gradients, layouts, what belongs to the caller, and bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as changed
from functools import partial

import torch

from normkit.testing import judges, layouts
from normkit.testing.cases import (
    CATALOGUE,
    CORRECTED,
    FAR,
    GRADIENTS,
    VALUES,
    Case,
    Plan,
    adversarial_row,
    bits_of,
    qkv_view,
    rows_for_layouts,
)
from normkit.testing.inputs import Inputs, adversarial

gradients = judges.gradients
add = CATALOGUE.add


@add("G1", gradients, backward=True)
def random_gradients(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """dx, dw and db of random rows, weights and upstream gradients are right."""
    for dtype in plan.dtypes:
        for n in plan.widths(1, 2, 5, 17, 127, 768, 1000):
            yield f"{dtype}, width {n}", plan.random((7, n), dtype, seed=n)


@add("C8", gradients, backward=True)
def three_axes(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Gradients of a (5, 7, n) input are those of its (35, n) view."""
    for n in plan.widths(64):
        yield "", plan.random((5, 7, n), torch.float32)


@add("C5", partial(gradients, frozen=True), backward=True)
def frozen_parameters(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """With weight and bias frozen, dx is still there and right."""
    for n in plan.widths(64):
        yield "", plan.random((3, n), torch.float32)


@add("C17", partial(gradients, graph=True), backward=True)
def graph_kept(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """create_graph=True gives the same gradients, also with a weight other than 1."""
    for n in plan.widths(64):
        yield "", plan.random((3, n), torch.float32)


@add("C14", judges.second_order, backward=True)
def derivative_of_the_gradient(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Second derivatives are right, or an error; never silently wrong.

    To half of float32's digits (2^-12): see normkit.testing.judges.second_order.
    """
    for n in plan.widths(2, 8):
        yield f"width {n}", plan.random((3, n), torch.float64)


@add("A15b", gradients, backward=True)
def lost_epsilon(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """ε = 1e-12 and a zero row: gradients are finite, up to the dtype's range."""
    spec = plan.subject.spec
    if spec.statistic_dtype == "float32" and spec.eps == "inside":
        for dtype in plan.dtypes:
            for n in plan.widths(16):
                yield str(dtype), plan.inputs(torch.zeros(1, n, dtype=dtype), 1e-12)


@add("D7b", gradients, backward=True)
def no_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Without rows dw and db are 0, not missing."""
    for n in plan.widths(5):
        yield "", plan.random((0, n), torch.float32)


@add("C11", gradients, backward=True)
def many_rows(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """Gradients of 65 537 rows: every row counts in dw."""
    for n in plan.widths(8):
        if n <= 64:
            yield "65537 rows", plan.random((65537, n), torch.float32)


@add("C3", partial(gradients, sum_used=False), backward=True)
def residual_gradient(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """The residual receives x's gradient also when only y is used."""
    if plan.subject.residual:
        for dtype in plan.dtypes:
            for n in plan.widths(64):
                yield str(dtype), plan.random((3, n), dtype)


for _name in adversarial(4):
    _far = _name == FAR
    CATALOGUE.cases.append(
        Case(
            f"G: {_name}",
            "This row's gradients are right.",
            CORRECTED if _far else GRADIENTS,
            adversarial_row(_name),
            gradients,
            backward=True,
            corrected=_far,
        )
    )


def _add_layouts() -> None:
    for layout, make in layouts.LAYOUTS.items():
        line = (
            f"x {(make.__doc__ or '').split('values ')[-1].rstrip('.')}: y is right."
            if layout != "expanded"
            else "An expanded row: y is right."
        )
        name = {"sliced": "D5"}.get(layout, f"L: {layout}")
        for suffix, backward, bound in (("", False, VALUES), (", gradients", True, GRADIENTS)):
            judge = partial(layouts.in_layout, layout=layout, backward=backward)
            text = line if not backward else line.replace("y is right", "gradients are right")
            CATALOGUE.cases.append(Case(name + suffix, text, bound, rows_for_layouts, judge, backward))
        line = f"An upstream gradient in this layout ({layout}) gives the same gradients."
        judge = partial(layouts.upstream_in_layout, layout=layout)
        CATALOGUE.cases.append(Case(f"U: {layout}", line, GRADIENTS, rows_for_layouts, judge, backward=True))


_add_layouts()


def _small(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    for dtype in plan.dtypes:
        for n in plan.widths(64):
            given = plan.random((3, n), dtype)
            yield str(dtype), given
            if dtype == torch.float32:
                yield "strided, between the caller's other numbers", layouts.laid_out(given, "strided")


_CHANGED = "Bit for bit."
CATALOGUE.cases += [
    Case(
        "D1b",
        "Gradients of heads viewed out of a joint projection.",
        GRADIENTS,
        qkv_view,
        partial(layouts.as_given, backward=True),
        backward=True,
    ),
    Case(
        "B13",
        "Nothing that the caller owns is changed by the forward.",
        _CHANGED,
        _small,
        partial(judges.untouched, backward=False),
    ),
    Case(
        "C1",
        "Nothing that the caller owns is changed by the backward.",
        _CHANGED,
        _small,
        partial(judges.untouched, backward=True),
        backward=True,
    ),
]


def _one_row(plan: Plan) -> Iterator[tuple[str, Inputs]]:
    for dtype in plan.dtypes:
        for n in plan.widths(17, 768):
            yield f"{dtype}, width {n}", plan.random((1, n), dtype)


for _backward in (False, True):
    _what = "y and dx" if _backward else "y"
    CATALOGUE.cases += [
        bits_of(
            "I1" + "b" * _backward,
            layouts.row_bits,
            f"A row's bits in {_what} do not depend on the rows around it.",
            backward=_backward,
        ),
        bits_of(
            "I2" + "b" * _backward,
            layouts.layout_bits,
            f"The bits of {_what} do not depend on the layout of x.",
            backward=_backward,
        ),
        changed(
            bits_of(
                "I3" + "b" * _backward,
                layouts.row_bits_repeated,
                f"A row alone and 1000 of it: the same bits in {_what}.",
                backward=_backward,
            ),
            make=_one_row,
            judge=partial(layouts.row_bits_repeated, backward=_backward, count=1000),
        ),
    ]
