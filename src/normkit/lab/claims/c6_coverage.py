"""C6: batch, layer, instance and group norm are one formula; only the axes of (N, L, C) under the statistic differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from normkit.conventions import TORCH_LAYER_NORM
from normkit.coverage import COVERAGE, Coverage
from normkit.functional import batch_norm, group_norm, instance_norm, layer_norm, normalize
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

SHAPE = (3, 5, 8)
N, L, C = SHAPE
GROUPS, EPS = 2, 1e-5
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: batch_norm(x, None, None, training=True, eps=EPS),
    "layer": lambda x: layer_norm(x, eps=EPS),
    "instance": lambda x: instance_norm(x, eps=EPS),
    "group": lambda x: group_norm(x, GROUPS, eps=EPS),
    "group-of-1": lambda x: group_norm(x, C, eps=EPS),
    "group-of-all": lambda x: group_norm(x, 1, eps=EPS),
}
ROLES = tuple(COVERAGE)


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in NORMS]


def loops(x: Tensor, row: Coverage, group_size: int) -> Tensor:
    """Normalize element by element: gather all that share a statistic, sum exactly, no axis and no vector operation."""
    places = list(product(range(N), range(L), range(C)))
    values = {place: float(x[place]) for place in places}
    y = torch.empty(SHAPE, dtype=torch.float64)
    for place in places:
        shared = [values[other] for other in places if row.covers(place, other, group_size)]
        mean = math.fsum(shared) / len(shared)
        variance = math.fsum((v - mean) ** 2 for v in shared) / len(shared)
        y[place] = (values[place] - mean) / math.sqrt(variance + EPS)
    return y


def formula(x: Tensor, row: Coverage) -> Tensor:
    """Normalize with the one formula, told nothing but the row's axes; C is split so that a group is an axis too."""
    split = x.reshape(N, L, GROUPS, C // GROUPS)
    positions = {"N": (0,), "L": (1,), "C": (2, 3), "C/G": (3,)}
    axes = tuple(axis for name in row.axes for axis in positions[name])
    return normalize(split, TORCH_LAYER_NORM, axes=axes, eps=EPS).reshape(SHAPE)


def _measure(params: Params, bench: Bench) -> Values:
    x = bench.draws.randn(*SHAPE, dtype=torch.float64)
    y = NORMS[params["norm"]](x.to(bench.settings.device)).cpu()
    values: Values = {}
    for name, row in COVERAGE.items():
        values[f"loops/{name}"] = float((y - loops(x, row, C // GROUPS)).abs().max())
        values[f"formula/{name}"] = float((y - formula(x.to(bench.settings.device), row).cpu()).abs().max())
    return values


STUDY = Study(id="coverage", arms=_arms, measure=_measure, seconds=lambda params: 0.03, seeds=1)

_EXACT = 1e-12
_EXACT_REASON = (
    "float64 rounding: at most 40 numbers a statistic at u = 1.1×10⁻¹⁶ each, and a root and a division on "
    "values up to 6, is below 10⁻¹³ on both sides"
)
_DIFFERENT_REASON = (
    "outputs have unit variance; means over at most 40 different numbers differ by .16 or more, rounding by 10⁻¹³"
)


def _same(e: Evidence, role: str, against: str, words: str) -> Criterion:
    return Criterion(words, e.numbers(role, against), "at_most", 0.0, _EXACT, _EXACT_REASON, every=True)


def _different(e: Evidence, role: str, other: str, words: str) -> Criterion:
    values = e.numbers(role, f"loops/{other}")
    return Criterion(words, values, "above", 0.0, 0.01, _DIFFERENT_REASON, every=True)


def _criteria(e: Evidence) -> list[Criterion]:
    same = [
        criterion
        for role in ROLES
        for criterion in (
            _same(e, role, f"loops/{role}", f"{role} norm: largest distance from its loops"),
            _same(e, role, f"formula/{role}", f"{role} norm: largest distance from the formula with its axes"),
        )
    ]
    different = [
        _different(e, role, other, f"{role} norm: largest distance from {other} norm's loops")
        for role in ROLES
        for other in ROLES
        if other != role
    ]
    traps = [
        _same(e, "group-of-1", "loops/instance", "groups of one channel: distance from instance norm"),
        _different(e, "group-of-all", "layer", "one group of all channels: distance from layer norm"),
    ]
    return [*same, *different, *traps]


def _summary(e: Evidence) -> str:
    own = max(v for r in ROLES for kind in ("loops", "formula") for v in e.numbers(r, f"{kind}/{r}"))
    other = min(v for r in ROLES for o in ROLES if o != r for v in e.numbers(r, f"loops/{o}"))
    return (
        f"each norm equals its loops and the one formula to {number(own, 1)}; with another's axes it is off by "
        f"{number(other, 3)} or more"
    )


def _figures(e: Evidence) -> list[Chart]:
    own = {**{role: role for role in ROLES}, "group-of-1": "instance"}  # one group of all is nobody's own
    names = [*ROLES, "group-of-1", "group-of-all"]
    floor = 2.0**-53  # a distance of zero has no place on a logarithmic axis

    def points(label: str, heights: dict[str, float]) -> Series:
        places = [names.index(name) for name in heights]
        return Series(label, places, [max(floor, y) for y in heights.values()], kind="points")

    others = {name: [e.first(name, f"loops/{r}") for r in ROLES if r != own.get(name)] for name in names}
    return [
        Chart(
            caption=f"Largest distance between each function and brute-force loops on a {N} × {L} × {C} tensor: its "
            f"own, and the nearest of the others (groups of {C // GROUPS} channels; group-of-1: one channel a group, "
            "whose own are instance norm's; group-of-all: one group, which has none). Distances "
            "below 1.1×10⁻¹⁶ are drawn there.",
            alt="Each function lies near 10⁻¹⁵ for its own loops and for the formula with its axes, and above 1 for "
            "the nearest other loops; groups of one channel match instance norm, one group of all channels matches "
            "none.",
            panels=[
                Panel(
                    "who agrees with whom",
                    "function",
                    "largest distance",
                    [
                        points("the formula with its axes", {r: e.first(r, f"formula/{r}") for r in ROLES}),
                        points("its own loops", {name: e.first(name, f"loops/{r}") for name, r in own.items()}),
                        points("nearest other loops", {name: min(ys) for name, ys in others.items()}),
                    ],
                    y_scale="log",
                    x_names=names,
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C6",
        title="Four norms, one difference",
        sentence="The normalization methods differ in one thing only: along which dimensions of (N, L, C) "
        "mean and variance are taken. Their formulas are the same.",
        sentences=(14,),
        source="Article, “The dimensions of the statistic”, table and figure; Wu and He 2018, arXiv 1803.08494.",
        measured="Batch (training), layer, instance and group norm of one random tensor in float64, "
        "against loops that gather for each element what shares its statistic, and against a single "
        "formula that is told the axes and nothing else.",
        study=STUDY,
        plays={name: name for name in NORMS},
        literal=Rule(
            text="Each norm equals its own loops and the one formula with its row of axes to 10⁻¹², and no "
            "other norm's loops to 10⁻²; group norm is instance norm with one channel a group, and with "
            "one group it is not layer norm.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="Every norm in its neighbour's place: held against the wrong axes, none may agree.",
            plays={
                **{name: name for name in NORMS},
                **dict(zip(ROLES, (*ROLES[1:], ROLES[0]), strict=True)),
            },
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The formula with other axes reproduces each norm to the last digits, so nothing else "
            "differs while statistics come from the batch. Two differences lie outside the formula: batch "
            "norm replaces its statistics by remembered ones at inference, and only layer norm leaves "
            "other positions out.",
            status="tested",
        ),
    ),
)
